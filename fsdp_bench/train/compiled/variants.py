"""Which blocks are recorded, and at which sizes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch

from fsdp_bench.spec.checkpointing_policy import EVERY_SECOND_PRODUCT
from fsdp_bench.spec.model import Family, ModelShape
from fsdp_bench.spec.recording.compiled import BOTH_WAYS, FEW_TOKENS, MORE_TOKENS, REGIMES, CompiledKind
from fsdp_bench.spec.setup import Checkpointing
from fsdp_bench.train.compiled.compile_block import Case

DTYPES = {2: torch.bfloat16, 4: torch.float32}

_CHECKPOINTING = (
    (Checkpointing.NONE, None),
    (Checkpointing.FULL, None),
    (Checkpointing.SELECTIVE, None),
    (Checkpointing.SELECTIVE, EVERY_SECOND_PRODUCT),
)

_POINTS = {
    # batch, length, heads, heads per key-value head, head size, intermediate size
    BOTH_WAYS: (
        (3, 4096, 16, 4, 128, 5632),
        (4, 3200, 20, 5, 112, 5760),
        (2, 7168, 18, 3, 128, 6016),
        (6, 2048, 14, 2, 128, 4928),
        (5, 2304, 22, 2, 96, 6144),
    ),
    MORE_TOKENS: (
        (3, 1024, 16, 4, 128, 5632),
        (2, 1664, 20, 5, 112, 5760),
        (4, 896, 18, 3, 128, 6016),
        (6, 512, 14, 2, 128, 4928),
        (5, 768, 22, 2, 96, 6144),
    ),
    FEW_TOKENS: (
        (3, 1024, 32, 4, 128, 14336),
        (2, 1664, 40, 5, 112, 13824),
        (4, 896, 36, 3, 128, 15104),
        (6, 512, 28, 2, 128, 9856),
        (5, 704, 44, 4, 96, 12288),
    ),
}
"""No two tensors are equally large by chance. The last ones are compiled where the first three are unlike."""


class Point(NamedTuple):
    """One size."""

    shape: ModelShape
    batch: int
    length: int

    @property
    def sizes(self) -> dict[str, int]:
        """The symbols' values."""
        shape = self.shape
        is_grouped = shape.num_key_value_heads < shape.num_attention_heads
        groups = {"num_key_value_heads": shape.num_key_value_heads} if is_grouped else {}
        return {
            "B": self.batch,
            "S": self.length,
            "num_attention_heads": shape.num_attention_heads,
            **groups,
            "head_dim": shape.head_dim,
            "intermediate_size": shape.intermediate_size,
        }


class Variant(NamedTuple):
    """One recording: a name, its code, and the sizes at which it is compiled."""

    kind: CompiledKind
    case: Case
    points: list[Point]


def variants() -> Iterator[Variant]:
    """Yield all that is recorded."""
    blocks = ((Family.LLAMA, True), (Family.LLAMA, False), (Family.GPT2, False))
    for itemsize, (family, is_grouped), regime in product(DTYPES, blocks, REGIMES):
        points = list(_points(family, is_grouped, regime))
        for checkpointing, policy in _CHECKPOINTING:
            kind = CompiledKind(family, is_grouped, itemsize, checkpointing, policy, regime)
            yield Variant(kind, Case(points[0].shape, DTYPES[itemsize], checkpointing, policy), points)


def _points(family: Family, is_grouped: bool, regime: str) -> Iterator[Point]:
    for batch, length, heads, groups, head_dim, inner in _POINTS[regime]:
        shape = ModelShape(
            name="recorded",
            family=family,
            num_hidden_layers=1,
            hidden_size=heads * head_dim,
            num_attention_heads=heads,
            num_key_value_heads=heads // groups if is_grouped else heads,
            intermediate_size=inner,
            vocab_size=1,
            max_position_embeddings=1,
        )
        yield Point(shape, batch, length)
