"""Functions that turn the options of cli/common/options.py into a model, a setup and hardware."""

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
from fsdp_bench.catalog.model_entry import FAMILIES
from fsdp_bench.catalog.recorded import read_recorded, recorded_model
from fsdp_bench.cli.common.options import SETUP_FIELDS, SetupOptions
from fsdp_bench.plan.defaults import DEFAULT_PRECISION, DEFAULT_SEQUENCE_LENGTH, USUAL_GPUS_PER_NODE
from fsdp_bench.report.terminal import print_line
from fsdp_bench.simulate.wrappers.units import why_impossible
from fsdp_bench.spec.codec import from_text, read_document
from fsdp_bench.spec.errors import SpecError, shown
from fsdp_bench.spec.lora import QUANTIZED, LoRA, parse_lora
from fsdp_bench.spec.model import Family
from fsdp_bench.spec.recording.model import Model
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
from fsdp_bench.sweep.recording import recorded_config

PRECISIONS = ("fp32", "bf16-mixed", "bf16-mixed-bf16-reduce", "fp16-mixed", "bf16-true")
"""The values of ``--precision all``."""

_VOCABULARIES: dict[str, type[StrEnum]] = {
    "strategy": ShardingStrategy,
    "api": Api,
    "offload": Offload,
    "checkpointing": Checkpointing,
    "optimizer": OptimizerKind,
}
_LISTS = (*_VOCABULARIES, "precision")

_FIELDS = {name: field for name, field in SETUP_FIELDS.items() if name not in (*_LISTS, "min_num_params")}
"""Options that take one value, each with the field of TrainSetup that gets this value unchanged."""


def read_setup(options: SetupOptions) -> tuple[Model, TrainSetup, Hardware]:
    """Read the options of one setup.

    Raises:
        SpecError: if an option is not allowed, or if the setup cannot run on GPUs.
    """
    catalog = load_user_catalog(options.catalog)
    setups, hardware = _setups(options, catalog)
    if len(setups) > 1:
        several = next(name for name in _LISTS if len(_values(name, getattr(options, name))) > 1)
        raise SpecError(f"{several}: {shown(getattr(options, several))} is several values; one is allowed here")
    (setup,) = setups
    model = _model(options, catalog, setup.sequence_length)
    if (reason := why_impossible(model, setup, "cuda")) is not None:
        raise SpecError(reason)
    warn_of_sliding_window(options, setup.sequence_length)
    return model, setup, hardware


def read_setups(options: SetupOptions) -> tuple[tuple[TrainSetup, ...], Hardware]:
    """Return a setup for every combination of the options that take lists, and the hardware; read no model.

    Combinations that cannot run are included; spec.setup.impossible returns the reason for each.

    Raises:
        SpecError: if an option is not allowed.
    """
    return _setups(options, load_user_catalog(options.catalog))


def read_model(options: SetupOptions) -> Model:
    """Read the model that the options name.

    Raises:
        SpecError: if the options name no model, several models, or a model that is unknown or not supported.
    """
    catalog = load_user_catalog(options.catalog)
    return _model(options, catalog, _with_defaults(options, catalog).seq or DEFAULT_SEQUENCE_LENGTH)


def _with_defaults(options: SetupOptions, catalog: Catalog) -> SetupOptions:
    """Return the options with the default precision and sequence length of all commands filled in.

    The default sequence length is DEFAULT_SEQUENCE_LENGTH, or all positions of a named model that has fewer.
    """
    precision = options.precision or DEFAULT_PRECISION
    if options.seq is not None:
        return replace(options, precision=precision)
    is_named = options.params is None and (options.model is not None or options.hf_config is not None)
    positions = DEFAULT_SEQUENCE_LENGTH
    if is_named and options.recorded is None and config_to_record(options, catalog) is None:
        positions = _model(options, catalog, 1).max_position_embeddings or positions
    return replace(options, precision=precision, seq=min(DEFAULT_SEQUENCE_LENGTH, positions))


def sliding_window_of(options: SetupOptions) -> int | None:
    """Return the sliding window of the model in ``--hf-config``; None for every other model.

    Raises:
        SpecError: as read_model.
    """
    if options.hf_config is None or config_to_record(options, load_user_catalog(options.catalog)) is not None:
        return None
    return read_sliding_window(options.hf_config)


def warn_of_sliding_window(options: SetupOptions, sequence_length: int) -> None:
    """Print a note on standard error if sequences are longer than the model's sliding window, which is not modelled."""
    window = sliding_window_of(options)
    if window is not None and sequence_length > window:
        print_line(f"note: {sliding_window_note(window)}", error=True)


def _model(options: SetupOptions, catalog: Catalog, sequence_length: int) -> Model:
    lora = read_lora(options)
    named = {
        "--model": options.model,
        "--hf-config": options.hf_config,
        "--recorded": options.recorded,
        "--params": options.params,
    }
    given = [option for option, value in named.items() if value is not None]
    if not given:
        raise SpecError("no model is named; --model NAME, --hf-config FILE, --recorded FILE or --params 7B")
    if len(given) > 1:
        raise SpecError(f"{' and '.join(given)} each name a model; keep one")
    if options.params is not None:
        family = Family(options.family or "llama")
        positions = max(sequence_length, POSITIONS[family])
        return nearest_size(family, parse_count(options.params, "params"), positions=positions)
    if options.family is not None:
        raise SpecError(f"family: goes with --params; {given[0]} has its own")
    if options.recorded is not None:
        return recorded_model(read_recorded(options.recorded), options.recorded.name.partition(".")[0])
    config = config_to_record(options, catalog)
    if config is not None:
        code = recorded_config(config, sequence_length, _tell_recording, lora)
        return recorded_model(code, config_name(options, config))
    shape = read_hf_config(options.hf_config) if options.hf_config else catalog.model(str(options.model)).shape()
    if shape.family is Family.GPT2 and sequence_length > shape.max_position_embeddings:
        raise SpecError(
            f"seq: {sequence_length} is not allowed; {shape.name} has {shape.max_position_embeddings} learned positions"
        )
    return shape


