"""Operators beside a collective take longer, by hand; the parts of a step add up to it."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from fsdp_bench.catalog import loader
from fsdp_bench.catalog.lookup import server
from fsdp_bench.plan.question import Question, speed_of
from fsdp_bench.rates.datasheet import Datasheet, datasheet
from fsdp_bench.replay.schedule import only_step_seconds, run, schedule
from fsdp_bench.replay.step_parts import StepPart
from fsdp_bench.replay.streams import Streams, without_single_operators
from fsdp_bench.simulate.events import Stream, Work
from fsdp_bench.simulate.operators.kernels import CUDA
from fsdp_bench.simulate.step import SimulatedSteps
from fsdp_bench.simulate.tape import Tape
from fsdp_bench.spec.hardware import Hardware
from fsdp_bench.spec.model import ModelShape
from fsdp_bench.spec.setup import ShardingStrategy, TrainSetup
from tests.profiles import share_of_examples
from tests.replay.test_schedule import Plain, setups


@dataclasses.dataclass(frozen=True)
class Halved(Plain):
    """Each collective beside an operator halves its speed."""

    def run(self, work: Work, beside: tuple[Work, ...] = ()) -> float:
        return super().run(work) * 2 ** len(beside)


def test_what_a_collective_beside_operators_costs_is_slowed_and_not_exposed() -> None:
    """Ten seconds of work with four seconds of an all-gather in between: two seconds of work are done in these."""
    tape = Tape()
    tape.collective("all_gather", "shard", 4, Stream.ALL_GATHER)
    tape.kernel("aten::mul", 10, 4)
    time = run(tape.events, Halved(memory=1.0, network=1.0))
    assert time.slowed_seconds == 2.0
    assert time.exposed_communication_seconds == 0.0


@given(
    st.lists(st.tuples(st.sampled_from(["kernel"] * 5 + ["gather", "reduce", "wait"]), st.integers(1, 5)), max_size=40),
    st.sampled_from([0.0, 0.5, 2.0]),
)
@example([("gather", 12), ("kernel", 1), ("kernel", 5), ("kernel", 1)], 2.0)  # the stream waits for the host
def test_operators_that_are_timed_together_end_as_they_do_one_by_one(
    drawn: list[tuple[str, int]], launch: float
) -> None:
    tape = Tape()
    for what, seconds in drawn:
        if what == "kernel":
            tape.kernel("aten::mul", seconds, 4)
        elif what == "wait":
            tape.wait_stream(Stream.COMPUTE, Stream.ALL_GATHER)
        else:
            stream = Stream.ALL_GATHER if what == "gather" else Stream.ALL_REDUCE
            tape.wait_stream(stream, Stream.COMPUTE)
            tape.collective("all_reduce", what, seconds, stream)
    rates = Halved(memory=1.0, network=1.0, launch_seconds=launch)
    together = Streams(rates).run(without_single_operators(tape.events))
    assert together == pytest.approx(Streams(rates).run(tape.events), rel=1e-9)


def on_h100s() -> Datasheet:
    return datasheet(server("p5.48xlarge", 1), TrainSetup(world_size=8))


def test_a_product_of_one_wave_needs_two_beside_an_all_gather() -> None:
    """132 tiles on 132 multiprocessors; 24 of them run NCCL's channels (forums.developer.nvidia.com/t/337991)."""
    rates, gather = on_h100s(), Work("all_gather", 10**9, group="shard")
    assert rates.channels["shard"] == 24
    product = Work("aten::mm nt", 0, (128 * 132, 256, 8192), 2)
    alone, beside = rates.run(product), rates.run(product, (gather,))
    assert beside == pytest.approx(2 * alone)


