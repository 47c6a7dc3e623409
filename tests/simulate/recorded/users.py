"""Models that the tests record and run dry, as ``--module`` names them."""

from collections.abc import Callable
from functools import partial
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


def _llama(num_hidden_layers: int, micro_batch_size: int, sequence_length: int) -> tuple[nn.Module, Any]:
    sizes = {"hidden_size": 128, "num_key_value_heads": 2, "intermediate_size": 256, "vocab_size": 500}
    ids = torch.zeros(micro_batch_size, sequence_length, dtype=torch.int64)
    model = WithLoss(shape(name="own", num_hidden_layers=num_hidden_layers, **sizes))
    return model, {"input_ids": ids, "labels": ids.clone()}


llama, llama_of_4_layers, llama_of_5_layers, llama_of_9_layers = (partial(_llama, layers) for layers in (6, 4, 5, 9))


class _Bare(nn.Module):
    """Six blocks, and a loss that is returned alone."""

    def __init__(self, block: Callable[[], nn.Module] = lambda: nn.Linear(32, 32)) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return x.square().mean()


class _DependsOnData(_Bare):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[x.sum(-1) > 0])


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


class _Grouped(nn.Module):
    """Attention of four heads with two of keys and values, which no fused kernel takes in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys, self.out = nn.Linear(32, 32), nn.Linear(32, 16), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys = (y.unflatten(-1, (-1, 8)).transpose(1, 2) for y in (self.queries(x), self.keys(x)))
        heads = F.scaled_dot_product_attention(queries, keys, keys, is_causal=True, enable_gqa=True)
        return x + self.out(heads.transpose(1, 2).flatten(2))


def _with_batch(
    model: Callable[[], nn.Module], micro_batch_size: int, sequence_length: int
) -> tuple[nn.Module, tuple[Tensor]]:
    return model(), (torch.zeros(micro_batch_size, sequence_length, 32),)


bare_loss, depends_on_data = partial(_with_batch, _Bare), partial(_with_batch, _DependsOnData)
loops_over_sequence = partial(_with_batch, partial(_Bare, _Chunked))
grouped_heads = partial(_with_batch, partial(_Bare, _Grouped))


def own_batch() -> tuple[nn.Module, Any]:
    return _Bare(), (torch.zeros(2, 4, 32),)
