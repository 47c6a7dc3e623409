"""One step as events: what must hold for every model and setup."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fsdp_bench.replay.live_memory import breakdown, live_memory
from fsdp_bench.simulate.events import Category, Event, Kind, Queue
from fsdp_bench.simulate.operators.kernels import CPU, CUDA, CUDA_OBSERVED, Kernels
from fsdp_bench.simulate.repeat import Log, replaced_tensors
from fsdp_bench.simulate.simulation import BETWEEN_STEPS
from fsdp_bench.simulate.step import SimulatedSteps
from fsdp_bench.spec.model import Family, ModelShape
from fsdp_bench.spec.setup import Api, Offload, Precision, ShardingStrategy, TrainSetup
from tests.profiles import share_of_examples
from tests.shapes import memory_of, shape
from tools.validate.random_setups import Cell, draw_cells

ON_CPU = draw_cells(400, seed=11, device="cpu")
ON_CUDA = [cell for cell in draw_cells(200, seed=12, device="cuda") if cell.model.head_dim % 4 == 0]
"""Heads that every precision has a fused kernel for."""

cases = st.sampled_from(
    [(cell, CPU) for cell in ON_CPU] + [(cell, kernels) for cell in ON_CUDA for kernels in (CUDA, CUDA_OBSERVED)]
)


def phases(log: Log) -> dict[str, int]:
    return {phase: peak.num_bytes for phase, peak in live_memory(log).phases.items()}


def live_bytes(events: list[Event]) -> int:
    signs = {Kind.ALLOCATE: 1, Kind.FREE: -1}
    return sum(signs.get(event.kind, 0) * event.num_bytes for event in events)


@pytest.mark.parametrize("family", list(Family))
def test_backward_of_a_layer_with_a_bias_computes_the_gradient_of_its_input_first(family: Family) -> None:
    """AddmmBackward0 computes mat1's gradient, mat2's, and the bias's; MmBackward0 that of the weight first."""
    model = replace(shape(), family=family, name=family.value)
    setup = TrainSetup(world_size=8, micro_batch_size=1, sequence_length=64)
    works = [
        event.work.name for event in SimulatedSteps(model, setup, CUDA).step().last_step() if event.work is not None
    ]
    backward = [name[-2:] for name in works if name in ("aten::mm nn", "aten::mm tn")]
    assert backward[:2] == ["tn", "nn"]  # of the head, which has no bias
    assert backward[2:4] == (["nn", "tn"] if family is Family.GPT2 else ["tn", "nn"])


@share_of_examples(5)
@given(cases)
def test_one_block_stands_for_all_that_are_left_out(case: tuple[Cell, Kernels]) -> None:
    """The shortened simulation and the whole one have the same peaks, breakdown and end."""
    cell, kernels = case
    steps = SimulatedSteps(cell.model, cell.setup, kernels)
    short, whole = steps.step(), steps.step(every_block=True)
    assert whole.extra_blocks == 0
    a, b = live_memory(short), live_memory(whole)
    assert phases(short) == phases(whole)
    assert a.end_bytes == b.end_bytes
    peak = a.phases[a.peak_phase]
    assert breakdown(short, peak) == breakdown(whole, b.phases[b.peak_phase])
    assert [event.work for event in short.last_step()] == [event.work for event in whole.last_step()]


@share_of_examples(5)
@given(cases)
def test_the_steady_step_is_what_the_first_steps_end_in(case: tuple[Cell, Kernels]) -> None:
    """warm_up() makes the state that a real first step leaves: the same peaks from there on."""
    cell, kernels = case

    def done(log: Log) -> list[tuple[object, ...]]:
        return [
            (event.kind, event.num_bytes, event.category, event.work)
            for event in log.last_step()
            if event.kind is not Kind.MARK
        ]

    steps = SimulatedSteps(cell.model, cell.setup, kernels)
    # With fewer blocks DistributedDataParallel's buckets end elsewhere.
    assert done(steps.step()) == done(steps.first_steps(every_block=True))


@share_of_examples(5)
@given(cases)
def test_memory_alone_is_that_of_the_whole_step(case: tuple[Cell, Kernels]) -> None:
    """DistributedDataParallel, whose buckets end in the middle of blocks."""
    cell, kernels = case
    setup = replace(
        cell.setup,
        api=Api.FSDP2,
        strategy=ShardingStrategy.NO_SHARD,
        shard_size=None,
        offload=Offload.NONE,
        world_size=max(cell.setup.world_size, 2),
    )
    steps = SimulatedSteps(cell.model, setup, kernels)
    (alone,), whole = steps.for_memory, steps.step()
    assert whole.extra_blocks == 0
    assert phases(alone) == phases(whole)