def test_an_operator_that_moves_bytes_shares_the_memory_with_the_collective() -> None:
    """Three bytes of traffic for each byte that an all-gather delivers."""
    rates, gather = on_h100s(), Work("all_gather", 10**9, group="shard")
    add = Work("aten::add", 3 * 10**9, itemsize=2)
    seconds = rates.collective(gather)
    alone, beside = rates.run(add), rates.run(add, (gather,))
    assert 1 / beside == pytest.approx(1 / alone - (3 * 10**9 / seconds) / add.num_bytes)


@share_of_examples(5)
@given(setups(), st.sampled_from([1e9, 1e10, 1e11]), st.sampled_from([0.0, 1e-7, 1e-6, 1e-5]), st.booleans())
def test_the_parts_add_up_to_the_step(
    drawn: tuple[ModelShape, TrainSetup], network: float, launch: float, blocks_host: bool
) -> None:
    """No part is negative, nothing is left over; without contention, or with twice the bandwidth, nothing is slower."""
    shape, setup = drawn
    rates = Halved(network=network, launch_seconds=launch, hook_seconds=launch, blocks_host=blocks_host)
    plain = Plain(network=network, launch_seconds=launch, hook_seconds=launch, blocks_host=blocks_host)
    log = SimulatedSteps(shape, setup, CUDA).step()
    slowed, alone = schedule(log, rates), schedule(log, plain)
    assert only_step_seconds(log, rates) == pytest.approx(slowed.step_seconds, rel=1e-9)
    assert slowed.step_seconds >= alone.step_seconds * (1 - 1e-9)
    for time in (slowed, alone):
        assert set(time.parts) == set(StepPart)
        assert all(seconds >= -1e-12 for seconds in time.parts.values())
        assert sum(time.parts.values()) == pytest.approx(time.step_seconds, rel=1e-9)
        assert time.parts[StepPart.EXPOSED_COMMUNICATION] == pytest.approx(time.exposed_communication_seconds)
    tiny = 1e-9
    assert alone.exposed_communication_seconds <= alone.communication_seconds + tiny
    assert alone.step_seconds >= alone.communication_seconds - tiny
    assert alone.step_seconds >= alone.compute_seconds + alone.exposed_communication_seconds - tiny
    faster = dataclasses.replace(plain, network=2 * network)
    assert only_step_seconds(log, faster) <= alone.step_seconds + tiny


HARDWARE = {
    "network": lambda server, gpu, factor: (replace(server, inter_node=_faster(server.inter_node, factor)), gpu),
    "NVLink": lambda server, gpu, factor: (replace(server, intra_node=_faster(server.intra_node, factor)), gpu),
    "memory": lambda server, gpu, factor: (server, _faster(gpu, factor, "memory_bandwidth_bytes_per_second")),
    "clock": lambda server, gpu, factor: (
        server,
        replace(gpu, dense_flops_per_second={k: v * factor for k, v in gpu.dense_flops_per_second.items()}),
    ),
}


def _faster(part: Any, factor: float, name: str = "bandwidth_bytes_per_second") -> Any:
    return replace(part, **{name: getattr(part, name) * factor})


@pytest.mark.parametrize("faster", HARDWARE)
@pytest.mark.parametrize("strategy", [one.value for one in ShardingStrategy])
def test_faster_hardware_never_makes_a_step_slower(strategy: str, faster: str) -> None:
    shape, node, gpu = loader.model("Llama-3.2-1B").shape(), loader.server("p5.48xlarge"), loader.gpu("H100-SXM")
    kind = ShardingStrategy(strategy)
    setup = TrainSetup(world_size=16, strategy=kind, shard_size=8 if kind.is_hybrid else None, sequence_length=1024)
    steps = []
    for factor in (0.25, 0.5, 0.8, 1.0, 1.3, 2.0, 4.0):
        changed, card = HARDWARE[faster](node, gpu, factor)
        time = speed_of(Question(shape, setup, Hardware(server=changed, gpu=card, num_nodes=2, gpus_per_node=8))).time
        assert time.step_seconds is not None
        steps.append(time.step_seconds)
    for slow, fast in itertools.pairwise(steps):
        assert fast <= slow * (1 + 1e-9)
