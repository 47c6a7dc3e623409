"""The program of the first steps: shortened as if every block were simulated, one by one; the pool of a tied sum."""

from collections.abc import Iterator
from itertools import product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace

from fsdp_bench.plan.estimate import program_of
from fsdp_bench.replay.caching_allocator.allocator import CachingAllocator
from fsdp_bench.replay.caching_allocator.expandable_segments import ExpandableAllocator
from fsdp_bench.replay.caching_allocator.program import Program, program
from fsdp_bench.replay.caching_allocator.replay import Replay
from fsdp_bench.simulate.events import Event, Kind, Stream
from fsdp_bench.simulate.operators.kernels import CUDA
from fsdp_bench.simulate.repeat import MORE_BLOCKS, Log
from fsdp_bench.simulate.step import STEPS, SimulatedSteps
from fsdp_bench.spec.setup import Api, Precision, ShardingStrategy, TrainSetup
from tests.profiles import share_of_examples
from tests.replay.test_allocator import log_of, replay
from tests.shapes import shape
from tools.validate.random_setups import Cell, draw_cells

CELLS = [cell for cell in draw_cells(300, seed=21, device="cuda") if cell.model.head_dim % 4 == 0]


def instructions(found: Program) -> Iterator[tuple[object, ...]]:
    """Yield the events of a program, with tensors numbered in the order of their allocation."""
    tensors: dict[int, int] = {}
    count = 0
    first_further = len(found.steps) - found.log.further_steps
    for step_number, sections in enumerate(found.steps):
        if step_number >= first_further:
            tensors |= {used: tensors[left] for used, left in found.replaced_tensors()}
        which = slice(sections.start, sections.stop)
        for section, own in zip(found.sections[which], found.instructions[which], strict=True):
            for blocks_left_out in found.runs(section.block)[:: -1 if section.goes_down else 1]:
                for _, first, stride, _, _, at in own:
                    event, number = found.events[at], first + blocks_left_out * stride
                    if event.kind in (Kind.ALLOCATE, Kind.FREE, Kind.RECORD_STREAM):
                        count += 1
                        if event.kind is Kind.ALLOCATE:
                            tensors[number] = count
                        number = tensors[number]
                    block = section.block + blocks_left_out if section.block >= 0 else -1
                    yield replace(event, number=number), section.phase, block


@share_of_examples(5)
@given(st.sampled_from(CELLS), st.integers(min_value=7, max_value=16))
def test_repeated_parts_are_what_every_block_does(cell: Cell, layers: int) -> None:
    model = replace(cell.model, num_hidden_layers=layers)
    short = program_of(SimulatedSteps(model, cell.setup, CUDA), 0)
    whole = program(SimulatedSteps(model, cell.setup, CUDA).first_steps(every_block=True))
    assume(short.log.extra_blocks > 0)
    assert whole.log.extra_blocks == 0
    assert list(instructions(short)) == list(instructions(whole))


SHARDED = [pair for pair in product(Api, ShardingStrategy) if pair != (Api.FSDP2, ShardingStrategy.NO_SHARD)]
"""Without DistributedDataParallel, whose buckets end anywhere."""


@pytest.mark.parametrize(("api", "strategy"), SHARDED)
def test_a_usual_setup_is_never_simulated_block_by_block(api: Api, strategy: ShardingStrategy) -> None:
    setup = TrainSetup(
        api=api, strategy=strategy, world_size=8, sequence_length=128, precision=Precision.parse("bf16-mixed")
    )
    log = SimulatedSteps(shape(num_hidden_layers=12), setup, CUDA).first_steps()
    assert log.extra_blocks == 12 - MORE_BLOCKS
    assert program(log) is not None


def test_tied_weights_are_added_up_in_a_tensor_of_their_own() -> None:
    """The head's gradient is a view of a product, to which nothing is added in place (can_accumulate_inplace)."""
    setup = TrainSetup(api=Api.FSDP1, world_size=8, sequence_length=128, precision=Precision.parse("bf16-mixed"))
    added: dict[bool, list[Stream]] = {}
    for is_tied in (True, False):
        steps = SimulatedSteps(shape(num_hidden_layers=4, tie_word_embeddings=is_tied), setup, CUDA)
        made = [event for event in steps.first_steps().events if event.kind is Kind.ALLOCATE]
        added[is_tied] = [event.stream for event in made if event.label == "aten::add"]
    assert [stream for stream in added[True] if stream is not Stream.COMPUTE] == [Stream.ALL_GATHER] * 2
    assert set(added[False]) == {Stream.COMPUTE}


