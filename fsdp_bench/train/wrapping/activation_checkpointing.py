"""Activation checkpointing and offload of blocks, before sharding: else FSDP gathers again for the recomputation."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from fsdp_bench.spec.checkpointing_policy import CheckpointingPolicy
from fsdp_bench.spec.setup import Checkpointing, Reentrant, TrainSetup
from fsdp_bench.train.models.quantized import outer_operator


def saved_ops(setup: TrainSetup) -> tuple[str, ...]:
    """Return the operators whose outputs are saved, for the record of a trial."""
    return setup.policy.saved if setup.checkpointing is Checkpointing.SELECTIVE else ()


def _context_fn(policy: CheckpointingPolicy) -> Callable[[], Any]:
    """Return what makes the two contexts of one call of one block."""
    aten = torch.ops.aten
    saved = {getattr(aten, name.removeprefix("aten.")) for name in policy.saved}

    def contexts() -> Any:
        num_products = {True: 0, False: 0}  # in recomputation and in forward

        def decide(context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
            if outer_operator():  # on a GPU this function would not be asked
                return CheckpointPolicy.PREFER_RECOMPUTE
            if operator is aten.mm.default and policy.recomputes_every_second_product:
                num_products[context.is_recompute] += 1
                if num_products[context.is_recompute] % 2 == 0:
                    return CheckpointPolicy.PREFER_RECOMPUTE
            is_saved = getattr(operator, "overloadpacket", None) in saved
            return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(decide)

    return contexts


def checkpoint_blocks(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    kind: Checkpointing,
    policy: CheckpointingPolicy | None = None,
    reentrant: Reentrant = Reentrant.NO,
) -> dict[nn.Module, nn.Module]:
    """Replace the blocks that ``policy`` chooses, by default all, by their checkpointed wrappers.

    Blocks are counted in the order in which the model registers them. Returns the wrapper of each block that has one.
    """
    if kind is Checkpointing.NONE:
        return {}
    policy = policy or CheckpointingPolicy()
    extra = {"context_fn": _context_fn(policy)} if kind is Checkpointing.SELECTIVE else {}
    given = set(blocks)
    targets = [module for module in model.modules() if module in given][:: policy.every_blocks]
    impl = CheckpointImpl.NO_REENTRANT if reentrant is Reentrant.NO else CheckpointImpl.REENTRANT
    return _replace(model, {one: checkpoint_wrapper(one, checkpoint_impl=impl, **extra) for one in targets})


def require_grad_of_inputs(model: nn.Module) -> None:
    """Let a frozen embedding's output need a gradient, as enable_input_require_grads for reentrant blocks."""
    enable = getattr(model, "enable_input_require_grads", None)
    if enable is not None and any(not parameter.requires_grad for parameter in model.parameters()):
        enable()


def offload_blocks(
    model: nn.Module, blocks: Iterable[nn.Module], checkpointed: dict[nn.Module, nn.Module]
) -> dict[nn.Module, nn.Module]:
    """Wrap blocks, or what checkpoints them, to save tensors in pinned host memory; return each wrapper."""
    wrappers = {block: offload_wrapper(checkpointed.get(block, block)) for block in blocks}
    _replace(model, {checkpointed.get(block, block): wrapper for block, wrapper in wrappers.items()})
    return wrappers


def _replace(model: nn.Module, wrappers: dict[nn.Module, nn.Module]) -> dict[nn.Module, nn.Module]:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child in wrappers:
                setattr(parent, name, wrappers[child])
    return wrappers
