"""From which stream's pool things come, and what is allocated once: as PyTorch's allocator shows on the stand-in."""

from __future__ import annotations

import pytest

from fsdp_bench.simulate.autograd import is_last_reference
from fsdp_bench.simulate.events import Category, Event, Kind, Stream
from fsdp_bench.simulate.operators.kernels import CUDA
from fsdp_bench.simulate.step import SimulatedSteps
from fsdp_bench.simulate.tape import Tape, Tensor
from fsdp_bench.spec.setup import Api, Precision, ShardingStrategy, TrainSetup
from tests.shapes import shape


def events_of(strategy: ShardingStrategy, api: Api = Api.FSDP1, **model: object) -> list[Event]:
    setup = TrainSetup(
        api=api, strategy=strategy, world_size=8, sequence_length=128, precision=Precision.parse("bf16-mixed")
    )
    return list(SimulatedSteps(shape(num_hidden_layers=4, **model), setup, CUDA).first_steps().events)


def allocated(events: list[Event], label: str) -> list[Event]:
    return [event for event in events if event.kind is Kind.ALLOCATE and event.label == label]


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
def test_fsdp1_concatenates_gradients_where_it_gathers(strategy: ShardingStrategy) -> None:
    """The views of the flat parameter are made with the unshard stream as the current one, and so is their node."""
    events = events_of(strategy)
    first_forward = next(index for index, event in enumerate(events) if event.label == "forward")
    flat = allocated(events[first_forward:], "aten::cat")
    by_stream = {stream: sum(event.stream is stream for event in flat) for stream in Stream}
    assert by_stream[Stream.ALL_GATHER] == 2 * 5  # steps, units
    weights = {event.number for event in allocated(events, "aten::mm") if event.category.value == "gradients"}
    recorded = {event.number for event in events if event.kind is Kind.RECORD_STREAM}
    assert weights <= recorded


def test_tied_weights_are_added_up_in_a_tensor_of_their_own() -> None:
    """The head's gradient is a view of a product, to which nothing is added in place (can_accumulate_inplace)."""
    tied = allocated(events_of(ShardingStrategy.FULL_SHARD, tie_word_embeddings=True), "aten::add")
    apart = allocated(events_of(ShardingStrategy.FULL_SHARD), "aten::add")
    assert [event.stream for event in tied if event.stream is not Stream.COMPUTE] == [Stream.ALL_GATHER] * 2
    assert {event.stream for event in apart} == {Stream.COMPUTE}


def test_ddp_has_one_bucket_in_its_first_step() -> None:
    events = events_of(ShardingStrategy.NO_SHARD, Api.FSDP2)
    (whole,) = allocated(events, "initialize_buckets")
    parts = allocated(events, "rebuild_buckets")
    freed = next(index for index, e in enumerate(events) if e.kind is Kind.FREE and e.number == whole.number)
    assert freed < events.index(parts[0])
    assert 0 <= sum(event.num_bytes for event in parts) - whole.num_bytes < 512 * len(parts)
    assert not {event.number for event in parts} & {e.number for e in events if e.kind is Kind.FREE}


def test_a_model_without_fsdp_on_one_gpu_has_no_buckets() -> None:
    """DistributedDataParallel's are as large as the gradients."""
    setup = TrainSetup(api=Api.FSDP2, strategy=ShardingStrategy.NO_SHARD, sequence_length=128)
    events = list(SimulatedSteps(shape(num_hidden_layers=4), setup, CUDA).first_steps().events)
    assert not [event for event in events if event.category is Category.REDUCTION_BUFFERS]
    assert not [event for event in events if event.kind is Kind.COLLECTIVE]


def test_each_thread_makes_its_workspace_with_its_first_product() -> None:
    events = events_of(ShardingStrategy.FULL_SHARD)
    places = [index for index, event in enumerate(events) if event.label == "getNewWorkspace"]
    phases = []
    for place in places:
        assert events[place - 1].label == "aten::mm"
        phases.append(next(e.label for e in reversed(events[:place]) if e.kind is Kind.MARK))
    assert phases == ["forward", "backward"]


def test_only_what_nobody_else_holds_is_added_to_in_place() -> None:
    """Counted as Engine._add does; a new Python may count differently."""

    def asked(buffer: list[Tensor]) -> bool:
        first = buffer[0]
        return is_last_reference(first)

    tape = Tape()
    alone = [tape.tensor(4, 4, "gradient")]
    assert asked(alone)
    also = alone[0]
    assert not asked(alone)
    del also
    assert asked(alone)
    detached = alone[0].detach()
    assert not asked(alone)
    assert not asked([detached])
