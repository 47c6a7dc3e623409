"""fsdp(): shards, replicates and checkpoints a model in one call, from a TrainSetup or from keywords.

The order is the same for all apis: choose the units of the bare model, wrap blocks for activation checkpointing,
compile blocks, then shard. wrappers.py does the last step:

    strategy             fsdp1                   fsdp2
    FULL_SHARD           FULL_SHARD              fully_shard, units resharded after forward
    SHARD_GRAD_OP        SHARD_GRAD_OP           fully_shard, reshard_after_forward=False
    HYBRID_SHARD         HYBRID_SHARD            fully_shard on a 2-D mesh, resharded after forward
    _HYBRID_SHARD_ZERO2  _HYBRID_SHARD_ZERO2     fully_shard on a 2-D mesh, reshard_after_forward=False
    NO_SHARD             NO_SHARD                DistributedDataParallel (in a world of one rank the bare model),
                                                 mixed precision by autocast

With reshard_after_forward=N fully_shard's units are resharded to N ranks instead; the last block and the head's unit
can stay gathered (TrainSetup.reshard_last_block, Wrap.BLOCK_AND_ENDS).
"""

import gc
import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel

from fsdp_bench.spec.errors import MachineError, WrapError, install_hint
from fsdp_bench.spec.impossible import ADAPTERS_ARE_FSDP1, NO_ADAPTERS, SELECTIVE_AROUND_UNITS, impossible
from fsdp_bench.spec.setup import (
    Api,
    BackwardPrefetch,
    Checkpointing,
    Float8,
    Offload,
    Precision,
    Reentrant,
    ShardingStrategy,
    TrainSetup,
    Wrap,
)
from fsdp_bench.train.models.dtypes import DTYPES
from fsdp_bench.train.models.lora import keeps_its_dtype
from fsdp_bench.train.wrapping.activation_checkpointing import checkpoint_blocks, offload_blocks, require_grad_of_inputs
from fsdp_bench.train.wrapping.units import (
    BlockClasses,
    Initializer,
    Policy,
    WrappedUnit,
    WrapPlan,
    ends,
    trained_leaves,
    units_by_class,
    units_by_policy,
    units_by_size,
)
from fsdp_bench.train.wrapping.wrappers import wrap_ddp, wrap_fsdp1, wrap_fsdp2


class ShardsNothingWarning(UserWarning):
    """fsdp() leaves every rank with all parameters unsharded at once."""


