"""FullyShardedDataParallel from a WrapPlan."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch as TorchPrefetch
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp import ShardingStrategy as TorchStrategy
from torch.distributed.fsdp.wrap import CustomPolicy

from fsdp_bench.spec.setup import BackwardPrefetch, Offload, Precision, TrainSetup, Wrap
from fsdp_bench.train.models.dtypes import DTYPES
from fsdp_bench.train.wrapping.units import WrappedUnit, WrapPlan

_PREFETCH = {
    BackwardPrefetch.BACKWARD_PRE: TorchPrefetch.BACKWARD_PRE,
    BackwardPrefetch.BACKWARD_POST: TorchPrefetch.BACKWARD_POST,
    BackwardPrefetch.NONE: None,
}


def mixed_precision(precision: Precision) -> MixedPrecision | None:
    """Return FSDP1's MixedPrecision. None if all dtypes equal the stored dtype."""
    if precision.store == precision.compute == precision.reduce:
        return None
    return MixedPrecision(param_dtype=DTYPES[precision.compute], reduce_dtype=DTYPES[precision.reduce])


def wrap_fsdp1(model: nn.Module, plan: WrapPlan) -> nn.Module:
    """Wrap the plan's units and the root; return the root."""
    setup = plan.setup
    units = {unit.modules[0]: _options_of(unit, setup) for unit in plan.units}
    if setup.wrap is Wrap.BLOCK_AND_ADAPTERS and setup.precision.compute != setup.precision.store:
        autocast: Any = torch.autocast(plan.device.type, dtype=DTYPES[setup.precision.compute])
        model.forward = autocast(model.forward)
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
        mixed_precision=mixed_precision(setup.precision),
        device_id=plan.device,
        param_init_fn=_param_init_fn(model, plan),
    )


def _options_of(unit: WrappedUnit, setup: TrainSetup) -> bool | dict[str, Any]:
    """Return what a unit is wrapped with, for CustomPolicy: True where it is the root's options, or its own ones.

    FSDP1 casts the inputs of its root only, so a unit with another compute dtype has to cast its own.
    """
    if unit.precision == setup.precision:
        return True
    own = MixedPrecision(
        param_dtype=DTYPES[unit.precision.compute],
        reduce_dtype=DTYPES[unit.precision.reduce],
        cast_forward_inputs=True,
    )
    return {"mixed_precision": own}


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
