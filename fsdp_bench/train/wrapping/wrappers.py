"""The three wrappers, each from a WrapPlan: FullyShardedDataParallel, fully_shard, and DistributedDataParallel.

DistributedDataParallel is NO_SHARD under fsdp2. On one rank it is the model without a wrapper.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch as TorchPrefetch
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp import ShardingStrategy as TorchStrategy
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from fsdp_bench.spec.setup import BackwardPrefetch, Offload, Precision, TrainSetup, Wrap
from fsdp_bench.train.models.dtypes import DTYPES
from fsdp_bench.train.wrapping.units import WrappedUnit, WrapPlan


def _is_mixed(precision: Precision) -> bool:
    return not precision.store == precision.compute == precision.reduce


def _dtypes(precision: Precision) -> dict[str, Any]:
    return {"param_dtype": DTYPES[precision.compute], "reduce_dtype": DTYPES[precision.reduce]}


def _autocast(model: nn.Module, plan: WrapPlan) -> None:
    autocast: Any = torch.autocast(plan.device.type, dtype=DTYPES[plan.setup.precision.compute])
    model.forward = autocast(model.forward)


_PREFETCH = {
    BackwardPrefetch.BACKWARD_PRE: TorchPrefetch.BACKWARD_PRE,
    BackwardPrefetch.BACKWARD_POST: TorchPrefetch.BACKWARD_POST,
    BackwardPrefetch.NONE: None,
}


def wrap_fsdp1(model: nn.Module, plan: WrapPlan) -> nn.Module:
    """Wrap the plan's units and the root with FullyShardedDataParallel; return the root."""
    setup = plan.setup
    units = {unit.modules[0]: _options_of(unit, setup) for unit in plan.units}
    if setup.wrap is Wrap.BLOCK_AND_ADAPTERS and setup.precision.compute != setup.precision.store:
        _autocast(model, plan)
    return FullyShardedDataParallel(
        model,
        process_group=plan.process_group,
        device_mesh=plan.mesh,
        sharding_strategy=TorchStrategy[setup.strategy.value],
        cpu_offload=CPUOffload(offload_params=True) if setup.offload is Offload.PARAMS else None,
        auto_wrap_policy=CustomPolicy(lambda module: units.get(module, False)) if units else None,
        backward_prefetch=_PREFETCH[setup.backward_prefetch],
        forward_prefetch=setup.forward_prefetch,
        limit_all_gathers=setup.limit_all_gathers,
        use_orig_params=setup.use_orig_params,
        mixed_precision=MixedPrecision(**_dtypes(setup.precision)) if _is_mixed(setup.precision) else None,
        device_id=plan.device,
        param_init_fn=_param_init_fn(model, plan),
    )


def _options_of(unit: WrappedUnit, setup: TrainSetup) -> bool | dict[str, Any]:
    """Return what a unit is wrapped with, for CustomPolicy: True where it is the root's options, or its own ones.

    FSDP1 casts the inputs of its root only, so a unit with another compute dtype has to cast its own.
    """
    if unit.precision == setup.precision:
        return True
    return {"mixed_precision": MixedPrecision(**_dtypes(unit.precision), cast_forward_inputs=True)}


def release(model: nn.Module) -> None:
    """Break reference cycles that keep unsharded units alive: their views hold the graph that accumulates into them.

    FlatParameter._tensors is emptied where FSDP returns to sharded views; NO_SHARD never does (_use_sharded_views in
    _flat_param.py), and the cycle goes through C++, where Python's collector does not see it.
    """
    for unit in FullyShardedDataParallel.fsdp_modules(model):
        handle = unit._handle
        if handle is not None and handle.flat_param._tensors is not None:
            handle.flat_param._tensors = [None] * len(handle.flat_param._tensors)


def _param_init_fn(model: nn.Module, plan: WrapPlan) -> Any:
    """Return the function with which FSDP1 materialises one module's own parameters, unit by unit."""
    initialize = plan.initializer_for(model)
    if initialize is None:
        return None

    def materialize(module: nn.Module) -> None:
        module.to_empty(device=plan.device, recurse=False)
        for name, parameter in module.named_parameters(recurse=False):
            with torch.no_grad():
                initialize(parameter, plan.name_of(module, name))

    return materialize


