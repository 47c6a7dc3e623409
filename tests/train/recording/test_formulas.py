"""The formulas that recordings at several points find for their sizes."""

import pytest

from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.recording.formula import evaluate
from fsdp_bench.train.recording.formulas import Formulas, Size

POINTS = [{"B": 2, "S": 64}, {"B": 3, "S": 96}, {"B": 2, "S": 160}, {"B": 5, "S": 224}]


@pytest.mark.parametrize(
    ("factors", "formula"),
    [
        (lambda b, s: (b, s, 256, 2), "B*S*512"),
        (lambda b, s: (b * s, 4), "B*S*4"),
        (lambda b, s: (b, 8, -(-s // 32) * 32, s), "B*S*S*8"),  # all lengths are multiples of 32
        (lambda b, s: (b, s + 1), "B*S + B"),
        (lambda b, s: (7, 9), "63"),
        (lambda b, s: (b, s // 2, 4), "B*S*2"),
    ],
)
def test_a_size_follows_a_formula(factors, formula) -> None:
    formulas = Formulas(POINTS)
    sizes = [Size.product(*factors(point["B"], point["S"])) for point in POINTS]
    assert formulas.text(sizes) == formula
    assert [evaluate(formula, point) for point in POINTS] == sizes


def test_a_sum_follows_a_sum() -> None:
    formulas = Formulas(POINTS)
    sizes = [Size.sum_of([(p["B"], p["S"], 8), (100, 4)]) for p in POINTS]
    assert formulas.text(sizes) == "B*S*8 + 400"


def test_equal_formulas_have_one_number() -> None:
    formulas = Formulas(POINTS)
    one = formulas.number([Size.product(p["B"], 4) for p in POINTS])
    assert formulas.number([Size.product(2, p["B"], 2) for p in POINTS]) == one
    assert formulas.texts == ["B*4"]


def test_a_size_that_depends_on_data_is_refused() -> None:
    with pytest.raises(SpecError, match="17, 5, 901, 3"):
        Formulas(POINTS).text([Size.product(n) for n in (17, 5, 901, 3)])
