"""Records: old ones stay readable, and what is computed on reading is computed right."""

import json
import statistics
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from fsdp_bench.spec.codec import from_json, to_json
from fsdp_bench.spec.rank_report import CollectiveReading, CommunicationReading, MemoryReading, Outcome, RankReport
from fsdp_bench.spec.record import SCHEMA_VERSION, TrialRecord, read_record
from fsdp_bench.spec.setup import Checkpointing

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("version", range(1, SCHEMA_VERSION + 1))
def test_a_record_of_every_version_is_read(version: int) -> None:
    """Each golden file was written by the fsdp-bench of its version, and is never written again."""
    path = GOLDEN / f"record-v{version}.json"
    raw = json.loads(path.read_text())
    assert raw["schema_version"] == version
    record = read_record(path.read_bytes(), path.name)
    assert record.id == raw["id"]
    assert record.outcome is Outcome.OK
    assert record.num_parameters == record.model.num_parameters == raw["num_parameters"]
    assert str(record.setup.precision) == raw["setup"]["precision"]
    per_rank = [rank["step_seconds"] for rank in raw["ranks"]]
    assert record.step_seconds == statistics.median(max(pair) for pair in zip(*per_rank, strict=True))
    peaks = [rank["memory"]["peak_allocated_bytes"] for rank in raw["ranks"]]
    assert record.worst_rank_memory.peak_allocated_bytes == max(peaks)
    assert from_json(to_json(record), TrialRecord) == record


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"{}", b'{"schema_version": 0}', b'{"schema_version": "1"}'])
def test_a_broken_record_is_not_taken_for_a_newer_one(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        read_record(data, "x.json")


def record_with(**fields: Any) -> TrialRecord:
    """Return the record that every version reads, with other fields."""
    return replace(read_record((GOLDEN / "record-v1.json").read_bytes(), "record-v1.json"), **fields)


def with_ranks(*ranks: RankReport) -> TrialRecord:
    return record_with(ranks=ranks, peak_flops_per_second=1e9)


def rank(number: int, seconds: tuple[float, ...], retries: int | None = None) -> RankReport:
    memory = MemoryReading(peak_allocated_bytes=1, peak_phase="loss", phases={"loss": 1}, num_alloc_retries=retries)
    communication = tuple(
        CommunicationReading(step_seconds=1.0, total_seconds=total, exposed_seconds=total / 2)
        for total in (0.1 * (number + 1), 0.3 * (number + 1), 0.2 * (number + 1))
    )
    report = RankReport(rank=number, outcome=Outcome.OK, step_seconds=seconds, losses=(5.0, 4.0 + number))
    return replace(report, memory=memory, communication=communication)


def test_a_step_takes_as_long_as_its_slowest_rank() -> None:
    record = with_ranks(rank(0, (1.0, 2.0, 9.0)), rank(1, (3.0, 1.0, 1.0)))
    assert record.step_seconds == 3.0  # the median of 3, 2, 9
    assert record.tokens_per_second_per_gpu == 16 / 3.0
    assert record.final_loss == 4.5


def test_mfu_leaves_recomputation_out_and_hfu_does_not() -> None:
    record = with_ranks(rank(0, (2.0,)))
    model, tokens = record.model, 16 / 2.0
    assert record.mfu == pytest.approx(tokens * model.model_flops_per_token(16) / 1e9)
    assert record.hfu == record.mfu
    full = replace(record, setup=replace(record.setup, checkpointing=Checkpointing.FULL))
    down = 2 * model.intermediate_size * model.hidden_size  # not recomputed
    blocks = model.num_hidden_layers * (model.block_forward_flops_per_token(16) - down)
    assert full.mfu == record.mfu
    assert replace(record, peak_flops_per_second=None).mfu is None
    assert full.hfu == pytest.approx(record.mfu + tokens * blocks / 1e9)


def test_communication_is_the_median_over_steps_of_the_rank_with_the_most() -> None:
    record = with_ranks(rank(0, (1.0,)), rank(1, (1.0,)))
    assert record.communication_seconds == pytest.approx(0.4)
    assert record.exposed_communication_seconds == pytest.approx(0.2)


def test_one_retry_on_one_rank_means_that_it_does_not_fit() -> None:
    assert with_ranks(rank(0, (1.0,), retries=0), rank(1, (1.0,), retries=0)).fits
    assert with_ranks(rank(0, (1.0,)), rank(1, (1.0,))).fits  # a CPU counts none
    assert not with_ranks(rank(0, (1.0,), retries=0), rank(1, (1.0,), retries=1)).fits
    assert not replace(with_ranks(rank(0, (1.0,))), outcome=Outcome.OOM_GPU).fits


def test_a_trial_without_measurements_has_none() -> None:
    record = with_ranks()
    assert record.step_seconds is record.mfu is record.hfu is record.final_loss is record.worst_rank_memory is None
    assert record.communication_seconds is None


@pytest.mark.parametrize(
    ("kind", "group_size", "bus"),
    [  # nccl-tests, doc/PERFORMANCE.md; 12 GB in 2 s are 6 GB/s
        ("all_gather", 8, 6e9 * 7 / 8),
        ("reduce_scatter", 4, 6e9 * 3 / 4),
        ("all_reduce", 8, 6e9 * 2 * 7 / 8),
        ("all_reduce", 2, 6e9),
        ("broadcast", 8, 6e9),
        ("copy_to_host", None, 6e9),
        ("all_gather", None, None),
        ("other", 8, None),
    ],
)
def test_bus_bandwidth_is_what_nccl_tests_call_busbw(kind: str, group_size: int | None, bus: float | None) -> None:
    reading = CollectiveReading(kind=kind, calls=3, message_bytes=12 * 10**9, seconds=2.0, group_size=group_size)
    assert reading.algorithm_bandwidth == 6e9
    assert reading.bus_bandwidth == (None if bus is None else pytest.approx(bus))
    assert replace(reading, seconds=None).bus_bandwidth is None


def test_exposed_communication_by_difference_is_of_the_slowest_ranks_medians() -> None:
    """Steps: 3, 5, 4 s on the slowest rank; without communication 2, 4, 3. By the profiler 4 s of 8 are exposed."""
    profiled = CommunicationReading(step_seconds=8.0, total_seconds=5.0, exposed_seconds=4.0)
    ranks = [
        replace(rank(number, steps), communication=(profiled,), seconds_without_communication=silent)
        for number, steps, silent in ((0, (3.0, 1.0, 4.0), (2.0, 4.0, 1.0)), (1, (2.0, 5.0, 4.0), (1.0, 1.0, 3.0)))
    ]
    measured = with_ranks(*ranks)
    assert (measured.step_seconds, measured.seconds_without_communication) == (4.0, 3.0)
    assert measured.exposed_by_difference_seconds == 1.0
    assert measured.exposed_fractions == (0.5, 0.25)
    assert measured.exposed_disagreement == 0.25
    unknown = with_ranks(*(replace(each, seconds_without_communication=()) for each in ranks))
    assert (unknown.exposed_by_difference_seconds, unknown.exposed_disagreement) == (None, None)
