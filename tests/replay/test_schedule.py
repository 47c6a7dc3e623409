"""The time of a step: what holds on any hardware, what can be counted by hand, and operators beside collectives."""

import dataclasses
import itertools
import math
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from fsdp_bench.catalog import loader
from fsdp_bench.catalog.lookup import server
from fsdp_bench.plan.question import Question, speed_of
from fsdp_bench.rates.datasheet import KERNEL_SECONDS, Datasheet, attention_flops, datasheet, tile_fraction
from fsdp_bench.replay.schedule import only_step_seconds, run, schedule
from fsdp_bench.replay.step_parts import StepPart
from fsdp_bench.replay.streams import Streams, without_single_operators
from fsdp_bench.simulate.events import Event, Kind, Stream, Work
from fsdp_bench.simulate.operators.kernels import CPU_GLOO, CUDA
from fsdp_bench.simulate.step import SimulatedSteps
from fsdp_bench.simulate.tape import Tape
from fsdp_bench.spec.hardware import Hardware
from fsdp_bench.spec.impossible import impossible
from fsdp_bench.spec.model import Family, ModelShape
from fsdp_bench.spec.setup import Api, Checkpointing, Offload, Precision, ShardingStrategy, TrainSetup
from tests.profiles import share_of_examples
from tests.shapes import shape


@dataclass(frozen=True)
class Plain:
    """Hardware without a datasheet: FLOP/s, bytes a second, and seconds that the host needs."""

    flops: float = 1e14
    memory: float = 1e12
    network: float = 1e11
    launch_seconds: float = 0.0
    hook_seconds: float = 0.0
    blocks_host: bool = False
    source: str = "datasheet"

    def run(self, work: Work, beside: tuple[Work, ...] = ()) -> float:
        if work.is_product:
            m, n, k = work.dims
            return 2 * m * n * k / self.flops
        if work.is_attention:
            return attention_flops(work.dims, work.is_backward) / self.flops
        return work.num_bytes / self.memory

    def collective(self, work: Work) -> float:
        return work.num_bytes / self.network

    def copy(self, work: Work) -> float:
        return work.num_bytes / self.network

    def host(self, work: Work) -> float:
        return self.hook_seconds


@st.composite
def setups(draw: st.DrawFn) -> tuple[ModelShape, TrainSetup]:
    """Draw a small model and a setup that can run."""
    heads = draw(st.sampled_from([1, 2, 4]))
    model = shape(
        family=draw(st.sampled_from(list(Family))),
        num_hidden_layers=draw(st.integers(1, 9)),
        hidden_size=64 * heads,
        **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), heads),
        **{"intermediate_size": 256, "vocab_size": 512},
    )
    strategy = draw(st.sampled_from(list(ShardingStrategy)))
    setup = TrainSetup(
        strategy=strategy,
        api=draw(st.sampled_from(list(Api))),
        precision=draw(st.sampled_from([Precision("fp32", "fp32", "fp32"), Precision("fp32", "bf16", "fp32")])),
        checkpointing=draw(st.sampled_from(list(Checkpointing))),
        offload=draw(st.sampled_from(list(Offload))),
        world_size=draw(st.sampled_from([2, 4, 8])),
        shard_size=2 if strategy.is_hybrid else None,
        sequence_length=draw(st.sampled_from([64, 200])),
        micro_batch_size=draw(st.integers(1, 3)),
        gradient_accumulation_steps=draw(st.sampled_from([1, 2, 5])),
        sync_every_micro_batch=draw(st.booleans()),
    )
    assume(impossible(setup, "cuda") is None)
    return model, setup


@share_of_examples(5)
@given(setups(), st.sampled_from([1e9, 1e11]))
def test_the_steady_step_takes_as_long_as_the_last_of_the_first_steps(
    drawn: tuple[ModelShape, TrainSetup], network: float
) -> None:
    """warm_up() leaves the events that a real step leaves: the rate limiter waits for the same unit."""
    shape, setup = drawn
    rates = Plain(network=network, launch_seconds=1e-6)
    steps = SimulatedSteps(shape, setup, CUDA)
    logs = steps.step(), steps.first_steps(every_block=True)  # with fewer blocks DDP's buckets end elsewhere
    steady, real = (schedule(log, rates) for log in logs)
    assert steady.step_seconds == pytest.approx(real.step_seconds, rel=1e-9)


def issued(shape: ModelShape, setup: TrainSetup) -> list[Event]:
    return list(SimulatedSteps(shape, setup, CUDA).step().last_step())


def flops_of_products(shape: ModelShape, setup: TrainSetup) -> float:
    works = [event.work for event in issued(shape, setup) if event.work is not None]
    return sum(2.0 * math.prod(work.dims) for work in works if work.is_product)


