"""Reads strategy, units and dtypes back from a wrapped model, for the record of a trial."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

from fsdp_bench.spec.rank_report import EffectiveSetup
from fsdp_bench.spec.setup import ShardingStrategy, TrainSetup
from fsdp_bench.train.models.dtypes import dtype_names
from fsdp_bench.train.wrapping.activation_checkpointing import saved_ops


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def storage_bytes(tensors: object) -> int:
    """Return the bytes of the storages of tensors. Each storage counts once."""
    storages = {}
    for tensor in tensors:  # type: ignore[attr-defined]
        storage = local(tensor).untyped_storage()
        storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """Return the gradients that this rank holds."""
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def optimizer_states(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the tensors of the optimizer's states."""
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]


def effective_setup(
    model: nn.Module, optimizer: torch.optim.Optimizer, gradient_dtypes: tuple[str, ...], setup: TrainSetup
) -> EffectiveSetup:
    """Read strategy, units, groups and dtypes back. ``gradient_dtypes`` are from before the optimizer's step."""
    strategy, wrapper, num_units, group_size = _wrapping(model)
    shard, replicate = _hybrid_ranks(model) if setup.strategy.is_hybrid else ((), ())
    return EffectiveSetup(
        strategy=strategy,
        wrapper=wrapper,
        num_units=num_units,
        shard_group_size=group_size,
        shard_ranks=shard,
        replicate_ranks=replicate,
        parameter_dtypes=dtype_names(model.parameters()),
        gradient_dtypes=gradient_dtypes,
        optimizer_state_dtypes=dtype_names(optimizer_states(optimizer)),
        selective_saved_ops=saved_ops(setup),
    )


def _wrapping(model: nn.Module) -> tuple[str, str, int, int]:
    """Return strategy, wrapper, number of units and size of the sharding group."""
    if isinstance(model, FullyShardedDataParallel):
        units = FullyShardedDataParallel.fsdp_modules(model)
        strategy = model.sharding_strategy.name
        # Without sharding FSDP1's process group is the whole world, which replicates.
        group: Any = model.process_group
        size = 1 if strategy == "NO_SHARD" else group.size()
        return strategy, "FullyShardedDataParallel", len(units), size
    if isinstance(model, DistributedDataParallel):
        return ShardingStrategy.NO_SHARD.value, "DistributedDataParallel", 1, 1
    if isinstance(model, FSDPModule):
        found = [module for module in model.modules() if isinstance(module, FSDPModule)]
        units2 = list({id(module._get_fsdp_state()): module for module in found}.values())  # a unit of several modules
        mesh, placements = _mesh_of(model)
        hybrid = any(isinstance(placement, Replicate) for placement in placements)
        return _fsdp2_strategy(units2, hybrid), "fully_shard", len(units2), mesh.size(mesh.ndim - 1)
    return ShardingStrategy.NO_SHARD.value, "none", 1, 1


def _hybrid_ranks(model: nn.Module) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks of the groups that shard and that replicate; none where collectives end at once."""
    if dist.get_backend() == "fake":
        return (), ()
    if isinstance(model, FullyShardedDataParallel):
        groups = model.process_group, getattr(model, "_inter_node_pg", None)
    elif isinstance(model, FSDPModule) and _mesh_of(model)[0].ndim == 2:
        replicate, shard = _mesh_of(model)[0].get_all_groups()
        groups = shard, replicate
    else:
        return (), ()
    shard_ranks, replicate_ranks = (() if group is None else dist.get_process_group_ranks(group) for group in groups)
    return tuple(shard_ranks), tuple(replicate_ranks)


def _mesh_of(model: nn.Module):  # type: ignore[no-untyped-def]
    parameter = next(p for p in model.parameters() if isinstance(p, DTensor))
    return parameter.device_mesh, parameter.placements


def _fsdp2_strategy(units: Sequence[Any], hybrid: bool) -> str:
    """Return the strategy, from whether units other than the root reshard after forward, and to which mesh."""
    below_root = units[1:] or units
    try:
        reshards = any(
            unit._get_fsdp_state()._fsdp_param_group.post_forward_mesh_info is not None for unit in below_root
        )
    except AttributeError:  # a private name that another torch may not have
        return "unknown"
    if hybrid:
        return (ShardingStrategy.HYBRID_SHARD if reshards else ShardingStrategy.HYBRID_SHARD_ZERO2).value
    return (ShardingStrategy.FULL_SHARD if reshards else ShardingStrategy.SHARD_GRAD_OP).value
