"""Activation checkpointing of blocks, applied before sharding, so that FSDP wraps the checkpointed block.

The other order, checkpoint(FSDP(block)), gathers a block's parameters a second time for the recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from fsdp_bench.spec.setup import Checkpointing

_COSTLY = (
    "aten.mm.default",
    "aten.addmm.default",
    "aten.bmm.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
)
"""Operators whose outputs selective checkpointing saves: matrix products and attention."""


def saved_ops(kind: Checkpointing) -> tuple[str, ...]:
    """Return the operators whose outputs are saved, for the record of a trial."""
    return _COSTLY if kind is Checkpointing.SELECTIVE else ()


def _resolve(name: str) -> Any:
    namespace, operator, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), operator), overload)


def _context_fn() -> Callable[[], Any]:
    costly = {_resolve(name) for name in _COSTLY}

    def policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in costly else CheckpointPolicy.PREFER_RECOMPUTE

    return partial(create_selective_checkpoint_contexts, policy)


def checkpoint_blocks(model: nn.Module, blocks: Iterable[nn.Module], kind: Checkpointing) -> dict[nn.Module, nn.Module]:
    """Replace each block in ``model`` by its checkpointed wrapper; return the wrapper of each block."""
    if kind is Checkpointing.NONE:
        return {}
    extra = {"context_fn": _context_fn()} if kind is Checkpointing.SELECTIVE else {}
    replaced: dict[nn.Module, nn.Module] = {}
    targets = set(blocks)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child in targets:
                replaced[child] = checkpoint_wrapper(child, checkpoint_impl=CheckpointImpl.NO_REENTRANT, **extra)
                setattr(parent, name, replaced[child])
    return replaced
