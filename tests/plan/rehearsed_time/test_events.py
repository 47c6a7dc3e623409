"""From what a step issued to the events of a schedule: order, streams, waits, process groups, and what is unknown."""

from dataclasses import dataclass
from typing import Any

import pytest

from fsdp_bench.catalog.loader import gpu
from fsdp_bench.catalog.lookup import server
from fsdp_bench.plan.rehearsed_time.events import Replayable, events_of, process_groups
from fsdp_bench.rates.collectives import groups_of, topology_of_ranks
from fsdp_bench.replay.schedule import StepTime, run
from fsdp_bench.simulate.events import Kind, Stream, Work
from fsdp_bench.spec.hardware import Hardware
from fsdp_bench.spec.setup import ShardingStrategy, TrainSetup
from tests.plan.rehearsed_time.conftest import StepWriter

EIGHT = tuple(range(8))


@dataclass
class OneSecond:
    """Every operator, collective, copy and hook takes a second; the host launches at once."""

    source: str = "test"
    blocks_host: bool = False
    launch_seconds: float = 0.0

    def run(self, work: Work, beside: tuple[Work, ...] = ()) -> float:
        return 1.0

    collective = copy = host = run


def converted(step: StepWriter) -> Replayable:
    read = step.read()
    return events_of(read, process_groups(read, Hardware.of_gpu(gpu("H100-SXM"))))


def scheduled(step: StepWriter) -> StepTime:
    return run(converted(step).events, OneSecond())


def add(step: StepWriter, stream: int = 0) -> None:
    step.operator("aten::add", (step.tensor(10),), self=(step.tensor(10),), stream=stream)


Part = tuple[str, dict[str, Any]]


def op(stream: int = 0) -> Part:
    return "", {"stream": stream}


def record(event: int) -> Part:
    return "record", {"event": event, "stream": 0}


def wait(event: int, stream: int = 70) -> Part:
    return "wait", {"event": event, "stream": stream}


def host_wait(event: int | None = None, stream: int | None = None) -> Part:
    return "host_wait", {"event": event, "stream": stream}


SECONDS: dict[str, tuple[list[Part], float]] = {
    "operators of one stream run one after another": ([op(), op()], 2.0),
    "operators of two streams run at once": ([op(), op(70)], 1.0),
    "a stream waits for an event of another": ([op(), record(5), wait(5), op(70)], 2.0),
    # The event is recorded again, later, after the wait was issued: that is another one.
    "a wait is for the event as it was recorded last": ([record(5), wait(5), op(), record(5), op(70)], 1.0),
    "an event may be waited for twice or never": (
        [op(), record(5), record(6), wait(5, 70), op(70), wait(5, 71), op(71), host_wait(5)],
        2.0,
    ),
    "events of an earlier step have happened": ([wait(5, 0), host_wait(6), op()], 1.0),
    "the host issues later work when it has waited for an event": ([op(), record(5), host_wait(5), op(70)], 2.0),
    "the host issues later work when it has waited for a stream": ([op(), host_wait(stream=0), op(70)], 2.0),
    "the host issues later work when it has waited for the GPU": ([op(), host_wait(), op(70)], 2.0),
    "hooks take the host's time": ([("hook", {"name": "fsdp2 _pre_forward"}), op()], 2.0),
    "of ten streams six have names, and five share the last one": ([op(stream) for stream in range(70, 80)], 5.0),
}


@pytest.mark.parametrize(("parts", "seconds"), SECONDS.values(), ids=SECONDS.keys())
def test_a_step_takes_as_long_as_its_order_says(step: StepWriter, parts: list[Part], seconds: float) -> None:
    for kind, fields in parts:
        if kind:
            step.add(kind, **fields)
        else:
            add(step, **fields)
    assert scheduled(step).step_seconds == seconds


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


def test_work_of_unknown_time_is_named_and_counted(step: StepWriter) -> None:
    for _ in range(2):
        step.operator("flash_attn::_flash_attn_forward", (step.tensor(10),), q=(step.tensor(10),))
    step.add("kernel", name="cudaGraphLaunch", stream=0)
    step.collective("gather", 100, EIGHT)
    step.collective("allreduce", 4, EIGHT, stream=-1)
    expected = {
        "flash_attn::_flash_attn_forward": 2,
        "cudaGraphLaunch": 1,
        "gather (8 ranks)": 1,
        "allreduce (between hosts)": 1,
    }
    assert converted(step).unknown == expected


def test_products_of_fp32_that_may_run_in_tf32_are_unknown(step: StepWriter) -> None:
    step.product(16, 16, 16, ("float32", 4))
    assert converted(step).unknown == {}
    step.allows_tf32 = True
    assert converted(step).unknown == {"aten::mm in TF32": 1}


# -- process groups: their topologies, against those that predict has for the same ranks -------------------------------


def cluster(nodes: int) -> Hardware:
    return server("p5.48xlarge", nodes)


