"""State that a step leaves to the next one. test_program.py compares repeated steps with simulated ones."""

from __future__ import annotations

import pytest

from fsdp_bench.simulate.events import Event, Kind, Queue
from fsdp_bench.simulate.repeat import replaced_tensors

BEFORE = [Event(Kind.ALLOCATE, 0), Event(Kind.RECORD_EVENT, Queue.FREE), Event(Kind.RECORD_EVENT, Queue.FREE)]


def test_a_step_hands_on_one_tensor_for_each_that_it_uses_up() -> None:
    """It frees the last one's tensor, and waits for the event before the last."""
    waits, records = Event(Kind.HOST_WAIT, Queue.FREE), Event(Kind.RECORD_EVENT, Queue.FREE)
    last = [waits, Event(Kind.ALLOCATE, 3), Event(Kind.FREE, 0), records]
    assert replaced_tensors([*BEFORE, *last], len(BEFORE)) == [(0, 3)]


@pytest.mark.parametrize(
    "last",
    [
        [Event(Kind.ALLOCATE, 3)],
        [Event(Kind.FREE, 0)],
        [Event(Kind.ALLOCATE, 3, label="another"), Event(Kind.FREE, 0)],
        [Event(Kind.HOST_WAIT, Queue.FREE)],
    ],
    ids=["more", "less", "something else", "fewer events"],
)
def test_a_step_that_leaves_something_else_than_it_found_is_not_repeated(last: list[Event]) -> None:
    assert replaced_tensors([*BEFORE, *last], len(BEFORE)) is None
