"""Reads the words of cli/common/options.py into a model, a setup and hardware."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from enum import StrEnum
from typing import Any

from fsdp_bench.catalog.hf_config import read_hf_config, read_sliding_window, sliding_window_note
from fsdp_bench.catalog.ladder import nearest_size
from fsdp_bench.catalog.loader import Catalog, load_user_catalog
from fsdp_bench.catalog.lookup import POSITIONS, Hardware, Placement, find_placement
from fsdp_bench.cli.common.options import SETUP_FIELDS, SetupWords
from fsdp_bench.plan.defaults import DEFAULT_PRECISION, DEFAULT_SEQUENCE_LENGTH
from fsdp_bench.report.terminal import print_line
from fsdp_bench.simulate.wrappers.units import why_impossible
from fsdp_bench.spec.codec import from_words
from fsdp_bench.spec.errors import SpecError, shown
from fsdp_bench.spec.model import Family, ModelShape
from fsdp_bench.spec.setup import (
    Api,
    Checkpointing,
    Offload,
    OptimizerKind,
    Precision,
    ShardingStrategy,
    TrainSetup,
    Wrap,
)
from fsdp_bench.spec.units import parse_count

PRECISIONS = ("fp32", "bf16-mixed", "bf16-mixed-bf16-reduce", "fp16-mixed", "bf16-true")
"""What ``--precision all`` stands for."""

USUAL_GPUS_PER_NODE = 8
"""Of nodes that nobody describes: of the catalogue's servers most have as many."""

_VOCABULARIES: dict[str, type[StrEnum]] = {
    "strategy": ShardingStrategy,
    "api": Api,
    "offload": Offload,
    "checkpointing": Checkpointing,
    "optimizer": OptimizerKind,
}
_LISTS = (*_VOCABULARIES, "precision")

_FIELDS = {name: field for name, field in SETUP_FIELDS.items() if name not in (*_LISTS, "min_num_params")}
"""Options whose one value is a field's as it stands, and the field's name."""


def read_setup(words: SetupWords) -> tuple[ModelShape, TrainSetup, Hardware]:
    """Read the words of one setup.

    Raises:
        SpecError: for words that are not allowed, and for setups that cannot run on GPUs, with the reason.
    """
    catalog = load_user_catalog(words.catalog)
    setups, hardware = _setups(words, catalog)
    if len(setups) > 1:
        several = next(name for name in _LISTS if len(_values(name, getattr(words, name))) > 1)
        raise SpecError(f"{several}: {shown(getattr(words, several))} is several values; one is allowed here")
    (setup,) = setups
    model = _model(words, catalog, setup.sequence_length)
    if (reason := why_impossible(model, setup, "cuda")) is not None:
        raise SpecError(reason)
    warn_of_sliding_window(words, setup.sequence_length)
    return model, setup, hardware


def read_setups(words: SetupWords) -> tuple[tuple[TrainSetup, ...], Hardware]:
    """Read the words of every combination of the options that take lists, without a model.

    Combinations that cannot run are among them; spec.setup.impossible says why.

    Raises:
        SpecError: for words that are not allowed.
    """
    return _setups(words, load_user_catalog(words.catalog))


def read_model(words: SetupWords) -> ModelShape:
    """Read the model alone.

    Raises:
        SpecError: when the words name none, several, or one that does not exist or cannot be expressed.
    """
    catalog = load_user_catalog(words.catalog)
    return _model(words, catalog, _with_defaults(words, catalog).seq or DEFAULT_SEQUENCE_LENGTH)


def _with_defaults(words: SetupWords, catalog: Catalog) -> SetupWords:
    """Return the words with the precision and the sequence length that all commands use where none is given.

    The sequence length is that of DEFAULT_SEQUENCE_LENGTH, or all positions of a named model that has fewer.
    """
    precision = words.precision or DEFAULT_PRECISION
    if words.seq is not None:
        return replace(words, precision=precision)
    is_named = words.params is None and (words.model is not None or words.hf_config is not None)
    positions = _model(words, catalog, 1).max_position_embeddings if is_named else DEFAULT_SEQUENCE_LENGTH
    return replace(words, precision=precision, seq=min(DEFAULT_SEQUENCE_LENGTH, positions))


