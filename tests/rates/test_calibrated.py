"""Rates of a calibration: measured seconds at measured sizes, and interpolated seconds between them."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_bench.plan.speed import speed
from fsdp_bench.rates.calibrated import Calibrated
from fsdp_bench.rates.datasheet import RatesWithoutCommunication
from fsdp_bench.replay.schedule import run
from fsdp_bench.simulate.events import Kind, Work
from fsdp_bench.simulate.operators.kernels import CPU, CPU_GLOO, CUDA
from fsdp_bench.simulate.step import SimulatedSteps
from fsdp_bench.spec.calibration_profile import (
    CALIBRATION_MODEL,
    CALIBRATION_SEQUENCE_LENGTH,
    CASTING_CHUNK_CAT,
    HOST_MODEL,
    HOST_SEQUENCE_LENGTH,
    AttentionTime,
    CollectiveTime,
    CopyTime,
    MatmulTime,
    OperatorTime,
    OptimizerTime,
    Profile,
    RankMeasurements,
    RankProfile,
)
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.setup import Api, OptimizerKind, Precision, ShardingStrategy, TrainSetup
from fsdp_bench.sweep.calibration import rank_profile

FLOPS, BANDWIDTH, LATENCY, NETWORK = 1e11, 1e10, 1e-4, 1e9
SIDES = (64, 256, 1024)
SIZES = (2**10, 2**16, 2**22)


def times(**changes: object) -> dict[str, object]:
    """Return the tables of a machine with one FLOP rate, one bandwidth and one latency."""
    tables: dict[str, object] = {
        "matmul": tuple(
            MatmulTime(layout=layout, dtype=dtype, m=m, n=n, k=k, seconds=2 * m * n * k / FLOPS)
            for layout in ("nt", "nn", "tn")
            for dtype in ("fp32", "bf16")
            for m in SIDES
            for n in SIDES
            for k in SIDES
        ),
        "attention": tuple(
            AttentionTime(backward=backward, dtype=dtype, heads=8, length=length, head_dim=64, seconds=1e-6 * length)
            for backward in (False, True)
            for dtype in ("fp32", "bf16")
            for length in (128, 512)
        ),
        "operator": tuple(
            OperatorTime(operator=name, dtype=dtype, num_bytes=size, seconds=size / BANDWIDTH)
            for name in OPERATORS
            for dtype in ("fp32", "bf16")
            for size in SIZES
        ),
        "copy": tuple(CopyTime(direction="to_device", num_bytes=size, seconds=size / BANDWIDTH) for size in SIZES),
        "optimizer": tuple(
            OptimizerTime(kind=kind, num_tensors=count, num_elements=numel, seconds=count * 1e-5 + numel / BANDWIDTH)
            for kind in ("adamw-foreach", "sgd")
            for count, numel in ((64, 2**16), (8, 2**23))
        ),
        "collective": tuple(
            CollectiveTime(
                kind=kind, group_size=2, neighbours=True, message_bytes=size, seconds=LATENCY + size / NETWORK
            )
            for kind in ("all_gather", "reduce_scatter", "all_reduce")
            for size in SIZES
        ),
    }
    return tables | changes


OPERATORS = (
    *("aten::_fused_rms_norm", "aten::native_layer_norm_backward"),
    *("aten::add", "aten::add_", "aten::mul", "aten::mul_out", "aten::div_", "aten::neg", "aten::pow", "aten::cat"),
    *("aten::clone", "aten::copy_", "aten::_to_copy", "aten::sum", "aten::mean", "aten::silu", "aten::silu_backward"),
    *("aten::embedding", "aten::embedding_dense_backward", "aten::_log_softmax", "aten::_log_softmax_backward_data"),
)


def profile(launch: float = 0.0, hooks: float = 0.0, **changes: object) -> Profile:
    """Return that machine's calibration with two ranks."""
    tables = times(**changes)
    ranks = RankProfile(
        num_ranks=2,
        threads_per_rank=1,
        launch_seconds=launch,
        hook_seconds={"fsdp1": hooks, "fsdp2": hooks},
        **tables,  # type: ignore[arg-type]
    )
    return Profile(
        machine="made up", device="cpu", device_name="none", measured_on="2026-11-21", versions={}, ranks=(ranks,)
    )


SETUP = TrainSetup(world_size=2, precision=Precision("fp32", "bf16", "fp32"), sequence_length=128)
RATES = Calibrated(profile(), SETUP, 2)


@given(st.integers(8, 4096), st.integers(8, 4096), st.integers(8, 4096))
def test_one_rate_everywhere_is_one_rate_between(m: int, n: int, k: int) -> None:
    work = Work("aten::mm nt", 0, (m, n, k), 4)
    assert RATES.run(work) == pytest.approx(2.0 * m * n * k / FLOPS)


@given(st.integers(1, 2**24), st.integers(1, 2**24))
def test_more_bytes_never_take_less(one: int, other: int) -> None:
    low, high = sorted((one, other))
    for name, ask in (("aten::mul", RATES.run), ("to_device", RATES.copy)):
        first, second = ask(Work(name, low)), ask(Work(name, high))
        assert first <= second
    sent = [RATES.collective(Work("all_gather", size, group="shard")) for size in (low, high)]
    assert sent[0] <= sent[1]


