"""Functions that turn the options of cli/common/options.py into a model, a setup and hardware.

Each raises SpecError for an option that is not allowed; those that read a model also if the options name none or
several, or one that is unknown or not supported.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from fsdp_bench.catalog.architectures import FLASH_ATTN_PACKAGE, FOLDERS, NotRecorded, parse_attention
from fsdp_bench.catalog.hf_config import read_sliding_window, sliding_window_note
from fsdp_bench.catalog.ladder import nearest_size
from fsdp_bench.catalog.loader import Catalog, load_user_catalog
from fsdp_bench.catalog.lookup import (
    CODES,
    POSITIONS,
    Placement,
    adapted_model,
    config_of_shape,
    find_placement,
    in_other_code,
    name_with,
    named_config,
    place_names,
    with_code,
)
from fsdp_bench.catalog.lookup import model as find_model
from fsdp_bench.catalog.names import is_other_weights
from fsdp_bench.catalog.recorded import read_recorded, recorded_model
from fsdp_bench.cli.common.options import MODEL_LISTS, SetupOptions, each_of
from fsdp_bench.plan.defaults import (
    DEFAULT_PRECISION,
    DEFAULT_SEQUENCE_LENGTH,
    USUAL_GPUS_PER_NODE,
    Code,
    default_sequence_length,
    read_adapters,
    trained_code,
    trainer_defaults,
)
from fsdp_bench.plan.estimate import refuse_flash_attn_package
from fsdp_bench.report.terminal import print_line
from fsdp_bench.spec.checked import build
from fsdp_bench.spec.errors import MachineError, SpecError, shown
from fsdp_bench.spec.hardware import Hardware
from fsdp_bench.spec.lora import LoRA
from fsdp_bench.spec.model import Family, ModelShape
from fsdp_bench.spec.recording.model import Model
from fsdp_bench.spec.setup import OPTIONS, ShardingStrategy, TrainSetup, Wrap
from fsdp_bench.spec.units import parse_count

_FIELDS = {name: one.name for name, one in OPTIONS.items() if name not in ("min_num_params", "shard_size")}
"""Options each with the field of TrainSetup that gets its value unchanged. Those two are read together with others."""

_OF_THE_MODEL = (
    *("model", "hf_config", "recorded", "code", "attention", "lora", "qlora", "params", "family"),
    "activation_offload",
)
"""Options that a model depends on, beside the sequence length."""


class Reading(NamedTuple):
    """One combination of the options, and what it means."""

    options: SetupOptions
    setup: TrainSetup
    hardware: Hardware | None


def read_setups(options: SetupOptions) -> list[Reading]:
    """Return a setup and its hardware for every combination of the options that have several values; read no model.

    Combinations that cannot run are included; spec.impossible returns the reason for each. Combinations that differ
    only in options without a meaning for them, such as the shard size for FULL_SHARD, are included once.
    """
    catalog = load_user_catalog(options.catalog)
    if _assumes_gpus(options) and max((*options.several.get("nodes", ()), options.nodes or 1)) > 1:
        note = f"note: {USUAL_GPUS_PER_NODE} GPUs on each node are assumed; --gpus-per-node says how many"
        print_line(note, error=True)
    found: dict[tuple[Any, ...], Reading] = {}
    for named in each_of(options, MODEL_LISTS):
        code = _code_meant(named, catalog)
        for one in each_of(_with_defaults(named, catalog)):
            reading = _reading(one, _place(one, catalog), code)
            model = tuple(map(one.value, _OF_THE_MODEL))
            found.setdefault((model, reading.setup, place_names(reading.hardware)), reading)
    setups = [reading.setup for reading in found.values()]
    if options.is_given("shard_size") and not any(setup.strategy.is_hybrid for setup in setups):
        raise SpecError("shard-size: only HYBRID_SHARD and _HYBRID_SHARD_ZERO2 have one")
    if options.is_given("min_num_params") and not any(setup.wrap is Wrap.SIZE for setup in setups):
        raise SpecError("min-num-params: only --wrap size has one, the smallest FSDP unit")
    _tell_architecture((reading.options.model for reading in found.values()), catalog)
    return list(found.values())


def read_models(readings: Sequence[Reading]) -> list[Model]:
    """Read the model of every combination; each that the options name is read once."""
    models = []
    for _, found in _models(readings):
        if isinstance(found, Exception):
            raise found
        models.append(found)
    return models


def with_models(options: SetupOptions) -> list[tuple[Reading, Model]]:
    """Read every combination of the options and its model; one whose model cannot be had is left out, and printed.

    Raises SpecError if an option is not allowed, MachineError if no model can be had.
    """
    found, left_out = [], defaultdict(list)
    for reading, model in _models(readings := read_setups(options)):
        if isinstance(model, Exception):
            left_out[str(model)].append(reading.options)
            error = model
        else:
            found.append((reading, model))
    if not found:
        raise error
    for why, some in left_out.items():
        which = [
            f"{name.replace('_', '-')} {', '.join(map(str, dict.fromkeys(one.value(name) for one in some)))}"
            for name, values in options.several.items()
            if {one.value(name) for one in some} < set(values)
        ]
        print_line(f"note: left out {len(some)} of {len(readings)} setups ({'; '.join(which)}): {why}", error=True)
    return found


def _models(readings: Sequence[Reading]) -> Iterator[tuple[Reading, Model | NotRecorded | MachineError]]:
    """Yield every combination with its model, or with the error where it was not recorded and cannot be here."""
    catalog = load_user_catalog(readings[0].options.catalog)
    found: dict[tuple[Any, ...], Model | NotRecorded | MachineError] = {}
    for reading in readings:
        options, length, where = reading.options, reading.setup.sequence_length, reading.hardware
        is_before = where is not None and where.gpu.lacks_flash_attention(reading.setup.precision.compute)
        key = (length, read_lora(options), is_before, *map(options.value, _OF_THE_MODEL))
        if key not in found:
            if read_attention(options) == FLASH_ATTN_PACKAGE:
                refuse_flash_attn_package(reading.hardware)  # before a minute of recording
            try:
                found[key] = _model(options, catalog, length, before_sm80=is_before)
            except (NotRecorded, MachineError) as error:
                found[key] = error
        yield reading, found[key]


def read_model(options: SetupOptions) -> Model:
    """Read the model that the options name."""
    catalog = load_user_catalog(options.catalog)
    model = _model(options, catalog, _with_defaults(options, catalog).step.get("seq") or DEFAULT_SEQUENCE_LENGTH)
    _tell_architecture([options.model], catalog)
    return model


def read_other_code(options: SetupOptions, found: Model) -> Model | None:
    """Return the model that ``read_model`` has found in other code; None where there is none."""
    name = options.hf_config or options.model or options.params
    if name is None:
        return None
    catalog = load_user_catalog(options.catalog)
    length = _with_defaults(options, catalog).step.get("seq") or DEFAULT_SEQUENCE_LENGTH
    if options.params is not None and not isinstance(found, ModelShape):
        return _of_the_ladder(replace(options, code=None), length)
    return in_other_code(name, found, length, catalog)


def read_choices(options: SetupOptions) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]]]:
    """Return the fields of TrainSetup that the options state with one value, and those with several.

    Precision and sequence length are always stated, and what the code's defaults decide on every number of GPUs.
    """
    catalog = load_user_catalog(options.catalog)
    code = _code_meant(options, catalog)
    options = _with_defaults(options, catalog)
    stated: dict[str, tuple[Any, ...]] = {
        field: options.several.get(name, (options.value(name),))
        for name, field in _FIELDS.items()
        if options.is_given(name)
    }
    read = {
        field: tuple(getattr(build(TrainSetup, {field: value}), field) for value in values)
        for field, values in stated.items()
    }
    fixed = {field: values[0] for field, values in read.items() if len(values) == 1}
    fixed |= trainer_defaults(code, {field: values[0] for field, values in read.items()}, None)
    return fixed, {field: values for field, values in read.items() if len(values) > 1}


def _with_defaults(options: SetupOptions, catalog: Catalog) -> SetupOptions:
    """Fill in the default precision, and sequence length: DEFAULT_SEQUENCE_LENGTH, or a model's fewer positions."""
    if not options.is_given("precision"):
        options = options.with_values({"precision": DEFAULT_PRECISION})
    if options.is_given("seq"):
        return options
    model = None
    if options.params is None and any((options.model, options.hf_config, options.recorded)):
        with suppress(NotRecorded):
            model = _model(options, catalog, 1, may_record=False)
    return options.with_values({"seq": default_sequence_length(model)})


