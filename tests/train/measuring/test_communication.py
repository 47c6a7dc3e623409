"""Communication: intervals, kinds, bytes. Expected figures are computed by hand in each test."""

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from fsdp_bench.spec.model import Family
from fsdp_bench.spec.setup import Api, Checkpointing, Precision, TrainSetup
from fsdp_bench.train.measuring.communication import (
    CollectiveCounter,
    Interval,
    ProfilerEvent,
    build_reading,
    length,
    measure_communication,
    split_gloo,
    split_kernels,
    union,
)
from fsdp_bench.train.models.transformer import batches
from fsdp_bench.train.step import train_step
from tests.train.ranks import call_standing_ranks
from tests.train.training import CPU, LLAMA, S, setup_of, training_of

intervals = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)).map(lambda p: (float(p[0]), float(p[0] + p[1]))))


@given(intervals, intervals)
def test_exposed_is_the_time_that_no_compute_covers(collectives: list[Interval], compute: list[Interval]) -> None:
    reading = build_reading(1.0, ({"all_gather": collectives}, compute, {}), CollectiveCounter())
    half_units = [i / 2 + 0.25 for i in range(142)]  # all ends are integers, so sampling is exact
    running = [t for t in half_units if any(a <= t <= b for a, b in collectives)]
    exposed = [t for t in running if not any(a <= t <= b for a, b in compute)]
    assert reading.total_seconds == pytest.approx(len(running) / 2)
    assert reading.exposed_seconds == pytest.approx(len(exposed) / 2)
    assert reading.exposed_seconds <= reading.total_seconds


