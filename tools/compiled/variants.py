"""Which blocks are recorded, and at which sizes."""

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import nn

from fsdp_bench.spec.checkpointing_policy import EVERY_SECOND_PRODUCT
from fsdp_bench.spec.model import Family, ModelShape
from fsdp_bench.spec.recording.compiled import (
    BOTH_WAYS,
    FEW_TOKENS,
    MORE_TOKENS,
    REGIMES,
    CompiledKind,
    Order,
    float8_regime_of,
    sizes_of_config,
    sizes_of_shape,
)
from fsdp_bench.spec.recording.config import HEADS, HIDDEN, POSITIONS, SHARED, WINDOWS
from fsdp_bench.spec.setup import Checkpointing, Float8
from fsdp_bench.train.models.huggingface import batch_of, build, unpacked_sequences, with_layers
from fsdp_bench.train.models.transformer import BLOCKS, rotary_tables
from fsdp_bench.train.models.user_module import block_class, default_dtype
from tools.compiled.compile_block import Subject

_BF16 = 2
DTYPES = {_BF16: torch.bfloat16, 4: torch.float32}

_CHECKPOINTING = (
    (Checkpointing.NONE, None),
    (Checkpointing.FULL, None),
    (Checkpointing.SELECTIVE, None),
    (Checkpointing.SELECTIVE, EVERY_SECOND_PRODUCT),
)

_POINTS = {
    # batch, length, heads, heads per key-value head, head size, intermediate size, hidden size if it is not theirs
    BOTH_WAYS: (
        (3, 4096, 16, 4, 128, 5632, 2304),
        (4, 3200, 20, 5, 112, 5760, 2560),
        (2, 7168, 18, 3, 128, 6016, 2880),
        (6, 2048, 14, 2, 128, 4928, 2240),
        (5, 2304, 22, 2, 96, 6144, 2816),
    ),
    MORE_TOKENS: (
        (3, 1024, 16, 4, 128, 5632, 2304),
        (2, 1664, 20, 5, 112, 5760, 2560),
        (4, 896, 18, 3, 128, 6016, 2880),
        (6, 512, 14, 2, 128, 4928, 2240),
        (5, 768, 22, 2, 96, 6144, 2816),
    ),
    FEW_TOKENS: (
        (3, 1024, 32, 4, 128, 14336, 4352),
        (2, 1664, 40, 5, 112, 13824, 4800),
        (4, 896, 36, 3, 128, 15104, 5184),
        (6, 512, 28, 2, 128, 9856, 4032),
        (5, 704, 44, 4, 96, 12288, 4928),
        (2, 2048, 32, 4, 128, 12288, 4096),
        (2, 1920, 40, 5, 128, 17408, 5120),
        (3, 1344, 64, 8, 128, 25600, 5120),
        (4, 640, 32, 4, 128, 9728, 2560),
    ),
}
"""No two tensors are equally large by chance. The last ones are compiled where the first three are unlike."""
_FLOAT8_POINTS = {
    # batch, length, heads, heads per key-value head, head size, intermediate size
    Float8.TENSORWISE: (
        (2, 4096, 16, 2, 128, 5632),
        (4, 4096, 24, 3, 128, 8192),
        (2, 8192, 32, 4, 128, 14336),
        (3, 2944, 25, 5, 128, 6656),
        (1, 8192, 32, 4, 128, 14336),
        (1, 16384, 40, 5, 128, 13824),
        (1, 8192, 16, 2, 128, 5632),
        (1, 14848, 25, 5, 128, 6656),
        (2, 2048, 20, 5, 128, 7168),
        (2, 4096, 40, 5, 128, 13824),
        (3, 2048, 32, 4, 128, 14336),
        (11, 448, 27, 3, 128, 7424),
        (1, 4096, 20, 5, 128, 7168),
        (1, 8192, 40, 5, 128, 13824),
        (1, 6144, 32, 4, 128, 14336),
        (1, 5888, 25, 5, 128, 6656),
    ),
    Float8.ROWWISE: (
        (3, 2944, 25, 5, 128, 6656),
        (11, 2432, 18, 3, 128, 8704),
        (1, 14848, 25, 5, 128, 6656),
        (1, 9216, 25, 5, 128, 13312),
        (11, 448, 27, 3, 128, 7424),
        (7, 448, 42, 7, 128, 13312),
        (1, 5888, 25, 5, 128, 6656),
        (1, 8704, 42, 7, 128, 14848),
    ),
}
"""Sizes at which a recipe is compiled, sorted by their regimes.

With scales of tensors two that are alike, with maxima of whole rows, as powers of two have them. The last of each
regime is a size at which no two of FLOAT8_PRODUCTS are alike, so that it is enough where no other is like it."""
_VOCABULARY = 512


class Point(NamedTuple):
    """One size."""

    sizes: dict[str, int]
    """The symbols' values."""
    subject: Callable[[torch.dtype], Subject]
    """Makes the block."""