def fsdp(
    model: nn.Module,
    auto_wrap: bool = False,
    mp: str = "fp32",
    shard_strat: str = "NO_SHARD",
    TransformerBlock: BlockClasses | None = None,
    *,
    setup: TrainSetup | None = None,
    api: str = "fsdp1",
    cpu_offload: bool = False,
    min_num_params: int = 100_000_000,
    auto_wrap_policy: Policy | None = None,
    process_group: dist.ProcessGroup | None = None,
    device_mesh: DeviceMesh | None = None,
    shard_size: int | None = None,
    backward_prefetch: str | None = "BACKWARD_PRE",
    forward_prefetch: bool = False,
    limit_all_gathers: bool = True,
    use_orig_params: bool = True,
    activation_checkpointing: str = "none",
    checkpointing_policy: str | None = None,
    compile: bool = False,
    device: torch.device | None = None,
    initialize: Initializer | None = None,
) -> nn.Module:
    """Wrap a model for fully sharded data parallel training; return the module to train.

    Args:
        model: the bare model, on the CPU, on its device, or on the meta device (then ``initialize`` is needed).
        auto_wrap: make several FSDP units: each ``TransformerBlock``, or modules that ``auto_wrap_policy`` chooses, or
            each subtree of at least ``min_num_params``. False makes the whole model one unit.
        mp: the precision: ``fp32``, ``bf16`` (bf16-mixed), ``fp16`` (fp16-mixed), ``bf16-mixed-bf16-reduce``,
            ``bf16-true``, or STORED/COMPUTE/REDUCE such as ``fp32/bf16/bf16``.
        shard_strat: a name or alias of spec.setup.ShardingStrategy, such as ``FULL_SHARD`` or ``SHARD_GRAD``.
        TransformerBlock: the class or classes of the model's blocks, for units, checkpointing and compiling.
        setup: use a TrainSetup instead of keywords. Keywords that it contains are then ignored.
        api: ``fsdp1`` or ``fsdp2``.
        cpu_offload: keep parameters, gradients and optimizer states in host memory.
        min_num_params: see ``auto_wrap``.
        auto_wrap_policy: torch's policy signature ``(module, recurse, nonwrapped_numel) -> bool``.
        process_group: ranks to shard over; by default all. For hybrid strategies give ``device_mesh``.
        device_mesh: 1-D, or 2-D (replicate, shard) for hybrid strategies.
        shard_size: for hybrid strategies without a mesh: ranks over which one copy is sharded; by default half.
        backward_prefetch: ``BACKWARD_PRE``, ``BACKWARD_POST`` or None.
        forward_prefetch: as in FullyShardedDataParallel.
        limit_all_gathers: as in FullyShardedDataParallel.
        use_orig_params: as in FullyShardedDataParallel.
        activation_checkpointing: ``none``, ``selective`` (matrix products and attention are saved) or ``full``.
        checkpointing_policy: what is saved instead: see TrainSetup.
        compile: torch.compile each block.
        device: the device to train on; by default this rank's accelerator if the process group is NCCL, else the CPU.
        initialize: called with ``(parameter, name)``; fills one whole parameter of a model on the meta device.

    Raises:
        WrapError: for combinations that cannot work, with the reason.
        SpecError: for a value that is not allowed.
        ShardsNothingWarning: a warning, if every rank will have all parameters unsharded at once.
    """
    if not dist.is_initialized():
        raise WrapError("fsdp() needs a process group: call torch.distributed.init_process_group first")
    if setup is None:
        setup = TrainSetup(
            strategy=ShardingStrategy(shard_strat),
            api=Api(api),
            precision=Precision.parse(mp),
            offload=Offload.PARAMS if cpu_offload else Offload.NONE,
            checkpointing=Checkpointing(activation_checkpointing),
            checkpointing_policy=checkpointing_policy,
            world_size=_world_size(process_group, device_mesh),
            shard_size=_shard_size(device_mesh, shard_strat, shard_size),
            wrap=Wrap.NONE if not auto_wrap else Wrap.SIZE if TransformerBlock is None else Wrap.BLOCK,
            min_num_params=min_num_params,
            backward_prefetch=BackwardPrefetch(backward_prefetch or "none"),
            forward_prefetch=forward_prefetch,
            limit_all_gathers=limit_all_gathers,
            use_orig_params=use_orig_params,
            compile=compile,
        )
    where = _Where(device or _default_device(), process_group, device_mesh)
    return _wrap_by_setup(model, setup, where, TransformerBlock, auto_wrap_policy, initialize)


class _Where(NamedTuple):
    device: torch.device
    process_group: dist.ProcessGroup | None
    mesh: DeviceMesh | None


def _wrap_by_setup(
    model: nn.Module,
    setup: TrainSetup,
    where: _Where,
    block_classes: BlockClasses | None,
    policy: Policy | None,
    initialize: Initializer | None,
) -> nn.Module:
    """Refuse setups that cannot work, choose the units, and wrap the model."""
    _refuse(model, setup, where, initialize)
    convert_to_float8(_blocks(model, [], block_classes), setup.float8)
    if policy is not None:
        units = units_by_policy(model, policy)
        planned = tuple(WrappedUnit((module,), setup.precision) for module in units)
    else:
        units = _choose_units(model, setup, block_classes)
        planned = _planned(model, units, setup)
    plan = WrapPlan(
        setup=setup,
        units=planned,
        device=where.device,
        mesh=where.mesh or hybrid_mesh(setup, where.device),
        process_group=where.process_group,
        initialize=initialize,
        module_names={module: name for name, module in model.named_modules()},
    )
    blocks = _blocks(model, units, block_classes)
    _refuse_units_inside_blocks(setup, units, blocks)
    if not blocks and (setup.compile or setup.activation_offload or setup.checkpointing is not Checkpointing.NONE):
        raise WrapError(
            "checkpointing, offloading and compiling go block by block: give TransformerBlock, the blocks' class"
        )
    _warn_when_nothing_is_sharded(plan)
    return _apply(model, plan, blocks)


