"""Parts for torchtune's recipes that need no download; recipes take parts by name, as ``dataset._component_=...``.

Tokenizer       in place of Llama 3's: no words, the same numbers
packed_tokens   in place of torchtune.datasets.alpaca_dataset with packed=True: torchtune's own PackedDataset, over
                samples of 128 tokens that are all 0
NoCheckpoint    in place of torchtune.training.FullModelHFCheckpointer: tensors of the model's shapes in host
                memory, in bfloat16, as in the file; their values are whatever is there
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset
from torchtune.datasets import PackedDataset
from torchtune.models.llama3_2 import llama3_2_3b

SAMPLE_TOKENS = 128
NUM_SAMPLES = 4096


class Tokenizer:
    """What a recipe asks of its tokenizer."""

    def __init__(self, path: str = "", max_seq_len: int | None = None) -> None:
        self.max_seq_len, self.pad_id = max_seq_len, 128004


class _Samples(Dataset[dict[str, list[int]]]):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        if index >= NUM_SAMPLES:
            raise IndexError(index)
        return {"tokens": [0] * SAMPLE_TOKENS, "labels": [0] * SAMPLE_TOKENS}


def packed_tokens(tokenizer: Tokenizer, packed: bool = True) -> Any:
    """Return samples packed into sequences of the tokenizer's maximum length."""
    assert packed
    return PackedDataset(_Samples(), max_seq_len=tokenizer.max_seq_len, padding_idx=tokenizer.pad_id)


class NoCheckpoint:
    """The state of Llama 3.2 3B, from no file."""

    def __init__(self, **_settings: Any) -> None:
        pass

    def load_checkpoint(self) -> dict[str, Any]:
        """Return the model's state."""
        with torch.device("meta"):
            shapes = {name: tensor.shape for name, tensor in llama3_2_3b().state_dict().items()}
        return {"model": {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}}
