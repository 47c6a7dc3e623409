"""Formulas for what Inductor wrote at a few sizes."""

from __future__ import annotations

from fractions import Fraction
from math import prod

import pytest
from msgspec.structs import replace

pytest.importorskip("torch")

from fsdp_bench.spec.recording.compiled import symbols_of_block
from fsdp_bench.spec.recording.formula import parse, to_text
from fsdp_bench.spec.recording.steps import Operator
from tools.compiled.formulas import merge, most_common
from tools.compiled.wrapper_code import Compiled, Function, Made, Run, UnknownCode

_COMMON = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 96, "intermediate_size": 2560}
SIZES = [
    symbols_of_block({"B": batch, "S": length, "hidden_size": 1152, **_COMMON}, 132, 2048)
    for batch, length in ((2, 640), (3, 512), (5, 1344))
]
TOKENS = [sizes["B"] * sizes["S"] for sizes in SIZES]


def block(num_bytes: int, changed: tuple[int, ...] = (), touched: tuple[int, ...] | None = None) -> Compiled:
    """A block whose forward makes one tensor, and whose backward returns what it is given."""
    run = Run("triton_poi_fused_mul", (), touched or (num_bytes,), 2, (Made(1, num_bytes),), changed)
    return Compiled(("i:0",), Function(1, [run], [1]), Function(1, [], [0]))


def formulas(*blocks: Compiled) -> tuple[str, str]:
    """Return what the kernel moves, and what it makes."""
    code = merge(list(zip(SIZES, blocks, strict=False)))
    (run,) = code.forward
    assert isinstance(run, Operator)
    return code.formulas[run.num_bytes], code.formulas[run.makes[0].num_bytes]


def value(formula: str, sizes: dict[str, int]) -> Fraction:
    return sum((ratio * prod(sizes[factor] for factor in factors) for ratio, factors in parse(formula)), Fraction(0))


def test_what_is_changed_in_place_is_moved_twice() -> None:
    moved, made = formulas(*(block(2 * tokens, changed=(0,)) for tokens in TOKENS))
    assert [value(made, sizes) for sizes in SIZES] == [2 * tokens for tokens in TOKENS]
    assert [value(moved, sizes) for sizes in SIZES] == [4 * tokens for tokens in TOKENS]


def test_sizes_that_differ_in_what_is_changed_in_place_are_alike_unless_one_asks() -> None:
    in_place = block(2 * TOKENS[0], changed=(0,))
    apart = block(2 * TOKENS[1], touched=2 * (2 * TOKENS[1],))
    points = list(zip(SIZES, (in_place, apart), strict=False))
    assert len(most_common(points)) == 2
    assert len(most_common(points, with_in_place=True)) == 1


def test_of_two_sizes_the_product_of_another_recording_is_right() -> None:
    """For these two sizes, several products of symbols have the same values."""
    points = [(sizes, block(2 * tokens)) for sizes, tokens in zip(SIZES[:2], TOKENS[:2], strict=True)]
    text = to_text([(Fraction(2), ("B", "S"))])
    alone = merge(points)
    assert alone.formulas[0] != text
    assert merge(points, [replace(alone, formulas=(text,))]).formulas[0] == text


def test_a_number_without_a_formula_is_refused() -> None:
    with pytest.raises(UnknownCode, match="no formula"):
        formulas(block(2 * TOKENS[0]), block(2 * TOKENS[1] + 1))