def _apply(model: nn.Module, plan: WrapPlan, blocks: list[nn.Module]) -> nn.Module:
    """Checkpoint, compile, then shard: the only order in which each block is all-gathered once in each pass."""
    setup = plan.setup
    stored = DTYPES[setup.precision.store]
    if any(parameter.dtype is not stored and not keeps_its_dtype(parameter) for parameter in model.parameters()):
        model = model.to(stored)
    checkpointing = setup.checkpointing, setup.policy, setup.reentrant
    if setup.reentrant is not Reentrant.NO:
        require_grad_of_inputs(model)
    is_around = setup.reentrant is Reentrant.AROUND
    replaced = {} if is_around else checkpoint_blocks(model, blocks, *checkpointing)
    if setup.activation_offload:
        replaced = offload_blocks(model, blocks, replaced)
    if setup.compile:
        for block in blocks:
            replaced.get(block, block).compile()
    units = (replace(unit, modules=tuple(replaced.get(one, one) for one in unit.modules)) for unit in plan.units)
    plan = replace(plan, units=tuple(units))
    wrap = wrap_fsdp1 if setup.api is Api.FSDP1 else wrap_ddp if setup.is_ddp else wrap_fsdp2
    wrapped = wrap(model, plan)
    if is_around:
        outer = {unit.module: unit for unit in FullyShardedDataParallel.fsdp_modules(wrapped)}
        checkpoint_blocks(wrapped, [outer.get(block, block) for block in blocks], *checkpointing)
    return wrapped


def _shard_size(mesh: DeviceMesh | None, strategy: str, shard_size: int | None) -> int | None:
    on_mesh = mesh is not None and mesh.ndim == 2 and ShardingStrategy(strategy).is_hybrid
    return mesh.size(1) if mesh is not None and on_mesh else shard_size


def _world_size(process_group: dist.ProcessGroup | None, mesh: DeviceMesh | None) -> int:
    return mesh.size() if mesh is not None else dist.get_world_size(process_group)


