"""The optimizers of the benchmark, from torch.optim."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from fsdp_bench.spec.setup import OptimizerKind


def build_optimizer(
    parameters: Iterable[nn.Parameter], kind: OptimizerKind, learning_rate: float
) -> torch.optim.Optimizer:
    """Build the optimizer for parameters that are already wrapped."""
    if kind is OptimizerKind.SGD:
        return torch.optim.SGD(parameters, lr=learning_rate, foreach=True)
    if kind is OptimizerKind.ADAFACTOR:
        return torch.optim.Adafactor(parameters, lr=learning_rate)
    foreach = kind is OptimizerKind.ADAMW_FOREACH
    fused = kind is OptimizerKind.ADAMW_FUSED
    return torch.optim.AdamW(parameters, lr=learning_rate, foreach=foreach, fused=fused)
