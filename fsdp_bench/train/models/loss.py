"""The next-token loss, by kind. A LossFunction takes logits B, S, V and targets B, S, and returns the mean over B*S.

A HeadLoss includes the head: it takes the head's weight V, D, its input T, D and targets T, where T is B*S.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fsdp_bench.spec.errors import MachineError, install_hint
from fsdp_bench.spec.setup import Loss

NUM_CHUNKS = 8
"""Chunks of the chunked loss (torchtune's CEWithChunkedOutputLoss uses the same number)."""

LossFunction = Callable[[Tensor, Tensor], Tensor]
HeadLoss = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """Cross-entropy on fp32 logits, as most training code writes it."""
    return F.cross_entropy(logits_BSV.flatten(0, 1).float(), targets_BS.flatten())


def _chunk_sum(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
    return F.cross_entropy(logits_TV.float(), targets_T, reduction="sum")


def chunked(logits_BSV: Tensor, targets_BS: Tensor, num_targets: int | None = None) -> Tensor:
    """Cross-entropy in chunks of tokens. Only one chunk's fp32 copy is alive at a time, in forward and in backward.

    ``num_targets`` is how many targets count, where some are ignored.
    """
    logits_TV, targets_T = logits_BSV.flatten(0, 1), targets_BS.flatten()
    total = logits_TV.new_zeros((), dtype=torch.float32)
    pairs = zip(logits_TV.chunk(NUM_CHUNKS), targets_T.chunk(NUM_CHUNKS), strict=True)
    for logits, targets in pairs:
        total = total + checkpoint(_chunk_sum, logits, targets, use_reentrant=False, preserve_rng_state=False)
    return total / (num_targets or targets_T.numel())


def loss_function(kind: Loss) -> LossFunction:
    """Return the loss function of a kind. ``compiled`` is the plain one, compiled by torch.compile.

    That of a kind that includes the head takes the model's output, which is the loss.

    Raises:
        MachineError: if the package that has the kind is not installed.
    """
    if kind is Loss.CHUNKED:
        return chunked
    if kind is Loss.FLASH_ATTN:
        return _on_rows(_from_package(kind, "flash_attn.losses.cross_entropy", "CrossEntropyLoss"))
    if kind is Loss.LIGER:
        return _on_rows(_from_package(kind, "liger_kernel.transformers", "LigerCrossEntropyLoss"))
    if kind.includes_head:
        return _computed_by_the_model
    return torch.compile(plain) if kind is Loss.COMPILED else plain


def head_loss(kind: Loss) -> HeadLoss | None:
    """Return the loss of a kind that includes the head; None for other kinds.

    Raises:
        MachineError: if the package that has the kind is not installed.
    """
    if not kind.includes_head:
        return None
    found: HeadLoss = _from_package(kind, "liger_kernel.transformers", "LigerFusedLinearCrossEntropyLoss")
    return found


def _computed_by_the_model(loss: Tensor, _targets_BS: Tensor) -> Tensor:
    return loss


def _on_rows(cross_entropy: LossFunction) -> LossFunction:
    """Return a loss that takes logits T, V as one that takes them B, S, V. It gets them in the compute dtype."""

    def loss(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
        return cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten())

    return loss


_INSTALL = {
    "liger_kernel": install_hint("liger"),
    "flash_attn": "pip install flash-attn --no-build-isolation",
}


def _from_package(kind: Loss, module: str, name: str) -> Any:
    """Return a loss of a package, built with its defaults."""
    package = module.partition(".")[0]
    try:
        return getattr(importlib.import_module(module), name)()
    except ImportError as error:
        raise MachineError(f"loss {kind.value} needs {package} ({error}): {_INSTALL[package]}") from None
