"""The size ladder: a fixed list of models from 10M to 1T parameters, so that "7B" always means the same shape.

A model is defined by its number of heads (its width) and its number of layers. The smallest model with n heads has n
layers, as GPT-2 small, Llama-2-7B and 13B have. The next models have one layer more each, as long as they have fewer
parameters than the model with n + 1 heads and n + 1 layers. A head is 128 wide for llama, 64 for gpt2.
"""

import bisect
from functools import lru_cache

import msgspec

from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.model import Family, ModelShape
from fsdp_bench.spec.units import format_count

SMALLEST = 10 * 10**6
LARGEST = 10**12

_HEAD_DIM = {Family.LLAMA: 128, Family.GPT2: 64}
_VOCAB_SIZE = {Family.LLAMA: 32000, Family.GPT2: 50257}
_MAX_POSITIONS = {Family.LLAMA: 4096, Family.GPT2: 1024}


def _shape(family: Family, width: int, depth: int, vocab_size: int, positions: int) -> ModelShape:
    hidden_size = width * _HEAD_DIM[family]
    # Llama 2's rule (facebookresearch/llama, model.py, FeedForward): 2/3 of 4h, up to a multiple of 256.
    swiglu_size = -(-(8 * hidden_size // 3) // 256) * 256
    shape = ModelShape(
        name="to be named",
        family=family,
        num_hidden_layers=depth,
        hidden_size=hidden_size,
        num_attention_heads=width,
        num_key_value_heads=width,
        intermediate_size=swiglu_size if family is Family.LLAMA else 4 * hidden_size,
        vocab_size=vocab_size,
        max_position_embeddings=positions,
        tie_word_embeddings=family is Family.GPT2,
    )
    return msgspec.structs.replace(shape, name=f"{family.value}-{format_count(shape.num_parameters)}")


@lru_cache(maxsize=32)
def all_sizes(family: Family, vocab_size: int | None = None, positions: int | None = None) -> tuple[ModelShape, ...]:
    """Return a family's ladder: its shapes, ordered by number of parameters."""
    vocab_size = vocab_size or _VOCAB_SIZE[family]
    positions = positions or _MAX_POSITIONS[family]
    shapes: list[ModelShape] = []
    width = 1
    while True:
        wider = _shape(family, width + 1, width + 1, vocab_size, positions)
        depth = width
        while (shape := _shape(family, width, depth, vocab_size, positions)).num_parameters < wider.num_parameters:
            if shape.num_parameters > LARGEST:
                return tuple(shapes)
            shapes.append(shape)
            depth += 1
        width += 1


def nearest_size(
    family: Family, num_parameters: int, vocab_size: int | None = None, positions: int | None = None
) -> ModelShape:
    """Return the shape with the nearest number of parameters. Raises SpecError below 10M or above 1T."""
    if not SMALLEST <= num_parameters <= LARGEST:
        raise SpecError(f"params: {format_count(num_parameters)} is not on the size ladder; 10M to 1T")
    ladder = all_sizes(family, vocab_size, positions)
    above = bisect.bisect_left(ladder, num_parameters, key=lambda shape: shape.num_parameters)
    neighbours = ladder[max(above - 1, 0) : above + 1]
    return min(neighbours, key=lambda shape: abs(shape.num_parameters - num_parameters))
