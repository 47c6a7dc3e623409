"""The small models that formulas of sizes go through: no two products of sizes may be mistaken for each other."""

from collections.abc import Iterator
from itertools import combinations_with_replacement
from math import gcd

from fsdp_bench.spec.lora import RANK
from fsdp_bench.spec.recording.config import SIZES
from fsdp_bench.train.recording.main import BATCHES
from tools.all_sizes import _MODELS

MADE_OF = {
    "num_attention_heads": ("key_value_heads", "heads_of_each"),
    "hidden_size": ("key_value_heads", "heads_of_each", "hidden_of_each_head"),
    "hidden_size, all heads of their own": ("key_value_heads", "hidden_of_each_head"),
    "image_size": ("patches_a_side", "patch_size"),
    "num_patches": ("patches_a_side", "patches_a_side"),
}
"""Sizes that are products of drawn values."""
SAME = {"d_ff", "n_inner"}
"""Names of the intermediate size in other families."""


def products() -> Iterator[tuple[tuple[str, ...], tuple[int, ...]]]:
    """Yield all products of up to three symbols: what they are made of, and their values at the points."""
    drawn = {name: values for name, values in _MODELS.items() if name not in SAME}
    values = {**drawn, "B": [batch for batch, _ in BATCHES], "S": [length for _, length in BATCHES]}
    symbols = {name: (name,) for name in values} | MADE_OF
    for length in range(4):
        for chosen in combinations_with_replacement(symbols, length):
            parts = tuple(sorted(part for symbol in chosen for part in symbols[symbol]))
            at = [1] * len(BATCHES)
            for part in parts:
                at = [a * b for a, b in zip(at, values[part], strict=True)]
            yield parts, tuple(at)


def test_no_two_products_are_in_the_same_proportion_everywhere() -> None:
    seen: dict[tuple[int, ...], tuple[str, ...]] = {}
    for parts, at in products():
        direction = tuple(value // gcd(*at) for value in at)
        assert seen.setdefault(direction, parts) == parts
    assert len(seen) > 3000


def test_every_drawn_size_is_a_symbol() -> None:
    drawn = {
        "key_value_heads",
        "heads_of_each",
        "hidden_of_each_head",
        "head",
        "positions",
        "patches_a_side",
        "experts",
    }
    assert _MODELS.keys() - drawn <= {*SIZES, RANK}
