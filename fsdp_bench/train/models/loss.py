"""The next-token loss in three ways. All take logits B, S, V and targets B, S, and return the mean over B*S."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fsdp_bench.spec.setup import Loss

NUM_CHUNKS = 8
"""Chunks of the chunked loss (torchtune's CEWithChunkedOutputLoss uses the same number)."""

LossFunction = Callable[[Tensor, Tensor], Tensor]


def plain(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """Cross-entropy on fp32 logits, as most training code writes it."""
    return F.cross_entropy(logits_BSV.flatten(0, 1).float(), targets_BS.flatten())


def _chunk_sum(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
    return F.cross_entropy(logits_TV.float(), targets_T, reduction="sum")


def chunked(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """Cross-entropy in chunks of tokens. Only one chunk's fp32 copy is alive at a time, in forward and in backward."""
    logits_TV, targets_T = logits_BSV.flatten(0, 1), targets_BS.flatten()
    total = logits_TV.new_zeros((), dtype=torch.float32)
    pairs = zip(logits_TV.chunk(NUM_CHUNKS), targets_T.chunk(NUM_CHUNKS), strict=True)
    for logits, targets in pairs:
        total = total + checkpoint(_chunk_sum, logits, targets, use_reentrant=False, preserve_rng_state=False)
    return total / targets_T.numel()


def loss_function(kind: Loss) -> LossFunction:
    """Return the loss function of a kind. ``compiled`` is the plain one, compiled by torch.compile."""
    if kind is Loss.CHUNKED:
        return chunked
    return torch.compile(plain) if kind is Loss.COMPILED else plain