@pytest.mark.parametrize(("nodes", "shard"), [(1, None), (2, None), (4, None), (2, 8), (2, 4), (4, 16), (2, 2), (4, 8)])
def test_groups_are_predicts(nodes: int, shard: int | None) -> None:
    """All ranks under FULL_SHARD, or groups of HYBRID_SHARD."""
    world, where = 8 * nodes, cluster(nodes)
    strategy = ShardingStrategy.HYBRID_SHARD if shard else ShardingStrategy.FULL_SHARD
    expected = groups_of(where, TrainSetup(world_size=world, strategy=strategy, shard_size=shard))
    assert topology_of_ranks(where, range(shard or world)) == expected.shard is not None
    assert shard is None or topology_of_ranks(where, range(0, world, shard)) == expected.replicate


def test_the_order_of_ranks_and_the_node_do_not_matter() -> None:
    assert topology_of_ranks(cluster(2), [3, 1, 2, 0]) == topology_of_ranks(cluster(2), [12, 13, 14, 15])


@pytest.mark.parametrize("ranks", [[0], [], [0, 1, 8], [0, 1, 3], [0, 9]])
def test_ranks_that_are_alone_or_spread_unevenly_have_no_topology(ranks: list[int]) -> None:
    assert topology_of_ranks(cluster(2), ranks) is None


def test_each_group_has_its_topology_where_there_is_a_server(step: StepWriter) -> None:
    step.collective("allreduce", 8, (0, 8), group="replicas")
    step.collective("reduce_scatter_base", 8, tuple(range(8)), group="mesh")
    step.collective("alltoall_base", 8, (0, 2, 4, 6), group="experts")
    expected = {"replicas": (0, 8), "mesh": range(8), "experts": (0, 2, 4, 6)}
    found = process_groups(step.read(), cluster(2)).groups.of_script
    assert found == {name: topology_of_ranks(cluster(2), ranks) for name, ranks in expected.items()}
    assert None not in found.values()
    without = process_groups(step.read(), Hardware.of_gpu(gpu("H100-SXM"))).groups.of_script
    assert without == dict.fromkeys(expected)


# -- messages between ranks --------------------------------------------------------------------------------------------


def message(step: StepWriter, name: str, peer: int, num_bytes: int = 100, **more: Any) -> None:
    step.collective(name, num_bytes, (0, 2, 4, 6), peer=peer, is_asynchronous=True, **more)


def communicating(step: StepWriter) -> list[tuple[Work, list[frozenset[int]]]]:
    """Return the messages of rank 2, each with the ranks that take part."""
    read = step.read()
    found = events_of(read, process_groups(read, cluster(1), rank=2))
    events = [event for event in found.events if event.kind is Kind.START_COLLECTIVE]
    return [(event.work, [one.ranks for one in found.meetings[event.number]]) for event in events]


def test_messages_of_a_batch_are_sent_and_received_at_once(step: StepWriter) -> None:
    """The larger direction counts; the next batch waits for this one, as both have the group's communicator."""
    message(step, "send", 4, 100, batch=0)
    message(step, "send", 0, 50, batch=0)
    message(step, "recv", 4, 120, batch=0)
    message(step, "recv", 0, 10, batch=1)
    both, alone = communicating(step)
    assert both == (
        Work("send_recv", 150, (0, 4), group="0"),
        [frozenset({2, 4}), frozenset({0, 2}), frozenset({2, 4})],
    )
    assert alone == (Work("send_recv", 10, (0,), group="0"), [frozenset({0, 2})])


def test_single_messages_have_a_communicator_for_each_pair_of_ranks(step: StepWriter) -> None:
    message(step, "send", 4)
    message(step, "recv", 0)
    assert [work.group for work, _ in communicating(step)] == ["0 2:4", "0 0:2"]


def test_both_ranks_of_a_message_know_it_by_the_same_key(step: StepWriter) -> None:
    other = StepWriter()
    for _ in range(2):
        message(step, "send", 4)
        message(other, "recv", 2)
    message(step, "recv", 4)
    message(other, "send", 2)
    keys = []
    for rank, writer in ((2, step), (4, other)):
        read = writer.read()
        found = events_of(read, process_groups(read, cluster(1), rank))
        keys.append([one.key for meetings in found.meetings for one in meetings])
    assert keys[0] == keys[1]
    assert len(set(keys[0])) == 3


def test_a_stream_waits_for_the_collective_that_it_names(step: StepWriter) -> None:
    """Not for the two of a second each that were started before it, nor for one that was started after it."""
    for number, group in ((5, "1"), (6, "1"), (7, "0"), (8, "0")):
        step.collective("allreduce", 100, EIGHT, is_asynchronous=True, number=number, group=group)
    step.add("collectives_wait", stream=0, number=7)
    add(step)
    assert scheduled(step).step_seconds == 2.0
    step.add("collectives_wait", stream=0, number=6)
    add(step)
    assert scheduled(step).step_seconds == 3.0