def sliding_window_of(words: SetupWords) -> int | None:
    """Return the sliding window of a model that ``--hf-config`` names; None for every other model.

    Raises:
        SpecError: as read_model.
    """
    return read_sliding_window(words.hf_config) if words.hf_config else None


def warn_of_sliding_window(words: SetupWords, sequence_length: int) -> None:
    """Say on standard error what is not modelled of sequences that long."""
    window = sliding_window_of(words)
    if window is not None and sequence_length > window:
        print_line(f"note: {sliding_window_note(window)}", error=True)


def _model(words: SetupWords, catalog: Catalog, sequence_length: int) -> ModelShape:
    named = {"--model": words.model, "--hf-config": words.hf_config, "--params": words.params}
    given = [option for option, value in named.items() if value is not None]
    if not given:
        raise SpecError("no model is named; --model NAME, --hf-config FILE or --params 7B")
    if len(given) > 1:
        raise SpecError(f"{' and '.join(given)} each name a model; keep one")
    if words.params is not None:
        family = Family(words.family or "llama")
        positions = max(sequence_length, POSITIONS[family])
        return nearest_size(family, parse_count(words.params, "params"), positions=positions)
    if words.family is not None:
        raise SpecError(f"family: goes with --params; {given[0]} has its own")
    shape = read_hf_config(words.hf_config) if words.hf_config else catalog.model(str(words.model)).shape()
    if shape.family is Family.GPT2 and sequence_length > shape.max_position_embeddings:
        raise SpecError(
            f"seq: {sequence_length} is not allowed; {shape.name} has {shape.max_position_embeddings} learned positions"
        )
    return shape


def _setups(words: SetupWords, catalog: Catalog) -> tuple[tuple[TrainSetup, ...], Hardware]:
    words = _with_defaults(words, catalog)
    place = _place(words, catalog)
    common = {field: getattr(words, name) for name, field in _FIELDS.items() if getattr(words, name) is not None}
    if words.min_num_params is not None:
        if (words.wrap or "").strip().lower() != Wrap.SIZE:
            raise SpecError("min-num-params: only --wrap size has one, the smallest FSDP unit")
        common["min_num_params"] = parse_count(words.min_num_params, "min-num-params")
    setups = tuple(
        from_words({**common, **cell, **_sharding(words, cell, place)}, TrainSetup) for cell in _cells(words)
    )
    if words.shard_size is not None and not any(setup.strategy.is_hybrid for setup in setups):
        raise SpecError("shard-size: only HYBRID_SHARD and _HYBRID_SHARD_ZERO2 have one")
    return setups, place.hardware


def _cells(words: SetupWords) -> Iterator[dict[str, Any]]:
    """Cross the options that may have several values."""
    values = {name: _values(name, getattr(words, name)) for name in _LISTS if getattr(words, name) is not None}
    for cell in itertools.product(*values.values()):
        yield dict(zip(values, cell, strict=True))


def _values(name: str, text: str | None) -> list[str]:
    """Split a list by comma; ``all`` is the whole vocabulary; a value given twice counts once."""
    known = PRECISIONS if name == "precision" else tuple(member.value for member in _VOCABULARIES[name])
    if text is None or text.strip().lower() == "all":
        return list(known) if text else []
    read = Precision.parse if name == "precision" else _VOCABULARIES[name]
    return list(dict.fromkeys(str(read(word)) for word in text.split(",")))


def _sharding(words: SetupWords, cell: dict[str, Any], place: Placement) -> dict[str, int]:
    """Return the world size, and the shard size of hybrid strategies."""
    strategy = ShardingStrategy(cell.get("strategy", TrainSetup().strategy))
    return place.sizes(strategy, words.shard_size if strategy.is_hybrid else None)


def _place(words: SetupWords, catalog: Catalog) -> Placement:
    each = words.gpus_per_node
    if words.server is None and words.world_size is None and each is None and (words.nodes or 1) > 1:
        each = USUAL_GPUS_PER_NODE
        print_line(f"note: {each} GPUs on each node are assumed; --gpus-per-node says how many", error=True)
    return find_placement(words.gpu, words.server, words.nodes, each, words.world_size, catalog)
