"""Communication: intervals, kinds, bytes. Expected figures are computed by hand in each test."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_bench.spec.setup import Api, Checkpointing, Precision, ShardingStrategy, TrainSetup
from fsdp_bench.train.communication import Interval, Span, build_reading, length, split_spans, union
from tests.train.ranks import run_ranks
from tests.train.test_equivalence import LLAMA, setup_of

intervals = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)).map(lambda p: (float(p[0]), float(p[0] + p[1]))))


@given(intervals)
def test_a_union_is_disjoint_ordered_and_covers_the_same_instants(given_intervals: list[Interval]) -> None:
    merged = union(given_intervals)
    assert all(first[1] < second[0] for first, second in pairwise(merged))
    for instant in [i + 0.5 for i in range(71)]:
        assert any(a <= instant <= b for a, b in merged) == any(a <= instant <= b for a, b in given_intervals)


@given(intervals, intervals)
def test_exposed_is_the_time_that_no_compute_covers(collectives: list[Interval], compute: list[Interval]) -> None:
    reading = build_reading(1.0, {"all_gather": collectives}, compute, {}, {})
    half_units = [i / 2 + 0.25 for i in range(142)]  # all ends are integers, so sampling is exact
    running = [t for t in half_units if any(a <= t <= b for a, b in collectives)]
    exposed = [t for t in running if not any(a <= t <= b for a, b in compute)]
    assert reading.total_seconds == pytest.approx(len(running) / 2)
    assert reading.exposed_seconds == pytest.approx(len(exposed) / 2)
    assert reading.exposed_seconds <= reading.total_seconds


def test_ncclkernels_are_collectives_and_other_kernels_are_compute() -> None:
    def kernel(name: str, start: float, end: float) -> Span:
        return Span(name, start, end, thread=7, on_device=True)

    collectives, compute = split_spans(
        [
            kernel("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 0, 1),
            kernel("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 2, 4),
            kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 5, 6),
            kernel("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 6, 7),
            kernel("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", 0.5, 3),
            kernel("Memcpy DtoH (Device -> Pageable)", 8, 9),
            kernel("nccl:_all_gather_base", 0, 1),
            Span("c10d::_allgather_base_", 0, 9, thread=1, on_device=False),
        ],
        cuda=True,
    )
    assert dict(collectives) == {
        "all_gather": [(0, 1)],
        "reduce_scatter": [(2, 4)],
        "all_reduce": [(5, 6)],
        "other": [(6, 7)],
    }
    assert compute == [(0.5, 3)]
    reading = build_reading(9.0, collectives, compute, {}, {})
    assert reading.total_seconds == 5
    assert reading.exposed_seconds == 0.5 + 1 + 1 + 1
    assert length(union(compute)) == 2.5


def test_a_gloo_operation_belongs_to_the_collective_that_was_issued_first() -> None:
    def issue(name: str, start: float) -> Span:
        return Span(name, start, start + 0.1, thread=1, on_device=False)

    def runs(name: str, start: float, end: float) -> Span:
        return Span(name, start, end, thread=2, on_device=False)

    collectives, compute = split_spans(
        [
            issue("c10d::_reduce_scatter_base_", 0),
            issue("c10d::allreduce_", 1),
            runs("gloo:all_reduce", 0.5, 2),
            runs("gloo:all_reduce", 2, 3),
            Span("aten::mm", 1.5, 2.5, thread=1, on_device=False),
            Span("aten::add_", 0.6, 0.7, thread=2, on_device=False),  # gloo's own sum
        ],
        cuda=False,
    )
    assert dict(collectives) == {"reduce_scatter": [(0.5, 2)], "all_reduce": [(2, 3)]}
    assert compute == [(1.5, 2.5)]


S = ShardingStrategy
BLOCK = LLAMA.num_block_parameters
ROOT = LLAMA.num_root_parameters
TOTAL = LLAMA.num_parameters
COUNTED: dict[str, TrainSetup] = {
    "fsdp1 FULL_SHARD": setup_of(2, api=Api.FSDP1),
    "fsdp1 FULL_SHARD full": setup_of(2, api=Api.FSDP1, checkpointing=Checkpointing.FULL),
    "fsdp2 FULL_SHARD full": setup_of(2, api=Api.FSDP2, checkpointing=Checkpointing.FULL),
    "fsdp1 SHARD_GRAD_OP": setup_of(2, api=Api.FSDP1, strategy=S.SHARD_GRAD_OP),
    "fsdp1 NO_SHARD": setup_of(2, api=Api.FSDP1, strategy=S.NO_SHARD),
    "fsdp2 NO_SHARD": setup_of(2, api=Api.FSDP2, strategy=S.NO_SHARD),
    "fsdp1 bf16": setup_of(2, api=Api.FSDP1, precision=Precision.parse("bf16-mixed")),
}


def count_cases(cases: dict[str, TrainSetup]) -> dict[str, dict[str, tuple[int, int]]]:
    """Return calls and bytes by kind of one step, for each case."""
    import warnings
    from functools import partial

    import torch

    from fsdp_bench.train.communication import CollectiveCounter
    from fsdp_bench.train.data import batches
    from fsdp_bench.train.loss import plain
    from fsdp_bench.train.meters import CpuMeter
    from fsdp_bench.train.optimizer import build_optimizer
    from fsdp_bench.train.step import Training, train_step
    from fsdp_bench.train.transformer import LlamaBlock, build, initialize
    from fsdp_bench.train.wrap import ShardsNothingWarning, fsdp

    warnings.simplefilter("ignore", ShardsNothingWarning)
    cpu = torch.device("cpu")
    counted = {}
    for name, setup in cases.items():
        model = fsdp(
            build(LLAMA), setup=setup, TransformerBlock=LlamaBlock, device=cpu, initialize=partial(initialize, seed=0)
        )
        optimizer = build_optimizer(model.parameters(), setup.optimizer, 1e-3)
        training = Training(model, optimizer, plain, setup, cpu, CpuMeter(None, compiled=True))
        *first, last = batches(setup, LLAMA.vocab_size, 3, torch.distributed.get_rank(), 2)
        for micro_batches in first:  # DDP agrees on its buckets in the second step
            train_step(training, micro_batches)
        with CollectiveCounter() as counter:
            train_step(training, last)
        counted[name] = {kind: (counter.calls[kind], counter.message_bytes[kind]) for kind in counter.calls}
    return counted


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, tuple[int, int]]]:
    first, second = run_ranks(2, Path(tmp_path_factory.mktemp("ranks")), count_cases, COUNTED)
    assert first == second
    return first


def nearly(expected_bytes: int) -> object:
    """Bytes up to padding: each flat parameter is padded to the world, DTensors are on dimension 0."""
    return pytest.approx(expected_bytes, rel=0.03)


def test_full_shard_gathers_blocks_twice_the_root_once_and_reduces_everything_once(
    counted: dict[str, dict[str, tuple[int, int]]],
) -> None:
    kinds = counted["fsdp1 FULL_SHARD"]
    assert kinds["all_gather"] == (2 * 2 + 1, nearly(4 * (2 * 2 * BLOCK + ROOT)))
    assert kinds["reduce_scatter"] == (2 + 1, nearly(4 * TOTAL))
    assert set(kinds) == {"all_gather", "reduce_scatter"}


@pytest.mark.parametrize("api", ["fsdp1", "fsdp2"])
def test_full_checkpointing_does_not_gather_a_block_a_third_time(
    api: str, counted: dict[str, dict[str, tuple[int, int]]]
) -> None:
    """checkpoint(FSDP(block)) would: the recomputation would gather what backward has gathered already."""
    assert counted[f"{api} FULL_SHARD full"]["all_gather"][0] == 2 * 2 + 1


def test_shard_grad_op_gathers_everything_once(counted: dict[str, dict[str, tuple[int, int]]]) -> None:
    assert counted["fsdp1 SHARD_GRAD_OP"]["all_gather"] == (3, nearly(4 * TOTAL))
    assert counted["fsdp1 SHARD_GRAD_OP"]["reduce_scatter"] == (3, nearly(4 * TOTAL))


@pytest.mark.parametrize("api", ["fsdp1", "fsdp2"])
def test_no_shard_only_reduces_gradients(api: str, counted: dict[str, dict[str, tuple[int, int]]]) -> None:
    kinds = counted[f"{api} NO_SHARD"]
    assert set(kinds) == {"all_reduce"}
    assert kinds["all_reduce"][1] == 4 * TOTAL


def test_bf16_mixed_gathers_two_bytes_and_reduces_four(counted: dict[str, dict[str, tuple[int, int]]]) -> None:
    kinds = counted["fsdp1 bf16"]
    assert kinds["all_gather"][1] == nearly(2 * (2 * 2 * BLOCK + ROOT))
    assert kinds["reduce_scatter"][1] == nearly(4 * TOTAL)
