"""Random token batches: different on every rank, determined by the seed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler

from fsdp_bench.spec.setup import TrainSetup


class SyntheticTokens(Dataset[Tensor]):
    """Sequences of uniformly random tokens, one token longer than the model's input, for the shifted targets."""

    def __init__(self, num_sequences: int, sequence_length: int, vocab_size: int, seed: int) -> None:
        self.num_sequences = num_sequences
        self.sequence_length = sequence_length
        self.vocab_size = vocab_size
        self.seed = seed

    def __len__(self) -> int:
        return self.num_sequences

    def __getitem__(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        return torch.randint(self.vocab_size, (self.sequence_length + 1,), generator=generator)


def batches(setup: TrainSetup, vocab_size: int, num_steps: int, rank: int, world_size: int) -> Iterator[list[Tensor]]:
    """Yield, for each step, this rank's micro-batches as token tensors B, S + 1 on the CPU.

    The sequences of a step on all ranks together are the same for every world size with the same global batch.
    """
    dataset = SyntheticTokens(setup.global_batch_size * num_steps, setup.sequence_length, vocab_size, setup.seed)
    sampler: DistributedSampler[Tensor] = DistributedSampler(
        dataset, num_replicas=world_size, rank=rank, shuffle=True, seed=setup.seed
    )
    indices: Iterator[Any] = iter(sampler)
    per_micro_batch = setup.global_batch_size // (world_size * setup.gradient_accumulation_steps)
    for _ in range(num_steps):
        yield [
            torch.stack([dataset[next(indices)] for _ in range(per_micro_batch)])
            for _ in range(setup.gradient_accumulation_steps)
        ]