def read_config(options: SetupOptions) -> dict[str, Any] | None:
    """Return the config.json of the Hugging Face model that the options name; None where they name another model.

    Raises:
        SpecError: as read_model.
    """
    if options.params is not None or options.recorded is not None:
        return None
    if options.model is not None and options.hf_config is not None:
        return None
    return config_to_record(options, load_user_catalog(options.catalog))


def config_name(options: SetupOptions, config: dict[str, Any]) -> str:
    """Return the name of a Hugging Face model, with its adapters."""
    name = options.model or config.get("_name_or_path") or options.hf_config.absolute().parent.name  # type: ignore[union-attr]
    lora = read_lora(options)
    return str(name) if lora is None else f"{name} with {lora.title}"


def read_lora(options: SetupOptions) -> LoRA | None:
    """Read ``--lora`` or ``--qlora``; None if neither is given.

    Raises:
        SpecError: if it is not allowed, or goes with another model than one of Hugging Face's code.
    """
    given = [name for name in ("lora", "qlora") if getattr(options, name) is not None]
    if not given:
        return None
    (option, *more) = given
    if more:
        raise SpecError("--lora and --qlora: keep one")
    if (
        options.params is not None
        or options.recorded is not None
        or (options.code or "").strip().lower() == "benchmark"
    ):
        raise SpecError(
            f"{option}: adapters go into Hugging Face's code, --model or --hf-config; a recorded model has its own"
        )
    return parse_lora(getattr(options, option), option, base=QUANTIZED if option == "qlora" else None)


def config_to_record(options: SetupOptions, catalog: Catalog) -> dict[str, Any] | None:
    """Return the config.json whose code is to be recorded; None where the benchmark's own code is meant.

    Raises:
        SpecError: if the code is named that the model does not have, and if the file is no config.json.
    """
    code = options.code.strip().lower() if options.code is not None else None
    if code not in (None, "huggingface", "benchmark"):
        raise SpecError(f"code: {shown(options.code)} is not allowed; huggingface or benchmark")
    if code is not None and (options.params is not None or options.recorded is not None):
        raise SpecError("code: goes with --model and --hf-config; the ladder's models and recorded ones have their own")
    if read_lora(options) is not None:
        code = "huggingface"
    if options.hf_config is not None:
        config = read_document(options.hf_config, "JSON")
        if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
            return None  # the reader says what is wrong
        is_ours = config["model_type"] in FAMILIES
        return None if code == "benchmark" or (is_ours and code is None) else config
    if options.model is None:
        return None
    entry = catalog.model(options.model)
    return None if code == "benchmark" or (entry.supported and code is None) else entry.hf_config()


def _tell_recording(what: str) -> None:
    print_line(f"recording the model's code, once: {what} ...", error=True)


def _setups(options: SetupOptions, catalog: Catalog) -> tuple[tuple[TrainSetup, ...], Hardware]:
    options = _with_defaults(options, catalog)
    place = _place(options, catalog)
    common = {field: getattr(options, name) for name, field in _FIELDS.items() if getattr(options, name) is not None}
    if options.min_num_params is not None:
        if (options.wrap or "").strip().lower() != Wrap.SIZE:
            raise SpecError("min-num-params: only --wrap size has one, the smallest FSDP unit")
        common["min_num_params"] = parse_count(options.min_num_params, "min-num-params")
    setups = tuple(
        from_text({**common, **cell, **_sharding(options, cell, place)}, TrainSetup) for cell in _cells(options)
    )
    if options.shard_size is not None and not any(setup.strategy.is_hybrid for setup in setups):
        raise SpecError("shard-size: only HYBRID_SHARD and _HYBRID_SHARD_ZERO2 have one")
    return setups, place.hardware


def _cells(options: SetupOptions) -> Iterator[dict[str, Any]]:
    """Yield every combination of the options that may have several values."""
    values = {name: _values(name, getattr(options, name)) for name in _LISTS if getattr(options, name) is not None}
    for cell in itertools.product(*values.values()):
        yield dict(zip(values, cell, strict=True))


def _values(name: str, text: str | None) -> list[str]:
    """Split a list by comma; ``all`` means every known value; a value given twice counts once."""
    known = PRECISIONS if name == "precision" else tuple(member.value for member in _VOCABULARIES[name])
    if text is None or text.strip().lower() == "all":
        return list(known) if text else []
    read = Precision.parse if name == "precision" else _VOCABULARIES[name]
    return list(dict.fromkeys(str(read(word)) for word in text.split(",")))


def _sharding(options: SetupOptions, cell: dict[str, Any], place: Placement) -> dict[str, int]:
    """Return the world size and, for a hybrid strategy, the shard size, by field name."""
    strategy = ShardingStrategy(cell.get("strategy", TrainSetup().strategy))
    return place.sizes(strategy, options.shard_size if strategy.is_hybrid else None)


def _place(options: SetupOptions, catalog: Catalog) -> Placement:
    each = options.gpus_per_node
    if options.server is None and options.world_size is None and each is None and (options.nodes or 1) > 1:
        each = USUAL_GPUS_PER_NODE
        print_line(f"note: {each} GPUs on each node are assumed; --gpus-per-node says how many", error=True)
    return find_placement(options.gpu, options.server, options.nodes, each, options.world_size, catalog)
