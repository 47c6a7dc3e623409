"""The shortened program of two steps against every block simulated: the same instructions, one by one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fsdp_bench.replay.allocator import replay
from fsdp_bench.simulate import repeat as program
from fsdp_bench.simulate import step
from fsdp_bench.simulate.events import Event, Kind
from fsdp_bench.simulate.operators.kernels import CUDA
from fsdp_bench.simulate.repeat import Program, alike, plain
from fsdp_bench.spec.setup import Api, Precision, ShardingStrategy, TrainSetup
from fsdp_bench.validate.random_setups import Cell, draw_cells
from tests.conftest import simulating
from tests.simulate.test_step import shape

CELLS = [cell for cell in draw_cells(300, seed=21, device="cuda") if cell.model.head_dim % 4 == 0]


def told(program: Program) -> Iterator[tuple[object, ...]]:
    """What happens, with tensors and events numbered in the order in which they come to life."""
    tensors: dict[int, int] = {}
    recorded: deque[int] = deque()
    count, code = 0, program.code()
    first_further = len(program.steps) - program.further_steps
    for number, index in ((number, index) for number, parts in enumerate(program.steps) for index in parts):
        part = program.parts[index]
        if number >= first_further and index == program.steps[number].start:
            tensors |= {found: tensors[left] for found, left in program.handed_over()}
        for turn in program.turns(part):
            for index in range(part.begin, part.end):
                kind, num_bytes, stream = code.kind[index], code.num_bytes[index], code.stream[index]
                tensor, event = code.tensor[index] + turn * code.stride[index], program.instructions.events[index]
                count += 1
                if kind == Kind.RECORD_EVENT:
                    recorded.append(count)
                    yield kind, stream
                elif kind == Kind.HOST_WAIT:
                    yield kind, recorded.popleft()
                elif kind == Kind.SYNCHRONIZE:
                    yield kind, stream
                else:
                    if kind == Kind.ALLOCATE:
                        tensors[tensor] = count
                    yield (
                        kind,
                        tensors[tensor],
                        num_bytes,
                        stream,
                        event.category,
                        event.label,
                        part.phase,
                        part.block + turn if part.block >= 0 else -1,
                    )


@simulating
@given(st.sampled_from(CELLS), st.integers(min_value=7, max_value=16))
def test_repeated_parts_are_what_every_block_does(cell: Cell, layers: int) -> None:
    model = replace(cell.model, num_hidden_layers=layers)
    short = step.first_steps(model, cell.setup, CUDA)
    whole = plain(step.events_of_first_steps(model, cell.setup, CUDA))
    assert list(told(short)) == list(told(whole))


@pytest.mark.parametrize("api", list(Api))
@pytest.mark.parametrize("strategy", list(ShardingStrategy))
def test_a_usual_setup_is_never_simulated_block_by_block(api: Api, strategy: ShardingStrategy) -> None:
    setup = TrainSetup(
        api=api, strategy=strategy, world_size=8, sequence_length=128, precision=Precision.parse("bf16-mixed")
    )
    found = step.first_steps(shape(num_hidden_layers=12), setup, CUDA)
    assert max(len(found.turns(part)) for part in found.parts) == 12 - program.SIMULATED_BLOCKS + 1


@simulating
@given(st.sampled_from(CELLS))
def test_a_program_and_its_events_are_one_to_the_allocator(cell: Cell) -> None:
    model = replace(cell.model, num_hidden_layers=9)
    readings = [
        replay(source, streams_keep_pace=True)
        for source in (
            step.first_steps(model, cell.setup, CUDA),
            step.events_of_first_steps(model, cell.setup, CUDA),
        )
    ]
    assert readings[0] == readings[1]


def test_events_that_are_waited_for_out_of_turn_are_refused() -> None:
    events = [Event(Kind.RECORD_EVENT, 0), Event(Kind.RECORD_EVENT, 1), Event(Kind.HOST_WAIT, 1)]
    with pytest.raises(ValueError, match="event 1 is waited for out of turn"):
        plain(events)


def test_blocks_that_differ_are_not_repeated() -> None:
    """Six blocks, of which the fourth allocates more than the third."""
    events = []
    for block in range(program.SIMULATED_BLOCKS):
        events += [Event(Kind.MARK, block, label="forward"), Event(Kind.ALLOCATE, block, 512 * (1 + block // 3))]
    assert alike(events) is None
    same = [replaced._replace(num_bytes=512) if replaced.kind == Kind.ALLOCATE else replaced for replaced in events]
    instructions = alike(same)
    assert instructions is not None
    found = Program(instructions, 4)
    count = sum(len(found.turns(part)) * (part.end - part.begin) for part in found.parts)
    assert count == program.SIMULATED_BLOCKS + 4


def test_what_reaches_over_the_repeated_blocks_is_not_repeated() -> None:
    """A tensor of the first block that the last one frees."""
    events = [Event(Kind.MARK, 0, label="forward"), Event(Kind.ALLOCATE, 100, 512)]
    for block in range(program.SIMULATED_BLOCKS):
        events += [Event(Kind.MARK, block, label="forward"), Event(Kind.ALLOCATE, block, 512)]
    events.append(Event(Kind.FREE, 100, 512))
    assert alike(events) is None