def _code_meant(options: SetupOptions, catalog: Catalog) -> Code:
    """Return whose code the options mean, found without recording anything."""
    code = read_code(options)
    if options.recorded is not None and code is None:
        return trained_code(read_model(options))
    if options.lora is not None or options.qlora is not None:
        return Code("huggingface", has_adapters=True)
    if code is not None:
        return Code(code)
    if options.hf_config is not None:
        return Code("huggingface")
    try:
        return Code() if options.model is None else trained_code(find_model(options.model, catalog=catalog))
    except NotRecorded:
        return Code("huggingface")


def sliding_window_of(options: SetupOptions) -> int | None:
    """Return the sliding window of the model in ``--hf-config``; None for every other model."""
    if options.hf_config is None or options.code is None or options.code.strip().lower() != "benchmark":
        return None
    return read_sliding_window(options.hf_config)


def warn_of_sliding_window(options: SetupOptions, sequence_length: int) -> None:
    """Print a note on standard error if sequences are longer than the model's sliding window, which is not modelled."""
    window = sliding_window_of(options)
    if window is not None and sequence_length > window:
        print_line(f"note: {sliding_window_note(window)}", error=True)


def _tell_architecture(names: Iterable[str | None], catalog: Catalog) -> None:
    """Print a note on standard error for each model that was found by the name of other weights: ``-Instruct``."""
    for name in dict.fromkeys(names):
        with suppress(SpecError):  # a size or a file
            entry = catalog.model(name or "")
            if is_other_weights(str(name), entry):
                print_line(f"note: {name} has the architecture of {entry.name}, which is predicted", error=True)


