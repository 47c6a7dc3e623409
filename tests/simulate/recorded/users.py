"""Models that the tests record and run dry, as ``--module`` names them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_bench.spec.subprocesses.dry_run import UserModule
from fsdp_bench.train.models.loss import plain
from fsdp_bench.train.models.transformer import Llama
from tests.shapes import shape

BLOCK = "fsdp_bench.train.models.transformer:LlamaBlock"


def user_module(function: str, block: str | None = None) -> UserModule:
    """Return what ``--module`` and ``--block`` say for a function below."""
    return UserModule(function=f"{__name__}:{function}", block=block, folder=str(Path(__file__).parents[3]))


class WithLoss(Llama):
    """The benchmark's Llama, as a model that computes its own loss."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        logits = super().forward(input_ids)
        return {"loss": plain(logits, labels), "logits": logits}


def _batch(micro_batch_size: int, sequence_length: int) -> dict[str, Tensor]:
    ids = torch.zeros(micro_batch_size, sequence_length, dtype=torch.int64)
    return {"input_ids": ids, "labels": ids.clone()}


def _llama(num_hidden_layers: int) -> nn.Module:
    sizes = {"hidden_size": 128, "num_key_value_heads": 2, "intermediate_size": 256, "vocab_size": 500}
    return WithLoss(shape(name="own", num_hidden_layers=num_hidden_layers, **sizes))


def llama(micro_batch_size: int, sequence_length: int) -> tuple[nn.Module, Any]:
    return _llama(6), _batch(micro_batch_size, sequence_length)


def llama_of_4_layers(micro_batch_size: int, sequence_length: int) -> tuple[nn.Module, Any]:
    return _llama(4), _batch(micro_batch_size, sequence_length)


def llama_of_5_layers(micro_batch_size: int, sequence_length: int) -> tuple[nn.Module, Any]:
    return _llama(5), _batch(micro_batch_size, sequence_length)


def llama_of_9_layers(micro_batch_size: int, sequence_length: int) -> tuple[nn.Module, Any]:
    return _llama(9), _batch(micro_batch_size, sequence_length)


class _Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return x.square().mean()


def bare_loss(micro_batch_size: int, sequence_length: int) -> tuple[nn.Module, Any]:
    return _Bare(), (torch.zeros(micro_batch_size, sequence_length, 32),)


class _DependsOnData(_Bare):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[x.sum(-1) > 0])


def depends_on_data(micro_batch_size: int, sequence_length: int) -> tuple[nn.Module, Any]:
    return _DependsOnData(), (torch.zeros(micro_batch_size, sequence_length, 32),)


class _Chunked(nn.Module):
    """A layer whose states are passed on from one part of the sequence to the next, as linear attention does it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.out = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        state, parts = torch.zeros_like(x[:, 0]), []
        for part in x.split(32, dim=1):
            parts.append(torch.sigmoid(self.gate(part)) * state[:, None])
            state = state + parts[-1].mean(1)
        return x + self.out(torch.cat(parts, dim=1))


class _LoopsOverSequence(_Bare):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Chunked() for _ in range(6))


def loops_over_sequence(micro_batch_size: int, sequence_length: int) -> tuple[nn.Module, Any]:
    return _LoopsOverSequence(), (torch.zeros(micro_batch_size, sequence_length, 32),)


class _Grouped(nn.Module):
    """Attention of four heads with two of keys and values, which no fused kernel takes in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys, self.out = nn.Linear(32, 32), nn.Linear(32, 16), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys = (y.unflatten(-1, (-1, 8)).transpose(1, 2) for y in (self.queries(x), self.keys(x)))
        heads = F.scaled_dot_product_attention(queries, keys, keys, is_causal=True, enable_gqa=True)
        return x + self.out(heads.transpose(1, 2).flatten(2))


class _WithGroupedHeads(_Bare):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Grouped() for _ in range(6))


def grouped_heads(micro_batch_size: int, sequence_length: int) -> tuple[nn.Module, Any]:
    return _WithGroupedHeads(), (torch.zeros(micro_batch_size, sequence_length, 32),)


def own_batch() -> tuple[nn.Module, Any]:
    return _Bare(), (torch.zeros(2, 4, 32),)
