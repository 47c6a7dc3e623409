"""fully_shard from a WrapPlan."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp_bench.spec.setup import BackwardPrefetch, Offload, Precision, TrainSetup, Wrap
from fsdp_bench.train.models.dtypes import DTYPES
from fsdp_bench.train.wrapping.units import WrappedUnit, WrapPlan


def mixed_precision(precision: Precision) -> MixedPrecisionPolicy:
    """Return FSDP2's MixedPrecisionPolicy; the default if all dtypes equal the stored dtype."""
    if precision.store == precision.compute == precision.reduce:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=DTYPES[precision.compute], reduce_dtype=DTYPES[precision.reduce])


def wrap_fsdp2(model: nn.Module, plan: WrapPlan) -> nn.Module:
    """Shard the plan's units and the root in place; return the model."""
    setup = plan.setup
    options: dict[str, Any] = {"mesh": _mesh(plan), "offload_policy": _offload_policy(plan)}
    # None is torch's FULL_SHARD: units are resharded after forward, the root is not.
    by_strategy = None if setup.strategy.reshards_after_forward else False
    for unit in plan.units:
        modules: Any = unit.modules[0] if len(unit.modules) == 1 else list(unit.modules)
        fully_shard(
            modules,
            reshard_after_forward=False if unit.stays_gathered else setup.reshard_after_forward or by_strategy,
            mp_policy=_policy_of(unit, setup),
            **options,
        )
    fully_shard(model, reshard_after_forward=by_strategy, mp_policy=mixed_precision(setup.precision), **options)
    _materialize(model, plan)
    _set_prefetch(model, plan)
    return model


def _policy_of(unit: WrappedUnit, setup: TrainSetup) -> MixedPrecisionPolicy:
    """Return a unit's policy. One that differs from the model's names its compute dtype, which inputs are cast to."""
    if unit.precision == setup.precision:
        return mixed_precision(unit.precision)
    return MixedPrecisionPolicy(param_dtype=DTYPES[unit.precision.compute], reduce_dtype=DTYPES[unit.precision.reduce])


def _mesh(plan: WrapPlan) -> DeviceMesh:
    if plan.mesh is not None:
        return plan.mesh
    if plan.process_group is not None:
        return DeviceMesh.from_group(plan.process_group, plan.device.type)
    return init_device_mesh(plan.device.type, (plan.setup.world_size,))


def _offload_policy(plan: WrapPlan) -> OffloadPolicy:
    if plan.setup.offload is not Offload.PARAMS:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=plan.device.type != "cpu")


@torch.no_grad()
def _materialize(model: nn.Module, plan: WrapPlan) -> None:
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
