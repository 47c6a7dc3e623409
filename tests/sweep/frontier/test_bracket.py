"""The search for the largest candidate that holds: right for every answer, and short where the prediction is good."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_bench.sweep.frontier.cell import Bracket


def search(bracket: Bracket, truth: int, answers: dict[int, bool] | None = None) -> list[int]:
    """Return the indices that were tried; the answer must be the truth."""
    known, tried = dict(answers or {}), []
    while (index := bracket.next_index(known)) is not None:
        assert index not in known
        known[index] = index <= truth
        tried.append(index)
    assert bracket.bounds(known) == (truth, truth + 1)
    return tried


@given(count=st.integers(1, 120), data=st.data())
@settings(max_examples=300)
def test_the_answer_is_right_whatever_was_predicted_and_soon_found(count: int, data: st.DataObject) -> None:
    indices = st.integers(-1, count - 1)
    truth, predicted = data.draw(indices), data.draw(st.none() | indices)
    tried = search(Bracket(count, predicted), truth)
    assert len(tried) <= 2 * count.bit_length() + 2  # strides that double, then halvings


@pytest.mark.parametrize("off", [-1, 0, 1])
@pytest.mark.parametrize("predicted", [0, 1, 2, 7, 12, 26, 27, 28])
def test_a_prediction_that_is_right_or_one_step_off_takes_at_most_4_trials(predicted: int, off: int) -> None:
    truth = predicted + off
    if truth < 29:
        assert len(search(Bracket(29, predicted), truth)) <= 4


def test_a_right_prediction_takes_two_trials_itself_and_the_step_above() -> None:
    assert search(Bracket(30, 12), 12) == [12, 13]
    assert search(Bracket(30, 29), 29) == [29]  # there is no step above
    assert search(Bracket(30, -1), -1) == [0]


def test_one_step_too_high_takes_two_trials() -> None:
    assert search(Bracket(30, 12), 11) == [12, 11]


def test_without_a_prediction_it_begins_in_the_middle() -> None:
    assert Bracket(100, None).next_index({}) == 49


def test_nothing_above_a_step_that_failed_is_tried_or_believed() -> None:
    answers = {20: True, 10: False}  # 20 was tried before 10 was found to fail
    tried = search(Bracket(30, 25), 4, answers)
    assert max(tried) < 10