def _model(
    options: SetupOptions, catalog: Catalog, sequence_length: int, may_record: bool = True, before_sm80: bool = False
) -> Model:
    _refuse_contradictions(options)
    lora, attention = read_lora(options), read_attention(options)
    if options.recorded is not None:
        return recorded_model(read_recorded(options.recorded), options.recorded.name.partition(".")[0])
    if options.params is not None:
        return _of_the_ladder(options, sequence_length)
    named, code = options.hf_config or str(options.model), read_code(options)
    if not may_record:
        if attention is not None:
            raise NotRecorded(f"{config_of(options, catalog)[1]} was not recorded")
        if lora is not None:
            return adapted_model(named, sequence_length, lora, catalog)
        return find_model(named, sequence_length, catalog=catalog, code=code)
    from fsdp_bench.plan.recording import found_or_recorded  # what starts processes

    def tell(what: str) -> None:
        print_line(f"recording the model's code, once: {what} ...", error=True)

    is_offloaded = bool(options.value("activation_offload"))
    asked = named, sequence_length, catalog, code, lora, is_offloaded, attention, tell
    return found_or_recorded(*asked, before_sm80=before_sm80)


def _refuse_contradictions(options: SetupOptions) -> None:
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
    if options.params is None and options.family is not None:
        raise SpecError(f"family: goes with --params; {given[0]} has its own")
    if options.recorded is not None and read_code(options) is not None:
        raise SpecError("code: a recorded model has its own; leave --code out")


def _of_the_ladder(options: SetupOptions, sequence_length: int) -> Model:
    family = Family(options.family or Family.LLAMA)
    positions = max(sequence_length, POSITIONS[family])
    shape = nearest_size(family, parse_count(str(options.params), "params"), positions=positions)
    code = read_code(options)
    return with_code(shape, sequence_length, code) if code in FOLDERS else shape


