"""Random token batches: different on every rank, determined by the seed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from fsdp_bench.spec.setup import TrainSetup


def batches(setup: TrainSetup, vocab_size: int, num_steps: int, rank: int, world_size: int) -> Iterator[list[Tensor]]:
    """Yield, for each step, this rank's micro-batches as token tensors B, S + 1 on the CPU.

    The sequences of a step on all ranks together are the same for every world size with the same global batch.
    """

    def sequence(index: int) -> Tensor:
        """Return random tokens, one more than the model's input, for the shifted targets."""
        generator = torch.Generator().manual_seed(setup.seed * 1_000_003 + index)
        return torch.randint(vocab_size, (setup.sequence_length + 1,), generator=generator)

    numbers: Any = range(setup.global_batch_size * num_steps)
    indices = iter(DistributedSampler[int](numbers, world_size, rank, shuffle=True, seed=setup.seed))
    per_micro_batch = setup.global_batch_size // (world_size * setup.gradient_accumulation_steps)
    for _ in range(num_steps):
        yield [
            torch.stack([sequence(next(indices)) for _ in range(per_micro_batch)])
            for _ in range(setup.gradient_accumulation_steps)
        ]
