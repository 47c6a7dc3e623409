"""Why a model cannot be trained under a setup, or why what it would take is not predicted."""

from msgspec.structs import replace

from fsdp_bench.simulate.compiled.choose import why_eager
from fsdp_bench.simulate.models.build import build, few_blocks
from fsdp_bench.simulate.operators.core import Operators
from fsdp_bench.simulate.operators.kernels import CPU, CUDA, FP32
from fsdp_bench.simulate.recorded.model import RecordedTransformer
from fsdp_bench.simulate.tape import Tape
from fsdp_bench.simulate.wrappers.units import choose_units, flattened
from fsdp_bench.spec.impossible import (
    ADAPTERS_ARE_FSDP1,
    FLOAT8_MULTIPLE,
    NO_ADAPTERS,
    POLICY_AROUND_UNITS,
    PREFETCHED_ADAPTERS,
    SELECTIVE_AROUND_UNITS,
    TIED_ENDS,
    impossible,
)
from fsdp_bench.spec.lora import DTYPES_MIXED, GRADIENTS_MIXED, PACKED_IN_BF16
from fsdp_bench.spec.model import ModelShape
from fsdp_bench.spec.recording.model import Model, RecordedModel
from fsdp_bench.spec.recording.own_loss import why_not_replaced
from fsdp_bench.spec.recording.recorded import NO_ENDS, RecordedCode, length_not_recorded
from fsdp_bench.spec.recording.variants import VariantKind, casts_inputs, kind_of
from fsdp_bench.spec.setup import (
    Api,
    BackwardPrefetch,
    Checkpointing,
    Float8,
    Offload,
    Reentrant,
    ShardingStrategy,
    TrainSetup,
    Wrap,
)

_INSIDE_BLOCKS = (Wrap.SIZE, Wrap.BLOCK_AND_ADAPTERS)
"""Wrapping policies that may make units of parts of a block."""


def why_impossible(model: Model, setup: TrainSetup, device: str) -> str | None:
    """Return why a model cannot be trained under a setup on ``cuda`` or ``cpu``, or None."""
    reason = impossible(setup, device) or why_not_recorded(model, setup, device)
    if reason is None and _may_fail_with_units_inside_blocks(setup) and _has_units_inside_blocks(model, setup):
        return SELECTIVE_AROUND_UNITS
    has_own_policy = setup.checkpointing is Checkpointing.SELECTIVE and setup.checkpointing_policy is not None
    may_save_units = has_own_policy and setup.wrap in _INSIDE_BLOCKS and not setup.is_ddp
    if reason is None and may_save_units and _has_units_inside_blocks(model, setup):
        return POLICY_AROUND_UNITS
    if isinstance(model, RecordedModel):
        return reason or (None if setup.float8 is Float8.NONE else _FLOAT8_OF_RECORDED)
    if reason is None and setup.wrap is Wrap.BLOCK_AND_ENDS and model.tie_word_embeddings and not setup.is_ddp:
        return TIED_ENDS
    return reason or _float8_not_predicted(model, setup)


_FLOAT8_OF_RECORDED = (
    "float8 is predicted for the benchmark Llama alone (--code benchmark), whose blocks are recorded in it"
)


def _float8_not_predicted(model: ModelShape, setup: TrainSetup) -> str | None:
    """Return why a model's linear layers in float8 are not predicted, or cannot run."""
    if setup.float8 is Float8.NONE:
        return None
    sizes = {
        "hidden_size": model.hidden_size,
        "key-value heads": model.kv_size,
        "intermediate": model.intermediate_size,
    }
    for name, size in sizes.items():
        if size % FLOAT8_MULTIPLE:
            return f"float8 needs widths that are multiples of {FLOAT8_MULTIPLE} (torch._scaled_mm), not {name} {size}"
    reason = why_eager(model, setup, CUDA)
    return None if reason is None else f"float8 is predicted compiled alone: {reason}"


