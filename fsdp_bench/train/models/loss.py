"""The next-token loss, by kind. A LossFunction takes logits B, S, V and targets B, S, and returns the mean over B*S.

A HeadLoss includes the head: it takes the head's weight V, D, its input T, D and targets T, where T is B*S.
"""

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

IGNORED = -100
"""The target of a sequence's last token, which predicts nothing: ignore_index of torch and of other packages."""

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


class _FastCrossEntropy(torch.autograd.Function):
    """Fast_CrossEntropyLoss of unsloth (kernels/cross_entropy_loss.py), of logits T, V and targets T, without kernels.

    It saves the logits, and overwrites them with their gradient in backward. Some rows are in work at a time.
    """

    ROWS = 4

    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, targets_T: Tensor) -> Tensor:
        sums_T, losses_T = (logits_TV.new_empty(len(targets_T), dtype=torch.float32) for _ in range(2))
        for logits, targets, sums, losses in zip(*_in_rows(logits_TV, targets_T, sums_T, losses_T), strict=True):
            torch.logsumexp(logits, 1, out=sums)
            wanted = logits.gather(1, targets.clamp(min=0)[:, None])[:, 0]
            losses.copy_((sums - wanted).masked_fill(targets == IGNORED, 0))
        ctx.save_for_backward(logits_TV, sums_T, targets_T)
        return losses_T

    @staticmethod
    def backward(ctx: Any, *d_losses: Tensor) -> tuple[Tensor, None]:
        logits_TV, sums_T, targets_T = ctx.saved_tensors
        parts = _in_rows(logits_TV, sums_T, targets_T, d_losses[0])
        for logits, sums, targets, d_loss in zip(*parts, strict=True):
            logits.sub_(sums[:, None]).exp_()
            logits[torch.arange(len(targets), device=targets.device), targets.clamp(min=0)] -= 1
            logits.mul_(d_loss.masked_fill(targets == IGNORED, 0)[:, None])
        return logits_TV, None


def _in_rows(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    return [tensor.split(_FastCrossEntropy.ROWS) for tensor in tensors]


def unsloth_fp32(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """Compute unsloth's fast_cross_entropy_loss on logits that are cast to fp32."""
    losses_T: Tensor = _FastCrossEntropy.apply(logits_BSV.flatten(0, 1).float(), targets_BS.flatten())
    return losses_T.sum() / torch.count_nonzero(targets_BS != IGNORED)


def loss_function(kind: Loss) -> LossFunction:
    """Return the loss function of a kind. ``compiled`` is the plain one, compiled by torch.compile.

    That of a kind that includes the head takes the model's output, which is the loss.

    Raises MachineError if the package that has the kind is not installed.
    """
    if kind is Loss.CHUNKED:
        return chunked
    if kind is Loss.UNSLOTH_FP32:
        return unsloth_fp32
    if kind is Loss.FLASH_ATTN:
        return _on_rows(_from_package(kind, "flash_attn.losses.cross_entropy", "CrossEntropyLoss"))
    if kind is Loss.LIGER:
        return _on_rows(_from_package(kind, "liger_kernel.transformers", "LigerCrossEntropyLoss"))
    if kind.includes_head:
        return lambda loss, _targets_BS: loss
    return torch.compile(plain) if kind is Loss.COMPILED else plain


def head_loss(kind: Loss) -> HeadLoss | None:
    """Return a loss that includes the head, or None. Raises MachineError if its package is not installed."""
    if not kind.includes_head:
        return None
    found: HeadLoss = _from_package(kind, "liger_kernel.transformers", "LigerFusedLinearCrossEntropyLoss")
    return found


def _on_rows(cross_entropy: LossFunction) -> LossFunction:
    """Return a loss that takes logits T, V as one that takes them B, S, V. It gets them in the compute dtype."""

    def loss(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
        return cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten())

    return loss


_INSTALL = {"liger_kernel": install_hint("liger"), "flash_attn": "pip install flash-attn --no-build-isolation"}


def _from_package(kind: Loss, module: str, name: str) -> Any:
    package = module.partition(".")[0]
    try:
        return getattr(importlib.import_module(module), name)()
    except ImportError as error:
        raise MachineError(f"loss {kind.value} needs {package} ({error}): {_INSTALL[package]}") from None
