"""Which modules become FSDP units: train/wrapping/units.py on the simulated module tree."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_bench.simulate.models.build import build, few_blocks
from fsdp_bench.simulate.models.transformer import Module, ModuleList, SimulatedModel, Weight
from fsdp_bench.simulate.operators.core import Operators
from fsdp_bench.simulate.operators.kernels import CPU
from fsdp_bench.simulate.tape import Tape
from fsdp_bench.spec.lora import DTYPES_MIXED, GRADIENTS_MIXED, PACKED_IN_BF16
from fsdp_bench.spec.model import ModelShape
from fsdp_bench.spec.recording.ends import NO_ENDS
from fsdp_bench.spec.recording.model import Model, RecordedModel
from fsdp_bench.spec.recording.own_loss import why_not_replaced
from fsdp_bench.spec.recording.recorded import RecordedCode
from fsdp_bench.spec.recording.variants import VariantKind, kind_of
from fsdp_bench.spec.setup import (
    ADAPTERS_ARE_FSDP1,
    NO_ADAPTERS,
    POLICY_AROUND_UNITS,
    PREFETCHED_ADAPTERS,
    SELECTIVE_AROUND_UNITS,
    TIED_ENDS,
    Api,
    BackwardPrefetch,
    Checkpointing,
    Offload,
    Precision,
    ShardingStrategy,
    TrainSetup,
    Wrap,
    impossible,
)

_APART = VariantKind("bf16", is_apart=True).name
"""The recorded variant that cannot run where code reads adapters without running them, as in routers of experts."""

_ADAPTED_EXPERTS = (
    "lora: under fsdp1 torch refuses PEFT's adapters of experts, which change views of the flat parameter in place;"
    " use fsdp2, or targets without experts"
)

_INSIDE_BLOCKS = (Wrap.SIZE, Wrap.BLOCK_AND_ADAPTERS)
"""What may make units of parts of a block."""


@dataclass(frozen=True, eq=False)
class Unit:
    """One FSDP unit."""

    modules: tuple[Module, ...]
    """One module, or several that fully_shard makes one unit of: ``fully_shard([norm, head])``."""
    precision: Precision
    stays_gathered: bool = False
    """Whether fully_shard is given reshard_after_forward=False for this unit, whatever the strategy."""

    @property
    def all_weights(self) -> list[Weight]:
        """The weights of the modules and of all below them."""
        if len(self.modules) == 1:
            return self.modules[0].all_weights
        return [weight for module in self.modules for weight in module.all_weights]


def why_impossible(shape: Model, setup: TrainSetup, device: str) -> str | None:
    """Return why a model cannot be trained under a setup on ``cuda`` or ``cpu``, or None."""
    has_ends = setup.wrap is Wrap.BLOCK_AND_ENDS
    reason = impossible(setup, device) or _not_recorded(shape, setup, device)
    if reason is None and _may_fail_with_units_inside_blocks(setup) and _has_units_inside_blocks(shape, setup):
        return SELECTIVE_AROUND_UNITS
    is_ddp = setup.api is Api.FSDP2 and setup.strategy is ShardingStrategy.NO_SHARD
    has_own_policy = setup.checkpointing is Checkpointing.SELECTIVE and setup.checkpointing_policy is not None
    may_save_units = has_own_policy and setup.wrap in _INSIDE_BLOCKS and not is_ddp
    if reason is None and may_save_units and _has_units_inside_blocks(shape, setup):
        return POLICY_AROUND_UNITS
    if reason is None and has_ends and isinstance(shape, ModelShape) and shape.tie_word_embeddings and not is_ddp:
        return TIED_ENDS
    return reason


def _not_recorded(shape: Model, setup: TrainSetup, device: str) -> str | None:
    """Return why a setup of a recorded model is not predicted; None if it is, and for benchmark models."""
    if setup.wrap is Wrap.BLOCK_AND_ADAPTERS and not (isinstance(shape, RecordedModel) and shape.has_frozen_parameters):
        return NO_ADAPTERS
    if setup.wrap is Wrap.BLOCK_AND_ADAPTERS and setup.api is not Api.FSDP1:
        return ADAPTERS_ARE_FSDP1
    if kind_of(setup, has_frozen=True).is_apart and setup.forward_prefetch:
        return PREFETCHED_ADAPTERS
    if not isinstance(shape, RecordedModel):
        return None
    if (reason := _units_not_predicted(shape, setup)) is not None:
        return reason
    if (reason := why_not_replaced(shape.code, setup.loss)) is not None:
        return reason
    if setup.activation_offload and (reason := _offload_not_recorded(shape.code, setup)) is not None:
        return reason
    if device != "cuda":
        return "kernels: a recorded model is what CUDA's operators do; on a CPU measure it with a sweep"
    return _base_not_cast(shape, setup) or _experts_adapted(shape, setup) or _parameters_mixed(shape, setup)


def _offload_not_recorded(code: RecordedCode, setup: TrainSetup) -> str | None:
    """Return why it is not known what activation offload of a recorded model takes."""
    if setup.checkpointing is not Checkpointing.NONE and setup.policy.every_blocks > 1:
        return "activation_offload: of a recorded model with some blocks checkpointed is not predicted; checkpoint all"
    if not code.has_offloaded:
        return (
            "activation_offload: what it copies was not recorded for this model; record it: fsdp-bench record"
            " --activation-offload"
        )
    return None


def _units_not_predicted(shape: RecordedModel, setup: TrainSetup) -> str | None:
    """Return why what a wrapping makes units of in a recorded model is not known, or what they compute."""
    if setup.wrap is Wrap.BLOCK_AND_ADAPTERS and _APART in shape.code.missing:
        return f"wrap = block-and-adapters: {shape.code.missing[_APART]}; use wrap = block"
    if setup.wrap is Wrap.SIZE:
        return "wrap: size of a recorded model is not predicted; use block, block-and-ends or none"
    if setup.wrap is not Wrap.BLOCK_AND_ENDS:
        return None
    if setup.fp32_head:
        return "fp32_head: the head of a recorded model computes in the dtype of its blocks; leave it out"
    if shape.has_frozen_parameters:
        return "wrap: block-and-ends of a model with frozen parameters is not predicted; use block"
    is_ddp = setup.api is Api.FSDP2 and setup.strategy is ShardingStrategy.NO_SHARD
    return None if is_ddp or shape.code.ends is not None else NO_ENDS


def _base_not_cast(shape: RecordedModel, setup: TrainSetup) -> str | None:
    """Return why frozen weights that are stored in a dtype of their own cannot be computed with."""
    dtypes = {parameter.dtype for parameter in shape.code.parameters if parameter.dtype}
    compute, lora = setup.precision.compute, shape.code.origin.lora
    if not dtypes or compute in dtypes:
        return None
    if lora is not None and lora.is_quantized:
        return f"{PACKED_IN_BF16}, not in {compute}"
    if compute == "fp32" and not _casts(setup.precision):
        return None
    return (
        f"precision: the frozen weights are stored in {dtypes.pop()}, and wrappers would cast them to {compute}, which"
        " was not recorded; use bf16-mixed"
    )


def _casts(precision: Precision) -> bool:
    return len({precision.store, precision.compute, precision.reduce}) > 1


def _experts_adapted(shape: RecordedModel, setup: TrainSetup) -> str | None:
    """Return why adapters of experts do not train: PEFT parametrizes experts, which are views of a flat parameter."""
    are_adapted = any(".experts." in each.name and ".lora_" in each.name for each in shape.code.parameters)
    return _ADAPTED_EXPERTS if setup.api is Api.FSDP1 and are_adapted else None


def _parameters_mixed(shape: RecordedModel, setup: TrainSetup) -> str | None:
    """Return why FSDP1 does not make the flat parameters, or why what they compute is not recorded."""
    if setup.api is not Api.FSDP1 or not shape.has_frozen_parameters:
        return None
    model = build(Operators(Tape(), CPU), shape, setup, shape.num_blocks)
    taken: set[int] = set()
    for unit in [*choose_units(model, setup), Unit((model,), setup.precision)]:
        weights = [weight for weight in unit.all_weights if id(weight) not in taken]
        taken.update(map(id, weights))
        if len({weight.dtype or setup.precision.store for weight in weights}) > 1:
            return DTYPES_MIXED
        is_mixed = len({weight.is_trained for weight in weights}) > 1
        if is_mixed and setup.wrap is Wrap.BLOCK_AND_ADAPTERS and setup.use_orig_params:
            return "wrap: block-and-adapters with trained biases in the blocks' units is not predicted; use block"
        if is_mixed and not setup.use_orig_params:
            return GRADIENTS_MIXED
    return None


def _may_fail_with_units_inside_blocks(setup: TrainSetup) -> bool:
    """Whether a recomputed block can run more operators or annotations than forward did: see SELECTIVE_AROUND_UNITS.

    Of FSDP1's: the rate limiter's annotation (_runtime_utils.py, _unshard); the views of a unit that was gathered ahead
    of its block in forward, and not in backward (_use_unsharded_flat_param); where offloaded gradients are written back
    to original parameters, a tensor for them (_writeback_orig_params).
    """
    gathers_ahead = setup.forward_prefetch and setup.backward_prefetch is not BackwardPrefetch.BACKWARD_PRE
    writes_back = setup.use_orig_params and setup.offload is Offload.PARAMS
    recomputes_more = setup.api is Api.FSDP2 or setup.limit_all_gathers or gathers_ahead or writes_back
    is_sharded = setup.effective_strategy is not ShardingStrategy.NO_SHARD or (
        setup.api is Api.FSDP2 and setup.strategy is not ShardingStrategy.NO_SHARD
    )
    is_selective = setup.checkpointing is Checkpointing.SELECTIVE
    return setup.wrap in _INSIDE_BLOCKS and is_selective and is_sharded and recomputes_more


def _has_units_inside_blocks(shape: Model, setup: TrainSetup) -> bool:
    """Whether wrapping by size makes units of parts of a block."""
    model = few_blocks(Operators(Tape(), CPU), shape, setup)
    inside = {id(module) for block in model.blocks for module in block.all_modules()} - set(map(id, model.blocks))
    return any(id(module) in inside for unit in choose_units(model, setup) for module in unit.modules)


def choose_units(model: SimulatedModel, setup: TrainSetup) -> list[Unit]:
    """Return the units below the root, children before parents."""
    if setup.wrap is Wrap.NONE:
        return []
    if setup.wrap is Wrap.SIZE:
        return [Unit((module,), setup.precision) for module in _units_by_size(model, setup.min_num_params)]
    if setup.wrap is Wrap.BLOCK_AND_ADAPTERS:
        return [Unit((module,), setup.precision) for module in _blocks_and_adapters(model)]
    last = model.blocks[-1]
    blocks = [Unit((block,), setup.precision, block is last and not setup.reshard_last_block) for block in model.blocks]
    if setup.wrap is Wrap.BLOCK or model.ends is None:
        return blocks
    before, after = model.ends
    if setup.api is Api.FSDP1:  # _recursive_wrap visits modules in the order of their registration
        ends = [Unit(before[:1], setup.precision), Unit(after[-1:], setup.head_precision)]
        places = {id(module): place for place, module in enumerate(model.all_modules())}
        return sorted([*ends, *blocks], key=lambda unit: places[id(unit.modules[0])])
    return [
        Unit(before, setup.precision),
        *blocks,
        Unit(after, setup.head_precision, stays_gathered=True),
    ]


def _blocks_and_adapters(model: SimulatedModel) -> list[Module]:
    """peft.utils.other.fsdp_auto_wrap_policy: blocks, and modules without children whose weight is trained."""
    blocks = set(map(id, model.blocks))
    found: list[Module] = []

    def visit(module: Module) -> None:
        for child in module.children:
            visit(child)
        is_trained = any(weight.is_trained and weight.name.endswith("weight") for weight in module.weights)
        if id(module) in blocks or (is_trained and not module.children):
            found.append(module)

    for child in model.children:
        visit(child)
    return found


def num_resharded_units(shape: Model, setup: TrainSetup) -> int:
    """Return how many units are resharded to the ranks of ``reshard_after_forward``, of which each has own groups."""
    if setup.reshard_after_forward is None:
        return 0
    model = few_blocks(Operators(Tape(), CPU), shape, setup)
    resharded = [unit for unit in choose_units(model, setup) if not unit.stays_gathered]
    return sum(model.times(unit.all_weights[0].block) for unit in resharded)


def blocks_are_alike(model: SimulatedModel, units: list[Unit], setup: TrainSetup) -> bool:
    """Return whether every block's weights are in units of that block alone, so that one block stands for others."""
    if setup.api is Api.FSDP2 and setup.strategy is ShardingStrategy.NO_SHARD:
        return False  # DistributedDataParallel's buckets end anywhere
    inside = {id(weight) for unit in units for weight in unit.all_weights}
    return all(id(weight) in inside for block in model.blocks for weight in block.all_weights)


def _units_by_size(model: SimulatedModel, min_num_params: int) -> list[Module]:
    """torch.distributed.fsdp.wrap.size_based_auto_wrap_policy: subtrees that reach the size, never a ModuleList.

    A tied embedding is read outside of its module, so it stays in the root.
    """
    units: list[Module] = []
    kept = set(map(id, model.kept_in_root()))

    def visit(module: Module) -> int:
        numel = model.numel_of(module)
        if numel < min_num_params:
            return 0
        wrapped = sum(visit(child) for child in module.children)
        if isinstance(module, ModuleList) or id(module) in kept or numel - wrapped < min_num_params:
            return wrapped
        units.append(module)
        return numel

    for child in model.children:
        visit(child)
    return units