def _default_device() -> torch.device:
    if "nccl" in dist.get_backend() and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def hybrid_mesh(setup: TrainSetup, device: torch.device) -> DeviceMesh | None:
    """Return the 2-D mesh (replicate, shard) of a hybrid strategy. None for other strategies."""
    if not setup.strategy.is_hybrid:
        return None
    shard = setup.shard_group_size
    names = ("replicate", "shard")
    return init_device_mesh(device.type, (setup.world_size // shard, shard), mesh_dim_names=names)


def _choose_units(model: nn.Module, setup: TrainSetup, classes: BlockClasses | None) -> list[nn.Module]:
    if setup.wrap is Wrap.NONE:
        return []
    if setup.wrap is Wrap.SIZE:
        return units_by_size(model, setup.min_num_params, kept_in_root=getattr(model, "modules_read_by_root", ()))
    if setup.wrap is Wrap.BLOCK_AND_ADAPTERS:
        if all(parameter.requires_grad for parameter in model.parameters()):
            raise WrapError(NO_ADAPTERS)
        if setup.api is not Api.FSDP1:
            raise WrapError(ADAPTERS_ARE_FSDP1)
        adapters = trained_leaves(model)
    else:
        adapters = []
    if classes is None:
        raise WrapError("wrapping by block needs TransformerBlock, the class of the model's blocks")
    units = units_by_class(model, classes)
    if not units:
        names = sorted({type(module).__name__ for module in model.modules()})
        raise WrapError(f"TransformerBlock: the model has no {classes}; its modules are {', '.join(names)}")
    return [*adapters, *units]


def _planned(model: nn.Module, units: list[nn.Module], setup: TrainSetup) -> tuple[WrappedUnit, ...]:
    """Return the units with their options; with block-and-ends also the ends of the model, in the order of forward."""
    if not setup.wrap.has_blocks or setup.is_ddp:
        return tuple(WrappedUnit((module,), setup.precision) for module in units)
    chosen = set(units)
    in_order = [module for module in model.modules() if module in chosen]
    keeps_last = None if setup.reshard_last_block else in_order[-1]
    blocks = {module: WrappedUnit((module,), setup.precision, module is keeps_last) for module in units}
    if setup.wrap is not Wrap.BLOCK_AND_ENDS:
        return tuple(blocks.values())
    first, head = ends(model, setup.api, in_order)
    last = WrappedUnit(head, setup.head_precision, stays_gathered=True)
    return (WrappedUnit(first, setup.precision), *(blocks[module] for module in in_order), last)


def _blocks(model: nn.Module, units: list[nn.Module], classes: BlockClasses | None) -> list[nn.Module]:
    """Return the modules to checkpoint and compile: the blocks, or the units if no block class is given."""
    return units if classes is None else units_by_class(model, classes)


def _refuse(model: nn.Module, setup: TrainSetup, where: _Where, initialize: Initializer | None) -> None:
    """Raise WrapError for combinations that cannot work, before the model is changed."""
    device, process_group, mesh = where
    reason = impossible(setup, device.type)
    if reason:
        raise WrapError(reason)
    strategy = setup.strategy
    if setup.world_size != _world_size(process_group, mesh):
        raise WrapError(f"the setup is for world_size {setup.world_size}; here are {_world_size(process_group, mesh)}")
    dimensions = 2 if strategy.is_hybrid else 1
    if mesh is not None and mesh.ndim != dimensions:
        raise WrapError(f"device_mesh has {mesh.ndim} dimensions; {strategy.value} needs {dimensions}")
    if process_group is not None and strategy.is_hybrid:
        raise WrapError(f"{strategy.value} needs two groups: give device_mesh (replicate, shard), not process_group")
    if initialize is None and any(parameter.is_meta for parameter in model.parameters()):
        raise WrapError("the model is on the meta device: give initialize, which fills one parameter")
    optimizer = _optimizer_over(model)
    if optimizer:
        raise WrapError(
            f"a {optimizer} was made over this model's parameters before wrapping; sharding replaces them, so it would"
            " train nothing: make the optimizer after fsdp()"
        )


def _refuse_units_inside_blocks(setup: TrainSetup, units: list[nn.Module], blocks: list[nn.Module]) -> None:
    """Raise WrapError for units inside blocks with selective checkpointing (SELECTIVE_AROUND_UNITS)."""
    if setup.checkpointing is not Checkpointing.SELECTIVE or setup.api is not Api.FSDP2:
        return
    inside = {module for block in blocks for module in block.modules() if module is not block}
    if setup.strategy is not ShardingStrategy.NO_SHARD and not inside.isdisjoint(units):
        raise WrapError(SELECTIVE_AROUND_UNITS)


def _optimizer_over(model: nn.Module) -> str | None:
    """Return the class name of a living optimizer that holds one of the model's parameters."""
    parameters = {id(parameter) for parameter in model.parameters()}
    for candidate in gc.get_objects():
        if issubclass(type(candidate), torch.optim.Optimizer):
            held: Any = (parameter for group in candidate.param_groups for parameter in group["params"])
            if any(id(parameter) in parameters for parameter in held):
                return type(candidate).__name__
    return None


def _warn_when_nothing_is_sharded(plan: WrapPlan) -> None:
    strategy = plan.setup.effective_strategy
    if strategy is ShardingStrategy.NO_SHARD:
        why = "NO_SHARD keeps every parameter, gradient and optimizer state on every rank"
        if plan.setup.strategy is not strategy:
            why = f"{plan.setup.strategy.value} in a world of one rank is NO_SHARD"
    elif not plan.units:
        why = (
            f"{strategy.value} with one unit gathers the whole model at once; give TransformerBlock, or a smaller "
            f"min_num_params than {plan.setup.min_num_params}, with auto_wrap=True"
        )
    else:
        return
    warnings.warn(f"fsdp() shards nothing while the model runs: {why}", ShardsNothingWarning, stacklevel=4)


def convert_to_float8(blocks: Iterable[nn.Module], recipe: Float8) -> None:
    """Replace the linear layers of blocks in place, as torchtitan does before checkpointing, compiling and sharding.

    The parameters stay the same. Nothing happens for ``Float8.NONE``.

    Raises MachineError if torchao is not installed.
    """
    if recipe is Float8.NONE:
        return
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        raise MachineError(f"float8 needs torchao: {install_hint('torchao')}") from None
    config = Float8LinearConfig.from_recipe_name(recipe.value)
    for block in blocks:
        convert_to_float8_training(block, config=config)