def config_meant(options: SetupOptions) -> dict[str, Any] | None:
    """Return the config.json of the model that the options name, to run the code that it is of; None for others."""
    code = read_code(options)
    named = [options.model, options.hf_config, options.params, options.recorded]
    if code == "benchmark" or named.count(None) != 3 or options.params is not None or options.recorded is not None:
        return None
    catalog = load_user_catalog(options.catalog)
    if options.model is not None and code is None and read_lora(options) is None and read_attention(options) is None:
        return None if catalog.model(options.model).supported else config_of(options, catalog)[0]
    return config_of(options, catalog)[0]


def read_lora(options: SetupOptions) -> LoRA | None:
    """Read ``--lora`` or ``--qlora``. Raises SpecError if it is not allowed or the code is not Hugging Face's."""
    found = read_adapters(options.lora, options.qlora, options.value("precision") or DEFAULT_PRECISION)
    if found is not None:
        _refuse_other_code(options, f"{'lora' if options.qlora is None else 'qlora'}: adapters go into")
    return found


def _refuse_other_code(options: SetupOptions, what_goes_with: str) -> None:
    is_other = read_code(options) not in (None, "huggingface")
    if is_other or options.params is not None or options.recorded is not None:
        how = f"leave --code {options.code} out" if is_other else "--model or --hf-config; a recorded model has its own"
        raise SpecError(f"{what_goes_with} Hugging Face's code; {how}")


def read_attention(options: SetupOptions) -> str | None:
    """Read ``--attention``, None for sdpa. Raises SpecError if it is not predicted, or not of Hugging Face's code."""
    if options.attention is None:
        return None
    _refuse_other_code(options, "attention: goes with")
    return parse_attention(options.attention)


def config_of(options: SetupOptions, catalog: Catalog) -> tuple[dict[str, Any], str]:
    """Return the config.json of the Hugging Face model that the options name, and its name with what is not in it."""
    lora, attention = read_lora(options), read_attention(options)
    config, name = named_config(options.hf_config or str(options.model), catalog, attention)
    return config, name_with(name, lora)


def config_to_export(options: SetupOptions, model: Model) -> dict[str, Any]:
    """Return the config.json of a model. Raises SpecError for a recorded one, which does not tell it."""
    if options.recorded is not None:
        raise SpecError("export: a recorded model has no config.json; name the model with --hf-config or --model")
    if isinstance(model, ModelShape) and options.params is not None:
        return config_of_shape(model)
    if options.params is not None:
        shape = _of_the_ladder(replace(options, code=None), POSITIONS[Family(options.family or Family.LLAMA)])
        assert isinstance(shape, ModelShape)
        return config_of_shape(shape)
    return config_of(options, load_user_catalog(options.catalog))[0]


def read_code(options: SetupOptions) -> str | None:
    """Return whose code is meant; None for the default."""
    code = options.code.strip().lower() if options.code is not None else None
    if code not in (None, *CODES):
        raise SpecError(f"code: {shown(options.code)} is not allowed; {', '.join(CODES)}")
    return code


def _reading(options: SetupOptions, place: Placement, code: Code) -> Reading:
    """Read options that have one value each; others have the defaults of the code."""
    given = {field: options.value(name) for name, field in _FIELDS.items() if options.value(name) is not None}
    smallest, shard_size = options.value("min_num_params"), options.value("shard_size")
    if smallest is not None and given.get("wrap", "").strip().lower() == Wrap.SIZE:
        given["min_num_params"] = parse_count(smallest, "min-num-params")
    given |= trainer_defaults(code, given, place.world_size)
    strategy = ShardingStrategy(given.get("strategy", TrainSetup().strategy))
    sizes = place.sizes(strategy, shard_size if strategy.is_hybrid else None)
    return Reading(options, build(TrainSetup, {**given, **sizes}), place.hardware)


def _assumes_gpus(options: SetupOptions) -> bool:
    return not any(map(options.is_given, ("server", "world_size", "gpus_per_node")))


def _place(options: SetupOptions, catalog: Catalog) -> Placement:
    each = options.gpus_per_node
    if _assumes_gpus(options) and (options.nodes or 1) > 1:
        each = USUAL_GPUS_PER_NODE
    catalog = catalog.under_power(options.power)
    return find_placement(options.gpu, options.server, options.nodes, each, options.world_size, catalog)