class Variant(NamedTuple):
    """One recording: a name, its code, and the sizes at which it is compiled."""

    kind: CompiledKind
    points: list[Point]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its parameters and inputs."""
        return DTYPES[self.kind.itemsize]


def benchmark_variants() -> Iterator[Variant]:
    """Yield all that is recorded of the benchmark models."""
    shapes = ((Family.LLAMA, True), (Family.LLAMA, False), (Family.GPT2, False))
    for itemsize, (family, is_grouped), regime in product(DTYPES, shapes, REGIMES):
        points = [_benchmark_point(family, is_grouped, given) for given in _POINTS[regime]]
        block = f"{family.value} grouped" if is_grouped else family.value
        yield from _variants(block, itemsize, regime, points)


def float8_variants() -> Iterator[Variant]:
    """Yield all that is recorded of the benchmark models in float8: of each regime every order of backward."""
    num_multiprocessors = torch.cuda.get_device_properties().multi_processor_count
    for is_grouped, recipe in product((True, False), (Float8.TENSORWISE, Float8.ROWWISE)):
        block = f"{Family.LLAMA.value} grouped" if is_grouped else Family.LLAMA.value
        regimes: dict[str, list[Point]] = {}
        for given in _FLOAT8_POINTS[recipe]:
            point = _benchmark_point(Family.LLAMA, is_grouped, (*given, 0))
            regimes.setdefault(float8_regime_of(point.sizes, recipe, num_multiprocessors), []).append(point)
        for (regime, points), order in product(regimes.items(), Order):
            kind = CompiledKind(block, _BF16, Checkpointing.NONE, None, regime, recipe, order)
            yield from (
                Variant(kind._replace(checkpointing=one, policy=policy), points) for one, policy in _CHECKPOINTING
            )
            yield Variant(kind._replace(is_fsdp1=True), points)


def huggingface_variants(block: str, config: Mapping[str, Any]) -> Iterator[Variant]:
    """Yield all that is recorded of a block in transformers' code.

    ``block`` is its name, ``huggingface_block``; ``config`` a config.json with the block's settings.
    """
    for itemsize, regime in product(DTYPES, REGIMES):
        points = [_huggingface_point(config, SHARED in block.split(), given) for given in _POINTS[regime]]
        yield from _variants(block, itemsize, regime, points)


def _variants(block: str, itemsize: int, regime: str, points: list[Point]) -> Iterator[Variant]:
    for checkpointing, policy in _CHECKPOINTING:
        yield Variant(CompiledKind(block, itemsize, checkpointing, policy, regime), points)


def _benchmark_point(family: Family, is_grouped: bool, given: tuple[int, ...]) -> Point:
    batch, length, heads, groups, head_dim, inner, _ = given
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
    return Point(
        {"B": batch, "S": length, **sizes_of_shape(shape)}, lambda dtype: benchmark_subject(shape, dtype, batch, length)
    )


_FAR = 1 << 20
"""Tokens that no sequence here has."""


def _huggingface_point(config: Mapping[str, Any], shares_hidden_size: bool, given: tuple[int, ...]) -> Point:
    """Return a model of these sizes with the settings of a config.json, within its sliding window."""
    batch, length, heads, groups, head_dim, inner, hidden = given
    given_heads = next(config[name] for name in HEADS if name in config)
    is_grouped = config.get("num_key_value_heads", given_heads) < given_heads
    sizes = {
        **dict.fromkeys(HIDDEN, heads * head_dim if shares_hidden_size else hidden),
        **dict.fromkeys(HEADS, heads),
        **dict.fromkeys((*POSITIONS, *WINDOWS), _FAR),
        "num_key_value_heads": heads // groups if is_grouped else heads,
        "head_dim": head_dim,
        "intermediate_size": inner,
        "n_inner": inner,
        "vocab_size": _VOCABULARY,
    }
    own = {name for name in sizes if config.get(name) is not None} | (set() if shares_hidden_size else {"head_dim"})
    full = {**config, **{name: size for name, size in sizes.items() if name in own}, "pad_token_id": 0}
    symbols = {**sizes, "B": batch, "S": length}
    return Point(
        {"B": batch, "S": length, **sizes_of_config(symbols)},
        lambda dtype: huggingface_subject(full, dtype, batch, length),
    )


# -- the blocks -------------------------------------------------------------------------------------------------------


def benchmark_subject(shape: ModelShape, dtype: torch.dtype, batch: int, length: int) -> Subject:
    """Return a block of a benchmark model, alone."""
    model = nn.Sequential(BLOCKS[shape.family](shape)).to(dtype).cuda()
    x = torch.zeros(batch, length, shape.hidden_size, device="cuda", dtype=dtype, requires_grad=True)
    tables = () if shape.family is Family.GPT2 else rotary_tables(length, shape.head_dim, x.device, dtype)

    def step() -> None:
        out = next(iter(model))(x, *tables)
        out.backward(torch.zeros_like(out))

    return Subject(model, model[0], step)


def huggingface_subject(config: Mapping[str, Any], dtype: torch.dtype, batch: int, length: int) -> Subject:
    """Return the block of a model with one block, between its ends, which are not compiled."""
    with default_dtype(dtype), torch.device("cuda"):
        model, _ = build(with_layers(config, 1))
    kind = block_class(model)
    given = batch_of(model, batch, length, device="cuda")

    def step() -> None:
        with unpacked_sequences():
            model(**given).loss.backward()

    return Subject(model, next(module for module in model.modules() if isinstance(module, kind)), step)
