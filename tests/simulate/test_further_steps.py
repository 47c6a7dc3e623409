"""What a step hands on to the next one; that a step which is run again is the one simulated: test_program.py."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_bench.replay.allocator import Replay, replay
from fsdp_bench.replay.compiled import compiled_run
from fsdp_bench.simulate import step
from fsdp_bench.simulate.events import Event, Kind
from fsdp_bench.simulate.further_steps import handed_on
from fsdp_bench.simulate.operators.kernels import CUDA
from fsdp_bench.simulate.repeat import SIMULATED_BLOCKS, alike
from fsdp_bench.validate.random_setups import Cell
from tests.conftest import simulating
from tests.simulate.test_program import CELLS

BEFORE = [Event(Kind.ALLOCATE, 0), Event(Kind.RECORD_EVENT, 1), Event(Kind.RECORD_EVENT, 2)]


def test_a_step_hands_on_one_tensor_for_each_that_it_uses_up() -> None:
    """It frees the last one's tensor, and waits for the event before the last."""
    last = [Event(Kind.HOST_WAIT, 1), Event(Kind.ALLOCATE, 3), Event(Kind.FREE, 0), Event(Kind.RECORD_EVENT, 4)]
    assert handed_on([*BEFORE, *last], len(BEFORE)) == [(0, 3)]


@pytest.mark.parametrize(
    "last",
    [
        [Event(Kind.ALLOCATE, 3)],
        [Event(Kind.FREE, 0)],
        [Event(Kind.ALLOCATE, 3, label="another"), Event(Kind.FREE, 0)],
        [Event(Kind.HOST_WAIT, 1)],
    ],
    ids=["more", "less", "something else", "fewer events"],
)
def test_a_step_that_leaves_something_else_than_it_found_is_not_repeated(last: list[Event]) -> None:
    assert handed_on([*BEFORE, *last], len(BEFORE)) is None


def test_what_one_block_hands_to_another_is_not_repeated() -> None:
    events = []
    for block in range(SIMULATED_BLOCKS):
        events += [Event(Kind.MARK, block, label="forward"), Event(Kind.ALLOCATE, block, 512)]
    for block in range(SIMULATED_BLOCKS):
        events += [Event(Kind.MARK, block, label="backward"), Event(Kind.ALLOCATE, 10 + block, 512)]
        events.append(Event(Kind.FREE, block, 512))
    assert alike(events, [(block, 10 + block) for block in range(SIMULATED_BLOCKS)]) is not None
    assert alike(events, [(block, 10 + (block + 1) % SIMULATED_BLOCKS) for block in range(SIMULATED_BLOCKS)]) is None
    assert alike(events, [(2, 12)]) is None  # only one of the two that stand for all


@simulating
@given(st.sampled_from(CELLS), st.sampled_from([16, 2048]), st.floats(0.7, 1.1))
def test_a_replay_that_stops_between_steps_ends_as_one_that_does_not(cell: Cell, capacity: int, share: float) -> None:
    program = step.first_steps(cell.model, cell.setup, CUDA)
    card_bytes = int(share * replay(program).peak_reserved_bytes)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("fsdp_bench.replay.allocator.CAPACITY", capacity)
        stopping = Replay(program, card_bytes, run=compiled_run())
        peaks = [stopping.until(number).peak_reserved_bytes for number in range(1, step.STEPS + 1)]
        assert peaks == sorted(peaks)
        assert stopping.until() == Replay(program, card_bytes).until()