def _may_fail_with_units_inside_blocks(setup: TrainSetup) -> bool:
    """Whether a recomputed block can run more operators or annotations than forward did: see SELECTIVE_AROUND_UNITS.

    Those of FSDP1: the rate limiter's annotation (_runtime_utils.py, _unshard); the views of a unit that was gathered
    ahead of its block in forward, and not in backward (_use_unsharded_flat_param); where offloaded gradients are
    written back to original parameters, a tensor for them (_writeback_orig_params).
    """
    gathers_ahead = setup.forward_prefetch and setup.backward_prefetch is not BackwardPrefetch.BACKWARD_PRE
    writes_back = setup.use_orig_params and setup.offload is Offload.PARAMS
    recomputes_more = setup.api is Api.FSDP2 or setup.limit_all_gathers or gathers_ahead or writes_back
    is_sharded = setup.effective_strategy is not ShardingStrategy.NO_SHARD
    is_selective = setup.checkpointing is Checkpointing.SELECTIVE
    return setup.wrap in _INSIDE_BLOCKS and is_selective and is_sharded and recomputes_more


def _has_units_inside_blocks(model: Model, setup: TrainSetup) -> bool:
    """Whether wrapping by size makes units of parts of a block."""
    built = few_blocks(Operators(Tape(), CPU), model, setup)
    inside = {id(module) for block in built.blocks for module in block.all_modules()} - set(map(id, built.blocks))
    return any(id(module) in inside for unit in choose_units(built, setup) for module in unit.modules)


# -- Why what a setup of a recorded model would take is not predicted, or cannot be ------------------------------------

_APART = VariantKind("bf16", is_apart=True).name
"""The recorded variant that cannot run where code reads adapters without running them, as in routers of experts."""

_ADAPTED_EXPERTS = (
    "lora: under fsdp1 torch refuses PEFT's adapters of experts, which change views of the flat parameter in place;"
    " use fsdp2, or targets without experts"
)


def why_not_recorded(model: Model, setup: TrainSetup, device: str) -> str | None:
    """Return why a setup of a recorded model is not predicted; None if it is, and for benchmark models."""
    if setup.wrap is Wrap.BLOCK_AND_ADAPTERS and not model.has_frozen_parameters:
        return NO_ADAPTERS
    if setup.wrap is Wrap.BLOCK_AND_ADAPTERS and setup.api is not Api.FSDP1:
        return ADAPTERS_ARE_FSDP1
    if kind_of(setup, has_frozen=True).is_apart and setup.forward_prefetch:
        return PREFETCHED_ADAPTERS
    if not isinstance(model, RecordedModel):
        return None
    if (reason := _units_not_predicted(model, setup)) is not None:
        return reason
    if (reason := length_not_recorded(model.name, setup.sequence_length, model.code.multiple)) is not None:
        return reason
    if (reason := why_not_replaced(model.code, setup.loss)) is not None:
        return reason
    if (reason := _reentrant_not_recorded(model.code, setup) or _offload_not_recorded(model.code, setup)) is not None:
        return reason
    if device != "cuda":
        return "kernels: a recorded model is what CUDA's operators do; on a CPU measure it with a sweep"
    return _base_not_cast(model, setup) or _experts_adapted(model, setup) or _parameters_mixed(model, setup)


def _reentrant_not_recorded(code: RecordedCode, setup: TrainSetup) -> str | None:
    """Return why it is not known what a block does whose input needs a gradient, as that of the first one then does."""
    has_frozen = not all(parameter.is_trained for parameter in code.parameters)
    if setup.reentrant is Reentrant.NO or not has_frozen:
        return None
    if code.origin.lora is None:
        return "reentrant: of frozen parameters it is predicted for adapters alone; leave it out, or rehearse a script"
    has_loops = len(code.read(next(iter(code.variants))).loops) == len(code.num_blocks)
    return None if has_loops else "reentrant: the recorded blocks are unlike each other, so the first one is not known"


def _offload_not_recorded(code: RecordedCode, setup: TrainSetup) -> str | None:
    """Return why it is not known what activation offload of a recorded model takes."""
    if not setup.activation_offload:
        return None
    if setup.checkpointing is not Checkpointing.NONE and setup.policy.every_blocks > 1:
        return "activation_offload: of a recorded model with some blocks checkpointed is not predicted; checkpoint all"
    if not code.has_offloaded:
        return (
            "activation_offload: what it copies was not recorded for this model; record it: fsdp-bench record"
            " --activation-offload"
        )
    return None


