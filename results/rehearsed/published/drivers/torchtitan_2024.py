"""Starts train.py of torchtitan of March 2024 (then torchtrain) without a download: ``torchtitan_2024.py ARGUMENTS``.

To be run in a checkout of that repository; ARGUMENTS are those of its train.py. What it replaces:

    the tokenizer   by one of 32000 words, which is what Llama 2's has
    the data set    by batches of the same shape and type in which every token is 0
    torch.utils.checkpoint._pt2_selective_checkpoint_context_fn_gen, where torch has it no more (from 2.4 on),
                    by create_selective_checkpoint_contexts, which has taken its place
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils.checkpoint as checkpoint
from torch.utils.data import DataLoader, IterableDataset

WORDS = 32000


class _Sequences(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, length: int) -> None:
        self._length = length

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            tokens = torch.zeros(self._length + 1, dtype=torch.int64)
            yield tokens[:-1], tokens[1:]


def _loader(_name: str, _path: str | None, _tokenizer: Any, batch: int, length: int, *_rest: Any) -> DataLoader[Any]:
    return DataLoader(_Sequences(length), batch_size=batch)


def _contexts(policy: Callable[..., bool]) -> Any:
    """Ask a policy of the older form, which is given a word and answers whether to keep what an operator computes."""
    policies = checkpoint.CheckpointPolicy

    def newer(context: Any, operator: Any, *arguments: Any, **keywords: Any) -> Any:
        mode = "recompute" if context.is_recompute else "forward"
        return policies.MUST_SAVE if policy(mode, operator, *arguments, **keywords) else policies.PREFER_RECOMPUTE

    return checkpoint.create_selective_checkpoint_contexts(newer)


def main() -> None:
    """Replace, then run train.py as a program."""
    if not hasattr(checkpoint, "_pt2_selective_checkpoint_context_fn_gen"):
        checkpoint._pt2_selective_checkpoint_context_fn_gen = _contexts
    sys.path.insert(0, os.getcwd())
    import torchtrain.datasets as datasets

    datasets.create_tokenizer = lambda _kind, _path: SimpleNamespace(n_words=WORDS)
    datasets.dataloader_fn["minipile"] = _loader
    sys.argv[0] = "train.py"
    runpy.run_path("train.py", run_name="__main__")


if __name__ == "__main__":
    main()
