"""DistributedDataParallel from a WrapPlan: NO_SHARD under fsdp2. On one rank it is the model without a wrapper.

Mixed precision is as usual with DDP: fp32 parameters and gradients, and autocast around forward. A narrower reduction
dtype is done by DDP's own compression hook.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from fsdp_bench.train.models.dtypes import DTYPES
from fsdp_bench.train.wrapping.units import WrapPlan

_COMPRESSION = {"bf16": bf16_compress_hook, "fp16": fp16_compress_hook}


def wrap_ddp(model: nn.Module, plan: WrapPlan) -> nn.Module:
    """Materialise or move the model, run its forward under autocast, and wrap it unless the rank is alone."""
    precision = plan.setup.precision
    _materialize(model, plan)
    if precision.compute != precision.store:
        autocast: Any = torch.autocast(plan.device.type, dtype=DTYPES[precision.compute])
        model.forward = autocast(model.forward)
    if plan.setup.is_bare:
        return model
    # Without a group the compression hooks reduce over the whole world, whatever DDP was given.
    group = plan.process_group or (plan.mesh.get_group() if plan.mesh is not None else None)
    wrapped = DistributedDataParallel(
        model,
        device_ids=[plan.device] if plan.device.type == "cuda" else None,
        process_group=group,
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
