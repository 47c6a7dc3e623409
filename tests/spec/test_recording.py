"""Recordings: formulas of sizes are read, evaluated and multiplied; what is no formula, or not recorded, is refused.

A setup whose variant was not recorded is not answered with one that is near.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.recording.formula import evaluate, multiply, parse, symbols_of, to_text
from fsdp_bench.spec.recording.variants import VariantKind
from tests.shapes import recorded

VALUES = {"B": 3, "S": 100, "width": 64}
FACTORS = st.sampled_from(["B", "S", "width", "2", "1/2", "up(S,32)"])
TERMS = st.lists(FACTORS, min_size=1, max_size=3).map("*".join)
FORMULAS = st.lists(TERMS, min_size=1, max_size=3).map(lambda terms: f"{' + '.join(terms)}")


def test_a_formula_is_evaluated() -> None:
    assert evaluate("B*S*width*2 + 512", VALUES) == 3 * 100 * 64 * 2 + 512
    assert evaluate("up(S,32)*4", VALUES) == 128 * 4
    assert evaluate("width*1/2", VALUES) == 32
    assert symbols_of("B*up(S,32) + width") == {"B", "S", "width"}


@given(FORMULAS, FORMULAS)
def test_a_product_of_formulas_has_the_product_of_their_values(one: str, other: str) -> None:
    even = {"B": 4, "S": 96, "width": 64}
    factors = [4, 96, 64, 8, 8, 8, 8]  # enough halves cancel
    scaled = f"{one}", f"{other}"
    product = multiply([*scaled, *map(str, factors)])
    expected = evaluate(multiply([one, "8"]), even) * evaluate(multiply([other, "8"]), even)
    assert evaluate(product, even) * 64 == expected * 4 * 96 * 64 * 8**4


@given(FORMULAS)
def test_a_written_formula_is_read_again(text: str) -> None:
    assert to_text(parse(to_text(parse(text)))) == to_text(parse(text))


@pytest.mark.parametrize("text", ["", "B*", "B**S", "__import__('os')", "B + ", "up(S,0)", "1/0", "B-S"])
def test_text_that_is_no_formula_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="formula"):
        evaluate(text, VALUES)


def test_a_missing_value_and_a_broken_number_are_refused() -> None:
    with pytest.raises(SpecError, match="depth has no value"):
        evaluate("depth*2", VALUES)
    with pytest.raises(SpecError, match="not a whole number"):
        evaluate("B*1/2", VALUES)


CODE = recorded("Llama-3.1-8B").code
CAST = VariantKind("bf16", casts_at_blocks=True)


def test_an_older_recording_without_a_variant_is_to_be_made_again() -> None:
    assert CODE.variant(CAST, is_single=False) == CAST.name
    older = replace(
        CODE,
        variants={name: each for name, each in CODE.variants.items() if "cast" not in name},
        same={name: like for name, like in CODE.same.items() if "cast" not in name},
    )
    with pytest.raises(SpecError, match="bf16 cast at blocks of LlamaForCausalLM was not recorded; record it again"):
        older.variant(CAST, is_single=False)


def test_the_reason_of_a_variant_is_that_of_the_one_it_builds_on() -> None:
    broken = replace(CODE, variants={}, same={}, missing={"bf16": "no kernel"})
    with pytest.raises(SpecError, match="does not run in bf16: no kernel"):
        broken.variant(CAST, is_single=True)