def test_what_was_measured_is_what_is_said() -> None:
    assert RATES.run(Work("aten::silu", 2**16)) == pytest.approx(2**16 / BANDWIDTH)
    assert RATES.collective(Work("all_reduce", 2**22, group="world")) == pytest.approx(LATENCY + 2**22 / NETWORK)
    assert RATES.run(Work("optimizer sgd", 0, (8, 2**23))) == pytest.approx(8e-5 + 2**23 / BANDWIDTH)


def test_between_two_sizes_a_time_is_on_the_line_between_them() -> None:
    middle = (2**16 + 2**22) // 2
    assert RATES.collective(Work("all_gather", middle, group="shard")) == pytest.approx(LATENCY + middle / NETWORK)


def test_an_operator_that_is_not_timed_is_like_another_that_is() -> None:
    assert RATES.run(Work("fsdp::split_with_sizes_copy", 2**20)) == RATES.run(Work("aten::copy_", 2**20))


def test_what_casts_on_its_way_is_timed_as_such() -> None:
    """Casts from bf16 to fp32 and from fp32 to bf16 have different times; casts of gradients have their own row."""
    rows = (
        OperatorTime(operator="aten::_to_copy", dtype="bf16", num_bytes=2**20, seconds=4e-3),
        OperatorTime(operator="aten::_to_copy", dtype="fp32", num_bytes=2**20, seconds=1e-3),
        OperatorTime(operator="fsdp::chunk_cat", dtype="bf16", num_bytes=2**20, seconds=2e-3),
        OperatorTime(operator=CASTING_CHUNK_CAT, dtype="bf16", num_bytes=2**20, seconds=8e-3),
    )
    rates = Calibrated(profile(operator=rows), SETUP, 2)
    for name, itemsize, seconds in (
        ("aten::_to_copy", 2, 4e-3),
        ("aten::_to_copy", 4, 1e-3),
        ("fsdp::chunk_cat", 2, 2e-3),
        (CASTING_CHUNK_CAT, 2, 8e-3),
    ):
        assert rates.run(Work(name, 2**20, itemsize=itemsize)) == pytest.approx(seconds)
    older = Calibrated(profile(operator=rows[:2]), SETUP, 2)  # without such a row it is taken as a cast
    assert older.run(Work(CASTING_CHUNK_CAT, 2**20, itemsize=2)) == pytest.approx(4e-3)