def _units_not_predicted(model: RecordedModel, setup: TrainSetup) -> str | None:
    """Return why what a wrapping makes units of in a recorded model is not known, or what they compute."""
    if setup.wrap is Wrap.BLOCK_AND_ADAPTERS and _APART in model.code.missing:
        return f"wrap = block-and-adapters: {model.code.missing[_APART]}; use wrap = block"
    if setup.wrap is Wrap.SIZE and not setup.is_ddp:
        return _sizes_not_predicted(model, setup)
    if setup.wrap is not Wrap.BLOCK_AND_ENDS:
        return None
    if setup.fp32_head:
        return "fp32_head: the head of a recorded model computes in the dtype of its blocks; leave it out"
    if model.has_frozen_parameters:
        return "wrap: block-and-ends of a model with frozen parameters is not predicted; use block"
    return None if setup.is_ddp or model.code.ends is not None else NO_ENDS


def _sizes_not_predicted(model: RecordedModel, setup: TrainSetup) -> str | None:
    """Return why units by size do not train, or why what they compute was not recorded.

    A weight that another unit's modules read, such as a head's that is the embedding's table, is not gathered for them.
    """
    if model.has_frozen_parameters:
        return "wrap: size of a model with frozen parameters is not predicted; use block"
    if any(each.is_float for each in model.code.batch):
        return "wrap: size of a model of images is not predicted, whose units cast them or not; use block"
    built = few_blocks(Operators(Tape(), CPU), model, setup)
    assert isinstance(built, RecordedTransformer)
    chosen = {id(unit.modules[0]) for unit in choose_units(built, setup)}
    compute, casts = setup.precision.compute, casts_inputs(setup)

    def unit_of(name: str) -> str:
        while name and id(built.by_name[name]) not in chosen:
            name = name.rpartition(".")[0]
        return name

    for call in built.calls():
        for parameter in call.parameters():
            if unit_of(call.module) != unit_of(parameter.rpartition(".")[0]):
                return (
                    f"wrap: size makes units between {call.module} and {parameter}, which it reads and FSDP does not"
                    " gather for it; use block, or a larger min_num_params"
                )
        if casts and id(built.by_name[call.module]) in chosen and any(t.itemsize == FP32 for t in call.inputs):
            return (
                f"wrap: under fsdp2 the unit {call.module} casts its inputs to {compute}, which was not recorded; use"
                " block, or fsdp1"
            )
    return None


def _base_not_cast(model: RecordedModel, setup: TrainSetup) -> str | None:
    """Return why frozen weights that are stored in a dtype of their own cannot be computed with."""
    dtypes = {parameter.dtype for parameter in model.code.parameters if parameter.dtype}
    compute, lora = setup.precision.compute, model.code.origin.lora
    if not dtypes or compute in dtypes:
        return None
    if lora is not None and lora.is_quantized:
        return f"{PACKED_IN_BF16}, not in {compute}"
    if compute == setup.precision.store == setup.precision.reduce == "fp32":  # no wrapper casts
        return None
    return (
        f"precision: the frozen weights are stored in {dtypes.pop()}, and wrappers would cast them to {compute}, which"
        " was not recorded; use bf16-mixed"
    )


def _experts_adapted(model: RecordedModel, setup: TrainSetup) -> str | None:
    """Return why adapters of experts do not train: PEFT parametrizes experts, which are views of a flat parameter."""
    are_adapted = any(".experts." in each.name and ".lora_" in each.name for each in model.code.parameters)
    return _ADAPTED_EXPERTS if setup.api is Api.FSDP1 and are_adapted else None


def _parameters_mixed(model: RecordedModel, setup: TrainSetup) -> str | None:
    """Return why FSDP1 does not make the flat parameters, or why what they compute is not recorded."""
    if setup.api is not Api.FSDP1 or not model.has_frozen_parameters:
        return None
    as_modules = replace(setup, use_orig_params=False)  # what flat parameters compute is not recorded where none are
    built = build(Operators(Tape(), CPU), model, as_modules, model.num_blocks)
    for _, weights in flattened(built, choose_units(built, setup), setup):
        if len({weight.dtype or setup.precision.store for weight in weights}) > 1:
            return DTYPES_MIXED
        is_mixed = len({weight.is_trained for weight in weights}) > 1
        if is_mixed and setup.wrap is Wrap.BLOCK_AND_ADAPTERS and setup.use_orig_params:
            return "wrap: block-and-adapters with trained biases in the blocks' units is not predicted; use block"
        if is_mixed and not setup.use_orig_params:
            return GRADIENTS_MIXED
    return None