@share_of_examples(5)
@given(cases)
def test_nothing_is_freed_that_is_not_alive_and_a_step_ends_where_it_began(case: tuple[Cell, Kernels]) -> None:
    cell, kernels = case
    events = SimulatedSteps(cell.model, cell.setup, kernels).step(every_block=True).events
    alive: dict[int, tuple[int, Category]] = {}
    begins = [i for i, event in enumerate(events) if event.kind is Kind.MARK and event.label == BETWEEN_STEPS]
    for event in events:
        if event.kind is Kind.ALLOCATE:
            assert event.number not in alive
            alive[event.number] = (event.num_bytes, event.category)
        elif event.kind is Kind.FREE:
            assert alive.pop(event.number) == (event.num_bytes, event.category)
        elif event.kind is Kind.RECORD_STREAM:
            assert event.number in alive
    # After loading, a step starts with what earlier ones left, and leaves as much.
    forwards = [i for i, event in enumerate(events) if event.kind is Kind.MARK and event.label == "forward"]
    first_step = next(i for i in forwards if i > begins[-2])  # one before only begins: what the first step does once
    tokens = 8 * cell.setup.micro_batch_size * (cell.setup.sequence_length + 1)
    tokens *= cell.setup.gradient_accumulation_steps
    assert begins, "the step is never left"
    before, after = live_bytes(events[:first_step]), live_bytes(events)
    is_moved = cell.setup.offload is Offload.PARAMS and cell.setup.effective_strategy is ShardingStrategy.NO_SHARD
    if is_moved and not cell.setup.use_orig_params:
        before = min(before, after + tokens)  # what was loaded is on the device until the forward that is simulated
    assert 0 <= before - after <= tokens * 3 + 4096


@share_of_examples(5)
@given(cases)
def test_the_breakdown_adds_up_to_the_byte(case: tuple[Cell, Kernels]) -> None:
    cell, kernels = case
    memory = memory_of(cell.model, cell.setup, kernels)
    assert sum(memory.breakdown_bytes.values()) == memory.peak_allocated_bytes
    assert min(memory.breakdown_bytes.values()) >= 0
    assert set(memory.breakdown_bytes) == {category.value for category in Category}
    assert max(memory.phases.values()) == memory.peak_allocated_bytes == memory.phases[memory.peak_phase]
    if memory.peak_block is not None:
        assert 0 <= memory.peak_block < cell.model.num_hidden_layers


GROW: dict[str, Callable[[ModelShape, TrainSetup], tuple[ModelShape, TrainSetup]]] = {
    "batch": lambda model, setup: (model, replace(setup, micro_batch_size=setup.micro_batch_size + 1)),
    "sequence": lambda model, setup: (
        replace(model, max_position_embeddings=max(model.max_position_embeddings, 2 * setup.sequence_length)),
        replace(setup, sequence_length=2 * setup.sequence_length),
    ),
    "layers": lambda model, setup: (replace(model, num_hidden_layers=model.num_hidden_layers + 1), setup),
}


@pytest.mark.parametrize("grow", GROW.values(), ids=GROW)
@share_of_examples(5)
@given(cases)
def test_memory_never_falls_when_the_work_grows(grow: Any, case: tuple[Cell, Kernels]) -> None:
    cell, kernels = case
    sizes = (cell.model, cell.setup), grow(cell.model, cell.setup)
    before, after = (memory_of(*each, kernels).peak_allocated_bytes for each in sizes)
    assert after >= before


@pytest.mark.parametrize(("offload", "count"), [(Offload.NONE, True), (Offload.PARAMS, False)])
def test_gradients_of_offloaded_parameters_are_made_in_host_memory(offload: Offload, count: bool) -> None:
    """torch's _use_unsharded_grad_views: ``empty_like(param)``, and "if CPU offloading is enabled, is on CPU"."""
    precision, accumulate = Precision.parse("bf16-mixed"), {"gradient_accumulation_steps": 2}
    setup = TrainSetup(world_size=2, offload=offload, precision=precision, sync_every_micro_batch=False, **accumulate)
    labels = {
        event.label for event in SimulatedSteps(shape(), setup, CUDA).step().events if event.kind is Kind.ALLOCATE
    }
    assert ("aten::empty_like" in labels) is count


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
