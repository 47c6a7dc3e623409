"""Which modules become FSDP units: train/units.py on the ledger's module tree."""

from __future__ import annotations

from fsdp_bench.predict.transformer import Module, ModuleList, Transformer
from fsdp_bench.spec.setup import Api, ShardingStrategy, TrainSetup, Wrap


def choose_units(model: Transformer, setup: TrainSetup) -> list[Module]:
    """Return the units below the root, children before parents."""
    if setup.wrap is Wrap.NONE:
        return []
    if setup.wrap is Wrap.BLOCK:
        return list(model.blocks)
    return _units_by_size(model, setup.min_num_params)


def blocks_are_alike(model: Transformer, units: list[Module], setup: TrainSetup) -> bool:
    """Tell whether every block's weights are in units of that block alone, so that one block stands for others."""
    if setup.api is Api.FSDP2 and setup.strategy is ShardingStrategy.NO_SHARD:
        # DistributedDataParallel has no units, but buckets, which matter where they are reduced in another dtype.
        return setup.precision.reduce == setup.precision.store
    inside = {id(weight) for unit in units for weight in unit.all_weights()}
    return all(id(weight) in inside for block in model.blocks for weight in block.all_weights())


def _units_by_size(model: Transformer, min_num_params: int) -> list[Module]:
    """torch.distributed.fsdp.wrap.size_based_auto_wrap_policy: subtrees that reach the size, never a ModuleList.

    A tied embedding is read outside of its module, so it stays in the root (train/units.py).
    """
    units: list[Module] = []
    kept = {id(model.embedding)} if model.lm_head is None else set()

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
