"""From what a step issued to the events of a schedule: order, streams, waits, and what is unknown."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from fsdp_bench.catalog.loader import gpu
from fsdp_bench.plan.rehearsed_time.events import Replayable, events_of
from fsdp_bench.plan.rehearsed_time.process_groups import process_groups
from fsdp_bench.replay.schedule import StepTime, run
from fsdp_bench.simulate.events import Kind, Stream, Work
from fsdp_bench.spec.hardware import Hardware
from tests.plan.rehearsed_time.steps import StepWriter

EIGHT = tuple(range(8))


@dataclass
class OneSecond:
    """Every operator, collective, copy and hook takes a second; the host launches at once."""

    source: str = "test"
    blocks_host: bool = False
    launch_seconds: float = 0.0

    def run(self, work: Work, beside: tuple[Work, ...] = ()) -> float:
        return 1.0

    def collective(self, work: Work) -> float:
        return 1.0

    def copy(self, work: Work) -> float:
        return 1.0

    def host(self, work: Work) -> float:
        return 1.0


def converted(step: StepWriter) -> Replayable:
    read = step.read()
    return events_of(read, process_groups(read, Hardware.of_gpu(gpu("H100-SXM"))))


def scheduled(step: StepWriter) -> StepTime:
    return run(converted(step).events, OneSecond())


def add(step: StepWriter, stream: int = 0) -> None:
    step.operator("aten::add", (step.tensor(10),), self=(step.tensor(10),), stream=stream)


@pytest.mark.parametrize(("stream", "seconds"), [(0, 2.0), (70, 1.0)])
def test_operators_of_one_stream_run_one_after_another_and_those_of_two_at_once(
    step: StepWriter, stream: int, seconds: float
) -> None:
    add(step)
    add(step, stream=stream)
    assert scheduled(step).step_seconds == seconds


def test_a_stream_waits_for_an_event_of_another(step: StepWriter) -> None:
    add(step)
    step.add("record", event=5, stream=0)
    step.add("wait", event=5, stream=70)
    add(step, stream=70)
    assert scheduled(step).step_seconds == 2.0


def test_a_wait_is_for_the_event_as_it_was_recorded_last(step: StepWriter) -> None:
    """The event is recorded again, later, after the wait was issued: that is another one."""
    step.add("record", event=5, stream=0)
    step.add("wait", event=5, stream=70)
    add(step)
    step.add("record", event=5, stream=0)
    add(step, stream=70)
    assert scheduled(step).step_seconds == 1.0


def test_an_event_may_be_waited_for_twice_or_never(step: StepWriter) -> None:
    add(step)
    step.add("record", event=5, stream=0)
    step.add("record", event=6, stream=0)
    for stream in (70, 71):
        step.add("wait", event=5, stream=stream)
        add(step, stream=stream)
    step.add("host_wait", event=5, stream=None)
    assert scheduled(step).step_seconds == 2.0


def test_events_of_an_earlier_step_have_happened(step: StepWriter) -> None:
    step.add("wait", event=5, stream=0)
    step.add("host_wait", event=6, stream=None)
    add(step)
    assert scheduled(step).step_seconds == 1.0


@pytest.mark.parametrize("waits_for", ["event", "stream", "device"])
def test_the_host_issues_later_work_when_it_has_waited(step: StepWriter, waits_for: str) -> None:
    add(step)
    step.add("record", event=5, stream=0)
    fields = {"event": 5 if waits_for == "event" else None, "stream": 0 if waits_for == "stream" else None}
    step.add("host_wait", **fields)
    add(step, stream=70)
    assert scheduled(step).step_seconds == 2.0


def test_hooks_take_the_hosts_time(step: StepWriter) -> None:
    step.add("hook", name="fsdp2 _pre_forward")
    add(step)
    assert scheduled(step).step_seconds == 2.0


def test_a_collective_runs_on_its_stream_and_is_exposed_where_no_operator_runs(step: StepWriter) -> None:
    step.collective("allgather_base", 100, EIGHT, stream=70)
    add(step)
    add(step)
    step.collective("reduce_scatter_base", 100, EIGHT, stream=0)
    found = scheduled(step)
    assert (found.step_seconds, found.communication_seconds, found.exposed_communication_seconds) == (3.0, 2.0, 1.0)


def test_a_started_collective_is_waited_for_where_the_script_waits(step: StepWriter) -> None:
    step.collective("allreduce", 100, EIGHT, is_asynchronous=True)
    add(step)
    step.add("collectives_wait", stream=0)
    add(step)
    assert scheduled(step).step_seconds == 2.0


def test_a_group_of_one_rank_has_nothing_to_send(step: StepWriter) -> None:
    step.collective("allreduce", 100, (0,))
    assert converted(step).unknown == {}
    assert scheduled(step).step_seconds == 0.0


def test_streams_have_the_names_of_their_collectives_and_most_operators_run_on_compute(step: StepWriter) -> None:
    step.collective("allgather_base", 100, EIGHT, stream=70)
    step.collective("reduce_scatter_base", 100, EIGHT, stream=71)
    add(step, stream=69)
    add(step, stream=0)
    add(step, stream=0)
    kinds = (Kind.KERNEL, Kind.COLLECTIVE)
    found = [event.stream for event in converted(step).events if event.kind in kinds]
    others = [Stream.ALL_GATHER, Stream.REDUCE_SCATTER, Stream.ALL_GATHER_COPY_IN]
    assert found == [*others, Stream.COMPUTE, Stream.COMPUTE]


def test_forward_runs_on_compute_also_where_most_operators_are_an_optimizers_in_backward(step: StepWriter) -> None:
    x = step.tensor(10)
    step.operator("aten::neg", (x,), self=(x,), stream=0)
    step.add("phase", name="backward")
    for _ in range(3):
        step.operator("aten::mul", (x,), self=(x,), stream=7)
    kernels = [event for event in converted(step).events if event.kind is Kind.KERNEL]
    assert [event.stream is Stream.COMPUTE for event in kernels] == [True, False, False, False]


def test_more_streams_than_a_schedule_has_share_one(step: StepWriter) -> None:
    for stream in range(70, 80):
        add(step, stream=stream)
    assert scheduled(step).step_seconds == 5.0  # of ten streams six have names; five share the last one


def test_work_of_unknown_time_is_named_and_counted(step: StepWriter) -> None:
    for _ in range(2):
        step.operator("flash_attn::_flash_attn_forward", (step.tensor(10),), q=(step.tensor(10),))
    step.add("kernel", name="cudaGraphLaunch", stream=0)
    step.collective("alltoall_base", 100, EIGHT)
    step.collective("allreduce", 4, EIGHT, stream=-1)
    expected = {
        "flash_attn::_flash_attn_forward": 2,
        "cudaGraphLaunch": 1,
        "alltoall_base (8 ranks)": 1,
        "allreduce (between hosts)": 1,
    }
    assert converted(step).unknown == expected


def test_products_of_fp32_that_may_run_in_tf32_are_unknown(step: StepWriter) -> None:
    step.product(16, 16, 16, ("float32", 4))
    assert converted(step).unknown == {}
    step.allows_tf32 = True
    assert converted(step).unknown == {"aten::mm in TF32": 1}
