"""Reads the words of cli/options.py into a model, a setup and hardware."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from enum import StrEnum
from typing import Any, NamedTuple

import click

from fsdp_bench.catalog.hf_config import read_hf_config, read_sliding_window, sliding_window_note
from fsdp_bench.catalog.loader import Catalog, load_user_catalog
from fsdp_bench.cli.options import SETUP_FIELDS, SetupWords
from fsdp_bench.predict.units import why_impossible
from fsdp_bench.spec.codec import from_words
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import Cluster, Gpu
from fsdp_bench.spec.ladder import rung
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

Hardware = Cluster | Gpu | None
"""A cluster of known servers, a GPU alone, or nothing known."""

POSITIONS = {Family.LLAMA: 4096, Family.GPT2: 1024}
"""Positions of the ladder's models; a longer sequence gets as many as it needs, as in sweep files."""

PRECISIONS = ("fp32", "bf16-mixed", "bf16-mixed-bf16-reduce", "fp16-mixed", "bf16-true")
"""What ``--precision all`` stands for."""

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


class _Place(NamedTuple):
    """Where a run takes place; the number of nodes is None when only the world size is known."""

    hardware: Hardware
    num_nodes: int | None
    gpus_per_node: int
    world_size: int


def read_setup(words: SetupWords) -> tuple[ModelShape, TrainSetup, Hardware]:
    """Read the words of one setup.

    Raises:
        SpecError: for words that are not allowed, and for setups that cannot run on GPUs, with the reason.
    """
    catalog = load_user_catalog(words.catalog)
    setups, hardware = _setups(words, catalog)
    if len(setups) > 1:
        several = next(name for name in _LISTS if len(_values(name, getattr(words, name))) > 1)
        raise SpecError(f"{several}: {getattr(words, several)!r} is several values; one is allowed here")
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
    return _model(words, load_user_catalog(words.catalog), words.seq or TrainSetup().sequence_length)


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
        click.echo(f"note: {sliding_window_note(window)}", err=True)


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
        return rung(family, parse_count(words.params, "params"), positions=positions)
    if words.family is not None:
        raise SpecError(f"family: goes with --params; {given[0]} has its own")
    shape = read_hf_config(words.hf_config) if words.hf_config else catalog.model(str(words.model)).shape()
    if shape.family is Family.GPT2 and sequence_length > shape.max_position_embeddings:
        raise SpecError(
            f"seq: {sequence_length} is not allowed; {shape.name} has {shape.max_position_embeddings} learned positions"
        )
    return shape


def _setups(words: SetupWords, catalog: Catalog) -> tuple[tuple[TrainSetup, ...], Hardware]:
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


def _sharding(words: SetupWords, cell: dict[str, Any], place: _Place) -> dict[str, int]:
    """Return the world size, and for hybrid strategies the shard size: a node's GPUs when there are several nodes."""
    sizes = {"world_size": place.world_size}
    if not ShardingStrategy(cell.get("strategy", TrainSetup().strategy)).is_hybrid:
        return sizes
    if words.shard_size is not None:
        sizes["shard_size"] = words.shard_size
    elif (place.num_nodes or 1) > 1 and place.gpus_per_node > 1:
        sizes["shard_size"] = place.gpus_per_node
    return sizes


def _place(words: SetupWords, catalog: Catalog) -> _Place:
    if words.server is not None and words.gpu is not None:
        raise SpecError("--server and --gpu each name the GPU; keep one")
    if words.world_size is not None and words.nodes is not None:
        raise SpecError("--world-size and --nodes each say how many GPUs; keep one")
    if words.server is None:
        nodes, each, world = _counts(words, None)
        return _Place(None if words.gpu is None else catalog.gpu(words.gpu), nodes, each, world)
    server = catalog.server(words.server)
    nodes, each, world = _counts(words, server.gpus_per_node)
    assert nodes is not None
    gpu = catalog.gpu(server.gpu)
    return _Place(Cluster(server=server, gpu=gpu, num_nodes=nodes, gpus_per_node=each), nodes, each, world)


def _counts(words: SetupWords, available: int | None) -> tuple[int | None, int, int]:
    """Return nodes, GPUs on each, and GPUs in total, for servers of ``available`` GPUs or for unknown ones."""
    if words.world_size is None:
        if words.gpus_per_node is None and available is None and (words.nodes or 1) > 1:
            raise SpecError("nodes: without --server, --gpus-per-node is needed too")
        nodes, each = words.nodes or 1, words.gpus_per_node or available or 1
        return nodes, each, nodes * each
    world = words.world_size
    if words.gpus_per_node is None and available is None:
        return None, world, world
    each = words.gpus_per_node or min(available or world, world)
    if world % each:
        raise SpecError(f"world-size: {world} is not allowed; a multiple of the {each} GPUs of a node")
    return world // each, each, world