@pytest.mark.parametrize("api", list(Api))
@pytest.mark.parametrize(("precision", "itemsize"), [("bf16-mixed", 2), ("fp32", 4), ("bf16-true", 2)])
def test_what_is_reduced_is_read_in_the_dtype_that_gradients_have(api: Api, precision: str, itemsize: int) -> None:
    """Under bf16-mixed both wrappers cast gradients from bf16 and reduce them in fp32; otherwise neither does."""
    setup = TrainSetup(world_size=2, api=api, precision=Precision.parse(precision), sequence_length=128)
    works = {
        event.work
        for event in SimulatedSteps(CALIBRATION_MODEL, setup, CPU_GLOO).step().last_step()
        if event.work is not None
    }
    largest = max(action.num_bytes for action in works if action.name == "reduce_scatter")
    casts = precision == "bf16-mixed"
    if api is Api.FSDP2:
        (copied,) = {(w.name, w.itemsize) for w in works if w.name.startswith("fsdp::chunk_cat")}
        assert copied == (CASTING_CHUNK_CAT if casts else "fsdp::chunk_cat", itemsize)
    else:
        found = {w.itemsize for w in works if w.name == "aten::_to_copy" and w.num_bytes == largest // 4 * 6}
        assert found == ({2} if casts else set())


def test_products_in_float8_are_unknown_which_no_calibration_measures() -> None:
    assert RATES.run(Work("aten::mm nt", 0, (4096, 4096, 4096), 2)) is not None
    assert RATES.run(Work("aten::mm nt", 0, (4096, 4096, 4096), 1)) is None


def test_a_group_of_a_size_that_was_not_measured_is_unknown() -> None:
    setup = TrainSetup(world_size=8, sequence_length=128)
    assert Calibrated(profile(), setup, 8).collective(Work("all_gather", 1, group="shard")) is None
    found = speed(SimulatedSteps(CALIBRATION_MODEL, setup, CPU), None, profile(hooks=1e-5))
    assert found.time.step_seconds is None
    assert found.time.unknown == ("all_gather (shard)", "reduce_scatter (shard)")


def test_a_group_is_timed_as_the_measured_one_whose_ranks_are_as_far_apart() -> None:
    """In a mesh of 2 x 2, rank 0 shards with its neighbour, rank 1, and replicates with rank 2.

    Where ranks are not sharded, the replicas are all ranks: neighbours.
    """
    rows = tuple(
        CollectiveTime(kind="all_reduce", group_size=size, neighbours=near, message_bytes=2**16, seconds=seconds)
        for size, near, seconds in ((2, True, 1e-3), (2, False, 3e-3), (4, True, 5e-3), (4, False, 7e-3))
    )
    hybrid = TrainSetup(strategy=ShardingStrategy.HYBRID_SHARD, world_size=4, shard_size=2, sequence_length=128)
    whole = TrainSetup(strategy=ShardingStrategy.NO_SHARD, world_size=4, sequence_length=128)
    for setup, group, seconds in ((hybrid, "shard", 1e-3), (hybrid, "replicate", 3e-3), (whole, "replicate", 5e-3)):
        rates = Calibrated(profile(collective=rows), setup, 4)
        assert rates.collective(Work("all_reduce", 2**16, group=group)) == pytest.approx(seconds)
    near_alone = Calibrated(profile(collective=rows[:1]), hybrid, 4)  # the other kind is better than none
    assert near_alone.collective(Work("all_reduce", 2**16, group="replicate")) == pytest.approx(1e-3)


def test_a_calibration_of_another_device_is_refused() -> None:
    with pytest.raises(SpecError, match="use --kernels cpu"):
        speed(SimulatedSteps(CALIBRATION_MODEL, SETUP), None, profile())


@pytest.mark.parametrize(("device", "launch", "hook"), [
    ("cpu", 0.0, 0.0), ("cpu", 5e-6, 2e-4), ("cuda", 1e-3, 2e-3),
])  # fmt: skip
def test_overheads_are_found_again_in_a_step_that_has_them(device: str, launch: float, hook: float) -> None:
    """Predict a step with known overheads, use it as a measurement, and find these overheads.

    On a CPU the host does the operators itself; on a GPU one so slow hides them: their time is not subtracted.
    """
    known = msgspec.structs.replace(profile(launch, hook), device=device)
    steps = {}
    for name, api, strategy, world in (
        ("none", Api.FSDP2, ShardingStrategy.NO_SHARD, 1),
        ("fsdp1", Api.FSDP1, ShardingStrategy.FULL_SHARD, 2),
        ("fsdp2", Api.FSDP2, ShardingStrategy.FULL_SHARD, 2),
    ):
        setup = TrainSetup(
            api=api,
            strategy=strategy,
            world_size=world,
            optimizer=OptimizerKind.SGD,
            sequence_length=CALIBRATION_SEQUENCE_LENGTH,
        )
        kernels = CUDA if device == "cuda" else CPU_GLOO if world > 1 else CPU
        events = list(SimulatedSteps(CALIBRATION_MODEL, setup, kernels).step().last_step())
        found_time = run(events, RatesWithoutCommunication(Calibrated(known, setup, 2), setup))
        assert found_time.step_seconds is not None, found_time.unknown
        steps[name] = found_time.step_seconds
    measured = RankMeasurements(
        num_ranks=2,
        threads_per_rank=1,
        device_name="",
        versions={},
        model_step_seconds=steps,
        **times(),  # type: ignore[arg-type]
    )
    found = rank_profile(measured, device)
    assert found.launch_seconds == pytest.approx(launch, abs=2e-7)
    assert found.hook_seconds == pytest.approx(dict.fromkeys(("fsdp1", "fsdp2"), hook), abs=2e-5)
    assert found.matmul == known.ranks[0].matmul


def test_a_hosts_step_over_what_it_launches_is_its_time_for_an_operator() -> None:
    """Kernels take no time, so that a step takes the host's time for each of them; hooks take what is left."""
    setup = TrainSetup(api=Api.FSDP2, strategy=ShardingStrategy.NO_SHARD, world_size=1, optimizer=OptimizerKind.SGD,
                       sequence_length=HOST_SEQUENCE_LENGTH)  # fmt: skip
    sharded = msgspec.structs.replace(setup, strategy=ShardingStrategy.FULL_SHARD, world_size=2)
    launched, hooks = (
        sum(event.kind in kinds for event in SimulatedSteps(HOST_MODEL, one, CUDA).step().last_step())
        for one, kinds in ((setup, (Kind.KERNEL, Kind.COPY)), (sharded, (Kind.HOST_WORK,)))
    )
    steps = {"none": launched * 1e-5, "fsdp1": 0.1, "fsdp2": 1.0}
    measured = RankMeasurements(
        num_ranks=1, threads_per_rank=1, device_name="", versions={}, model_step_seconds=steps
    )  # fmt: skip
    found = rank_profile(measured, "cuda", HOST_MODEL, HOST_SEQUENCE_LENGTH)
    assert found.launch_seconds == pytest.approx(1e-5, rel=1e-6)
    assert found.hook_seconds["fsdp2"] == pytest.approx(1.0 / hooks, rel=1e-2)


def test_the_nearest_number_of_ranks_is_taken() -> None:
    two = profile().ranks[0]
    both = msgspec.structs.replace(profile(), ranks=(two, msgspec.structs.replace(two, num_ranks=4)))
    assert [both.for_ranks(count).num_ranks for count in (1, 2, 3, 4, 64)] == [2, 2, 2, 4, 4]
    assert math.isfinite(two.launch_seconds)
