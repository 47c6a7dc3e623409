"""Data for litgpt's scripts that needs no download: ``--data litgpt_tokens.Tokens`` instead of ``--data TinyStories``.

Batches have the shape and type of litgpt.data.TinyStories' batches; every token is 0.
"""

from __future__ import annotations

from typing import Any

import torch
from litgpt.data import DataModule
from torch.utils.data import DataLoader, Dataset


class _Sequences(Dataset[torch.Tensor]):
    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, _index: int) -> torch.Tensor:
        return torch.zeros(self._length, dtype=torch.int64)


class Tokens(DataModule):
    """Sequences of one token more than the model reads, as litgpt's pretraining wants them."""

    def __init__(self) -> None:
        super().__init__()
        self._batch_size, self._length = 1, 1

    def connect(self, tokenizer: Any = None, batch_size: int = 1, max_seq_length: int | None = -1) -> None:
        """Take what the script decides."""
        assert max_seq_length is not None
        self._batch_size, self._length = batch_size, max_seq_length + 1

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        """Return the batches to train with."""
        return DataLoader(_Sequences(self._length), batch_size=self._batch_size, pin_memory=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[torch.Tensor]:
        """Return the batches to validate with."""
        return self.train_dataloader()