def test_host_bound_steps_take_what_the_host_needs() -> None:
    """A host that needs a millisecond for each operator decides the step's time."""
    model, setup = shape(family=Family.GPT2, num_hidden_layers=2), TrainSetup(world_size=1, sequence_length=16)
    operators = sum(event.kind is Kind.KERNEL for event in issued(model, setup))
    time = schedule(SimulatedSteps(model, setup, CUDA).step(), Plain(launch_seconds=1e-3))
    assert time.step_seconds == pytest.approx(operators * 1e-3, rel=0.01)


def test_on_a_cpu_everything_is_one_after_another() -> None:
    """No stream runs beside the host; all communication of FSDP is exposed."""
    shape = loader.model("gpt2").shape()
    setup = TrainSetup(world_size=2, sequence_length=64)
    time = schedule(SimulatedSteps(shape, setup, CPU_GLOO).step(), Plain(blocks_host=True))
    assert time.exposed_communication_seconds == pytest.approx(time.communication_seconds)
    assert time.step_seconds == pytest.approx(time.compute_seconds + time.communication_seconds)


def test_flops_of_products_are_those_of_the_model() -> None:
    """Forward, the inputs' gradients and the weights' gradients: three times the forward's matrix products."""
    shape = loader.model("Llama-3-8B").shape()
    setup = TrainSetup(world_size=1, sequence_length=1024, precision=Precision("bf16", "bf16", "bf16"))
    flops = flops_of_products(shape, setup)
    keys = 4 * (1025 / 2) * shape.hidden_size * shape.num_hidden_layers
    counted = 1024 * (shape.model_flops_per_token(1024) - 3 * keys)
    assert flops == pytest.approx(counted, rel=1e-12)


def test_full_checkpointing_runs_forward_again() -> None:
    """By as many FLOPs as spec/model.py counts."""
    shape = loader.model("Llama-3-8B").shape()
    flops = {}
    for checkpointing in (Checkpointing.NONE, Checkpointing.SELECTIVE, Checkpointing.FULL):
        setup = TrainSetup(world_size=1, sequence_length=1024, checkpointing=checkpointing)
        flops[checkpointing] = flops_of_products(shape, setup)
    assert flops[Checkpointing.SELECTIVE] == flops[Checkpointing.NONE]
    more = 1024 * (shape.hardware_flops_per_token(setup) - shape.model_flops_per_token(1024))
    attention = 4 * (1025 / 2) * shape.hidden_size * shape.num_hidden_layers * 1024
    assert flops[Checkpointing.FULL] - flops[Checkpointing.NONE] == pytest.approx(more - attention, rel=1e-12)


def test_tiles_at_the_edge_are_counted_whole() -> None:
    """One row more than a tile needs a second one; a last wave of few tiles leaves the other processors idle."""
    assert tile_fraction((128 * 108, 256, 512), 108) == 1.0
    assert tile_fraction((129, 256, 512), None) == 1.0
    assert tile_fraction((128, 128, 512), 108) == pytest.approx(1 / 108)
    assert tile_fraction((128, 128, 4096), 108) == pytest.approx(8 / 108)  # eight compute the tile together
    # 109 tiles of 128 x 256 would need two waves, half full; as 218 of 128 x 128 they need three, two thirds full.
    assert tile_fraction((128 * 109, 256, 512), 108) == pytest.approx(218 / 324)


def test_attention_above_the_diagonal_is_skipped_tile_by_tile() -> None:
    """Two tiles a side: three of four are computed."""
    one = 2 * 2 * 128 * 128 * 64.0
    assert attention_flops((1, 1, 1, 128, 64), False) == one
    assert attention_flops((1, 1, 1, 256, 64), False) == 3 * one
    assert attention_flops((2, 3, 1, 256, 64), True) == 6 * 3 * one * 5 / 2


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
    alone, beside = (rates.run(product, others) - KERNEL_SECONDS for others in ((), (gather,)))
    assert beside == pytest.approx(2 * alone)


def test_an_operator_that_moves_bytes_shares_the_memory_with_the_collective() -> None:
    """Three bytes of traffic for each byte that an all-gather delivers."""
    rates, gather = on_h100s(), Work("all_gather", 10**9, group="shard")
    add = Work("aten::add", 3 * 10**9, itemsize=2)
    seconds = rates.collective(gather)
    alone, beside = (rates.run(add, others) - KERNEL_SECONDS for others in ((), (gather,)))
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
        assert set(time.parts) == set(StepPart) - {StepPart.WAITING_FOR_RANKS}
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
