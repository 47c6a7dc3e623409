"""The search for the largest step: its promises, against every truth that is monotone."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_bench.sweep.frontier.bracket import Bracket


def search(bracket: Bracket, truth: int, answers: dict[int, bool] | None = None) -> list[int]:
    """Return the indices that were tried; the answer must be the truth."""
    known, tried = dict(answers or {}), []
    while (index := bracket.next_index(known)) is not None:
        assert index not in known
        known[index] = index <= truth
        tried.append(index)
    assert bracket.bounds(known) == (truth, truth + 1)
    return tried


def bisection(num_steps: int) -> int:
    """Both ends, then the halvings."""
    return 2 + (math.ceil(math.log2(num_steps)) if num_steps > 1 else 0)


@st.composite
def dials(draw: st.DrawFn) -> list[int]:
    """Values that grow by at least 1 % from step to step, as a frontier's dial does."""
    value, values = draw(st.integers(1, 10**6)), []
    for growth in draw(st.lists(st.floats(1.01, 1.4), min_size=1, max_size=120)):
        values.append(value)
        value = max(math.ceil(value * growth), value + 1)
    return values


@given(values=dials(), data=st.data())
@settings(max_examples=300)
def test_the_answer_is_right_and_never_takes_more_trials_than_bisection(values: list[int], data: st.DataObject) -> None:
    indices = st.integers(-1, len(values) - 1)
    truth, predicted = data.draw(indices), data.draw(st.none() | indices)
    assert len(search(Bracket(values, predicted), truth)) <= bisection(len(values))


@given(values=dials(), data=st.data())
@settings(max_examples=300)
def test_a_prediction_within_5_percent_takes_at_most_4_trials(values: list[int], data: st.DataObject) -> None:
    truth = data.draw(st.integers(0, len(values) - 1))
    predicted = data.draw(st.sampled_from([i for i, v in enumerate(values) if is_near(v, values[truth])]))
    assert len(search(Bracket(values, predicted), truth)) <= 4


def is_near(value: int, truth: int) -> bool:
    return abs(value / truth - 1) <= 0.05


@given(values=dials(), data=st.data())
@settings(max_examples=200)
def test_another_prediction_in_between_costs_no_more_than_bisection(values: list[int], data: st.DataObject) -> None:
    indices = st.integers(-1, len(values) - 1)
    truth, first, second = data.draw(indices), data.draw(st.none() | indices), data.draw(indices)
    known: dict[int, bool] = {}
    for _ in range(data.draw(st.integers(0, 3))):  # a search that was killed
        index = Bracket(values, first).next_index(known)
        if index is not None:
            known[index] = index <= truth
    assert len(known) + len(search(Bracket(values, second), truth, known)) <= bisection(len(values))


WIDE = [10**6 * 2**step for step in range(30)]


def test_a_right_prediction_takes_two_trials_itself_and_the_step_above() -> None:
    assert search(Bracket(WIDE, 12), 12) == [12, 13]
    assert search(Bracket(WIDE, 29), 29) == [29]  # there is no step above
    assert search(Bracket(WIDE, -1), -1) == [0]


def test_one_step_off_takes_three_trials_upwards_and_two_downwards() -> None:
    assert len(search(Bracket(WIDE, 12), 11)) == 2
    assert len(search(Bracket(WIDE, 12), 13)) <= 4


def test_without_a_prediction_it_begins_in_the_middle() -> None:
    assert Bracket(range(1, 101), None).next_index({}) == 49


def test_nothing_above_a_step_that_failed_is_tried_or_believed() -> None:
    answers = {20: True, 10: False}  # 20 was tried before 10 was found to fail
    tried = search(Bracket(WIDE, 25), 4, answers)
    assert max(tried) < 10
