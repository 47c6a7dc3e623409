"""Steps that are written out against the same steps simulated."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fsdp_bench.predict.events import Event, Kind
from fsdp_bench.predict.further_steps import repeat
from fsdp_bench.predict.kernels import CUDA
from fsdp_bench.predict.program import plain
from fsdp_bench.predict.step import STEPS, Simulation, events_of_first_steps
from fsdp_bench.sweep.drawn_cells import Cell
from tests.predict.test_program import CELLS, told
from tests.predict.test_step import many


@many
@given(st.sampled_from(CELLS))
def test_a_step_that_is_written_out_is_the_one_that_is_simulated(cell: Cell) -> None:
    simulation = Simulation(cell.model, cell.setup, CUDA, cell.model.num_hidden_layers)
    simulation.load()
    for _ in range(STEPS):
        simulation.step()
    simulated, simulation.tape.events = simulation.tape.events, []
    written = events_of_first_steps(cell.model, cell.setup, CUDA)
    assert list(told(plain(written))) == list(told(plain(simulated)))


def test_what_a_step_leaves_is_what_the_next_one_frees() -> None:
    """Each step frees the last one's tensor, and waits for the event before the last."""
    before = [Event(Kind.ALLOCATE, 0), Event(Kind.RECORD_EVENT, 1), Event(Kind.RECORD_EVENT, 2)]
    step = [Event(Kind.HOST_WAIT, 1), Event(Kind.ALLOCATE, 3), Event(Kind.FREE, 0), Event(Kind.RECORD_EVENT, 4)]
    further = repeat([*before, *step], len(before), times=2)
    assert further is not None
    assert [(event.kind.name, event.number) for event in further] == [
        *[("HOST_WAIT", 2), ("ALLOCATE", 5), ("FREE", 3), ("RECORD_EVENT", 6)],
        *[("HOST_WAIT", 4), ("ALLOCATE", 7), ("FREE", 5), ("RECORD_EVENT", 8)],
    ]


def test_a_step_that_leaves_more_than_it_found_is_not_repeated() -> None:
    assert repeat([Event(Kind.ALLOCATE, 0), Event(Kind.ALLOCATE, 1)], 1, times=1) is None