def wrap_fsdp2(model: nn.Module, plan: WrapPlan) -> nn.Module:
    """Shard the plan's units and the root in place with fully_shard; return the model."""
    setup = plan.setup
    is_offloaded = setup.offload is Offload.PARAMS
    offload = CPUOffloadPolicy(pin_memory=plan.device.type != "cpu") if is_offloaded else OffloadPolicy()
    options: dict[str, Any] = {"mesh": _mesh(plan), "offload_policy": offload}
    # None is torch's FULL_SHARD: units are resharded after forward, the root is not.
    by_strategy = None if setup.strategy.reshards_after_forward else False
    for unit in plan.units:
        modules: Any = unit.modules[0] if len(unit.modules) == 1 else list(unit.modules)
        fully_shard(
            modules,
            reshard_after_forward=False if unit.stays_gathered else setup.reshard_after_forward or by_strategy,
            mp_policy=_policy_of(unit.precision, setup),
            **options,
        )
    fully_shard(model, reshard_after_forward=by_strategy, mp_policy=_policy_of(setup.precision, setup), **options)
    _materialize_shards(model, plan)
    _set_prefetch(model, plan)
    return model


def _policy_of(precision: Precision, setup: TrainSetup) -> MixedPrecisionPolicy:
    """Return the policy of a unit: the default where all dtypes of the model equal the stored dtype.

    A precision that differs from the model's names its compute dtype, which inputs are cast to.
    """
    if precision == setup.precision and not _is_mixed(precision):
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(**_dtypes(precision))


def _mesh(plan: WrapPlan) -> DeviceMesh:
    if plan.mesh is not None:
        return plan.mesh
    if plan.process_group is not None:
        return DeviceMesh.from_group(plan.process_group, plan.device.type)
    return init_device_mesh(plan.device.type, (plan.setup.world_size,))


@torch.no_grad()
def _materialize_shards(model: nn.Module, plan: WrapPlan) -> None:
    """Allocate the shards of a model on the meta device and fill them, one whole parameter at a time."""
    initialize = plan.initializer_for(model)
    if initialize is None:
        return
    model.to_empty(device="cpu" if plan.setup.offload is Offload.PARAMS else plan.device)
    for name, parameter in plan.parameters():
        assert isinstance(parameter, DTensor), f"{name} was not sharded"
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=plan.device)
        initialize(whole, name)
        # src_data_rank=None: every rank made the same values, so nothing needs to be sent.
        shard = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.to_local().copy_(shard.to_local())


def _set_prefetch(model: nn.Module, plan: WrapPlan) -> None:
    """Set which units are prefetched. By default FSDP2 prefetches in backward (BACKWARD_PRE) by itself."""
    units: list[Any] = [unit.modules[0] for unit in plan.units]
    if plan.setup.wrap is not Wrap.BLOCK_AND_ENDS:
        units = [module for module in model.modules() if module in set(units)]
    if plan.setup.backward_prefetch is BackwardPrefetch.NONE:
        for unit in units:
            # An explicit list turns the implicit prefetch off; the unit itself is gathered already, so nothing happens.
            unit.set_modules_to_backward_prefetch([unit])
    if plan.setup.forward_prefetch:
        for unit, following in pairwise(units):
            unit.set_modules_to_forward_prefetch([following])


_COMPRESSION = {"bf16": bf16_compress_hook, "fp16": fp16_compress_hook}


def wrap_ddp(model: nn.Module, plan: WrapPlan) -> nn.Module:
    """Materialise or move the model, run its forward under autocast, and wrap it unless the rank is alone.

    Mixed precision is as usual with DDP: fp32 parameters and gradients, and autocast around forward. A narrower
    reduction dtype is done by DDP's own compression hook.
    """
    precision = plan.setup.precision
    _materialize(model, plan)
    if precision.compute != precision.store:
        _autocast(model, plan)
    if plan.setup.is_bare:
        return model
    # Without a group the compression hooks reduce over the whole world, whatever DDP was given.
    group = plan.process_group or (plan.mesh.get_group() if plan.mesh is not None else None)
    wrapped = DistributedDataParallel(
        model, device_ids=[plan.device] if plan.device.type == "cuda" else None, process_group=group
    )
    if precision.reduce != precision.store:
        wrapped.register_comm_hook(group, _COMPRESSION[precision.reduce])
    return wrapped


@torch.no_grad()
def _materialize(model: nn.Module, plan: WrapPlan) -> None:
    initialize = plan.initializer_for(model)
    if initialize is None:
        if any(parameter.device != plan.device for parameter in model.parameters()):
            model.to(plan.device)
        return
    model.to_empty(device=plan.device)
    for name, parameter in plan.parameters():
        initialize(parameter, name)