def log_of_blocks(events: list[Event], extra_blocks: int = 4) -> Log:
    return log_of(events, MORE_BLOCKS, extra_blocks)


def test_blocks_that_differ_are_not_repeated() -> None:
    """Six blocks, of which the fourth allocates more than the third."""
    events = []
    for block in range(MORE_BLOCKS):
        events += [Event(Kind.MARK, block, label="forward"), Event(Kind.ALLOCATE, block, 512 * (1 + block // 3))]
    assert not log_of_blocks(events).is_sound
    assert program(log_of_blocks(events)) is None
    same = [replace(event, num_bytes=512) if event.kind is Kind.ALLOCATE else event for event in events]
    assert log_of_blocks(same).is_sound
    found = program(log_of_blocks(same))
    assert found is not None
    assert len(list(instructions(found))) == MORE_BLOCKS + 4


def test_a_tensor_that_lives_across_the_repeated_blocks_prevents_repetition() -> None:
    """A tensor of the first block that the last one frees."""
    events = [Event(Kind.MARK, 0, label="forward"), Event(Kind.ALLOCATE, 100, 512)]
    for block in range(MORE_BLOCKS):
        events += [Event(Kind.MARK, block, label="forward"), Event(Kind.ALLOCATE, block, 512)]
    events.append(Event(Kind.FREE, 100, 512))
    assert program(log_of_blocks(events)) is None


def test_tensors_that_pass_between_distant_blocks_prevent_repetition() -> None:
    events = []
    for block in range(MORE_BLOCKS):
        events += [Event(Kind.MARK, block, label="forward"), Event(Kind.ALLOCATE, block, 512)]
    for block in range(MORE_BLOCKS):
        events += [Event(Kind.MARK, block, label="backward"), Event(Kind.ALLOCATE, 10 + block, 512)]
        events.append(Event(Kind.FREE, block, 512))

    def repeats(pairs: list[tuple[int, int]]) -> bool:
        return program(Log(events, [range(len(events))], MORE_BLOCKS, 4, 0, 1, pairs)) is not None

    assert repeats([(block, 10 + block) for block in range(MORE_BLOCKS)])
    assert not repeats([(block, 10 + (block + 1) % MORE_BLOCKS) for block in range(MORE_BLOCKS)])
    assert not repeats([(2, 12)])  # only one of the two that stand for all


@share_of_examples(5)
@given(st.sampled_from(CELLS), st.floats(0.7, 1.1))
def test_a_replay_that_stops_in_between_ends_as_one_that_does_not(cell: Cell, share: float) -> None:
    log = SimulatedSteps(cell.model, cell.setup, CUDA).first_steps()
    found = program(log)
    assume(found is not None)
    assert found is not None
    needed = replay(log).peak_reserved_bytes
    assert found.least_bytes <= needed
    gpu_bytes = int(share * needed)
    stopping = Replay(found, gpu_bytes)
    is_full = stopping.is_full()
    peaks = [stopping.until(number).peak_reserved_bytes for number in range(1, STEPS + 1)]
    assert peaks == sorted(peaks)
    reading = stopping.until()
    assert is_full == (reading.num_alloc_retries > 0)
    assert reading == Replay(found, gpu_bytes).until()


@share_of_examples(5)
@given(st.sampled_from(CELLS), st.floats(0.8, 1.0), st.booleans())
def test_a_step_that_leaves_what_it_found_is_not_replayed_again(cell: Cell, share: float, expandable: bool) -> None:
    log = SimulatedSteps(cell.model, cell.setup, CUDA).first_steps()
    found = program(log)
    assume(found is not None)
    assert found is not None
    gpu_bytes = int(share * replay(log, None, expandable).peak_reserved_bytes)
    short = replay(log, gpu_bytes, expandable)
    with pytest.MonkeyPatch.context() as patched:
        for one in (CachingAllocator, ExpandableAllocator):
            never_the_same = type(one.__name__, (one,), {"state": lambda _: object()})
            patched.setattr(f"fsdp_bench.replay.caching_allocator.replay.{one.__name__}", never_the_same)
        assert replay(log, gpu_bytes, expandable) == short