def test_ncclkernels_are_collectives_and_other_kernels_are_compute() -> None:
    def kernel(name: str, start: float, end: float) -> ProfilerEvent:
        return ProfilerEvent(name, start, end, thread=7, on_device=True)

    split = split_kernels(
        [
            kernel("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 0, 1),
            kernel("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 2, 4),
            kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 5, 6),
            kernel("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 6, 7),
            kernel("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", 0.5, 3),
            kernel("nccl:_all_gather_base", 0, 1),
            ProfilerEvent("c10d::_allgather_base_", 0, 9, thread=1, on_device=False),
            kernel("Memcpy HtoD (Pinned -> Device)", 1, 3),
            kernel("Memcpy HtoD (Pageable -> Device)", 2, 4),
            kernel("Memcpy DtoH (Device -> Pageable)", 8, 9),
            kernel("Memcpy DtoD (Device -> Device)", 9, 10),
            ProfilerEvent("Memcpy HtoD", 0, 1, thread=1, on_device=False),
        ]
    )
    collectives, compute, copies = split
    assert dict(collectives) == {
        "all_gather": [(0, 1)],
        "reduce_scatter": [(2, 4)],
        "all_reduce": [(5, 6)],
        "other": [(6, 7)],
    }
    assert compute == [(0.5, 3), (9, 10)]
    assert dict(copies) == {"copy_to_device": [(1, 3), (2, 4)], "copy_to_host": [(8, 9)]}
    reading = build_reading(9.0, split, CollectiveCounter())
    seconds = {kind.kind: kind.seconds for kind in reading.collectives}
    assert (seconds["copy_to_device"], seconds["copy_to_host"]) == (3, 1)
    assert reading.total_seconds == 5  # copies are not communication
    assert reading.exposed_seconds == 0.5 + 1 + 1 + 1
    assert length(union(compute)) == 2.5 + 1


def test_a_gloo_operation_belongs_to_the_collective_that_was_issued_first() -> None:
    def issue(name: str, start: float) -> ProfilerEvent:
        return ProfilerEvent(name, start, start + 0.1, thread=1, on_device=False)

    def runs(name: str, start: float, end: float) -> ProfilerEvent:
        return ProfilerEvent(name, start, end, thread=2, on_device=False)

    collectives, compute, _ = split_gloo(
        [
            issue("c10d::_reduce_scatter_base_", 0),
            issue("c10d::allreduce_", 1),
            runs("gloo:all_reduce", 0.5, 2),
            runs("gloo:all_reduce", 2, 3),
            ProfilerEvent("aten::mm", 1.5, 2.5, thread=1, on_device=False),
            ProfilerEvent("aten::add_", 0.6, 0.7, thread=2, on_device=False),  # gloo's own sum
        ]
    )
    assert dict(collectives) == {"reduce_scatter": [(0.5, 2)], "all_reduce": [(2, 3)]}
    assert compute == [(1.5, 2.5)]


BLOCK = LLAMA.num_block_parameters
ROOT = LLAMA.num_root_parameters
TOTAL = LLAMA.num_parameters
BLOCKS = LLAMA.num_hidden_layers
PADDED_ROWS = 2 * LLAMA.hidden_size
"""Elements by which FSDP2 pads the root on two or four ranks: the 67 rows of embedding and head become 68.

FSDP1 pads each unit's flat parameter to a multiple of the ranks, and each parameter in it to 16 bytes: every parameter
here has a multiple of 4 elements, so nothing is added. FSDP2 pads each parameter's rows to a multiple of the ranks: 36,
12 and 50 are multiples of 2, and 67 is not.
"""

Counts = dict[str, tuple[int, int]]
"""Calls and bytes by kind of collective."""


def sharded(api: Api, gathers: int, reductions: int = 1, itemsize: int = 4, skipped: int = 0) -> Counts:
    """Return what is sent if blocks are gathered so often, the root once, and all gradients reduced in fp32.

    ``skipped`` elements are added to each unit.
    """
    block, root = BLOCK + skipped, ROOT + skipped + (PADDED_ROWS if api is Api.FSDP2 else 0)
    return {
        "all_gather": (gathers * BLOCKS + 1, itemsize * (gathers * BLOCKS * block + root)),
        "reduce_scatter": (reductions * (BLOCKS + 1), reductions * 4 * (BLOCKS * block + root)),
    }


def hybrid(api: Api, gathers: int) -> Counts:
    """Groups of two gather and reduce as two ranks do; then the shard, a half, is reduced between the groups."""
    counts = sharded(api, gathers)
    calls, num_bytes = counts["reduce_scatter"]
    return {**counts, "all_reduce": (calls, num_bytes // 2)}


def of_both_apis() -> dict[str, tuple[TrainSetup, Counts]]:
    """Return setups and what a step of them sends, computed by hand."""
    found: dict[str, tuple[TrainSetup, Counts]] = {}
    full, accumulated = {"checkpointing": Checkpointing.FULL}, {"gradient_accumulation_steps": 2}
    no_sync = {**accumulated, "sync_every_micro_batch": False}
    for api in Api:
        # With full checkpointing too: checkpoint(FSDP(block)) would gather each block once more, to recompute it.
        for name, more in (("", {}), (" full", full)):
            found[f"{api.value} FULL_SHARD{name}"] = setup_of(2, api=api, **more), sharded(api, gathers=2)
            zero2 = setup_of(2, api=api, strategy=S.SHARD_GRAD_OP, **more)
            found[f"{api.value} SHARD_GRAD_OP{name}"] = zero2, sharded(api, gathers=1)
        # FSDP1 reduces once a unit; DDP in buckets of 1 and 25 MiB (torch's defaults), which this model fills once.
        calls = BLOCKS + 1 if api is Api.FSDP1 else 1
        unsharded = setup_of(2, api=api, strategy=S.NO_SHARD)
        found[f"{api.value} NO_SHARD"] = unsharded, {"all_reduce": (calls, 4 * TOTAL)}
        # FSDP1 starts each parameter of a unit at 16 bytes of the compute dtype: at 8 elements of bf16. After each of a
        # block's norms (36 elements) 4 are skipped, and in the root after the embedding (2412) and the norm.
        in_bf16 = sharded(api, gathers=2, itemsize=2, skipped=8 if api is Api.FSDP1 else 0)
        found[f"{api.value} bf16"] = setup_of(2, api=api, precision=Precision.parse("bf16-mixed")), in_bf16
        # Reduced in every micro-batch, and without synchronisation in the last; what is gathered is not compared.
        for name, more, reductions in (("accumulated", accumulated, 2), ("no_sync", no_sync, 1)):
            counts = sharded(api, gathers=2, reductions=reductions)
            del counts["all_gather"]
            found[f"{api.value} {name}"] = setup_of(2, api=api, **more), counts
        for strategy, gathers in ((S.HYBRID_SHARD, 2), (S.HYBRID_SHARD_ZERO2, 1)):
            found[f"{api.value} {strategy.value}"] = setup_of(4, api=api, strategy=strategy), hybrid(api, gathers)
    return found


COUNTED = of_both_apis()


def count(setup: TrainSetup) -> Counts:
    """Return calls and bytes by kind of one step."""
    training = training_of(Family.LLAMA, setup)
    *first, last = batches(setup, LLAMA.vocab_size, 3, dist.get_rank(), setup.world_size)
    for micro_batches in first:  # DDP agrees on its buckets in the second step
        train_step(training, micro_batches)
    with CollectiveCounter() as counter:
        train_step(training, last)
    return {kind: (counter.calls[kind], counter.message_bytes[kind]) for kind in counter.calls}


@pytest.mark.parametrize("name", COUNTED)
def test_every_rank_sends_what_its_strategy_says(name: str) -> None:
    setup, expected = COUNTED[name]
    for counts in call_standing_ranks(setup.world_size, count, setup):
        is_whole = setup.gradient_accumulation_steps == 1
        assert expected == (counts if is_whole else {"reduce_scatter": counts["reduce_scatter"]})


def measure_cases(cases: dict[str, TrainSetup]) -> dict[str, object]:
    readings = {}
    for name, setup in cases.items():
        training = training_of(Family.LLAMA, setup)
        data = batches(setup, LLAMA.vocab_size, 6, dist.get_rank(), setup.world_size)
        for _ in range(2):
            train_step(training, next(data))
        readings[name] = measure_communication(lambda t=training, d=data: train_step(t, next(d)), CPU, 2)
    return readings


def test_a_profiled_step_finds_every_collective_that_was_counted() -> None:
    cases = {name: COUNTED[name][0] for name in ("fsdp1 FULL_SHARD", "fsdp2 FULL_SHARD", "fsdp2 NO_SHARD")}
    for rank in call_standing_ranks(2, measure_cases, cases):
        for name, readings in rank.items():
            assert len(readings) == 2
            for reading in readings:
                assert 0 < reading.exposed_seconds <= reading.total_seconds <= reading.step_seconds
                kinds = {found.kind for found in reading.collectives}
                assert kinds == ({"all_reduce"} if "NO_SHARD" in name else {"all_gather", "reduce_scatter"})
                assert all((found.seconds or 0) > 0 and found.calls > 0 for found in reading.collectives)
