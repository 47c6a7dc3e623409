"""The columns of trials.csv, with expectations written by hand from the golden record's own JSON."""

import csv
import json
from pathlib import Path

from fsdp_bench.spec.rank_report import MemoryReading, Outcome, RankReport
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.spec.setup import Loss, TrainSetup
from fsdp_bench.sweep.results.flat import flat_row
from tests.spec.test_record import record_with

RESULTS = Path(__file__).parents[3] / "results"


def record_of(*ranks: RankReport) -> TrialRecord:
    return record_with(setup=TrainSetup(loss=Loss.CHUNKED), ranks=ranks)


def rank(number: int, allocated: int, reserved: int | None, retries: int | None, phase: str = "loss") -> RankReport:
    memory = MemoryReading(
        peak_allocated_bytes=allocated,
        peak_phase=phase,
        phases={phase: allocated},
        peak_reserved_bytes=reserved,
        num_alloc_retries=retries,
    )
    return RankReport(rank=number, outcome=Outcome.OK, memory=memory, losses=(5.0, 4.0 + number))


def test_peaks_and_retries_are_the_worst_of_all_ranks_and_say_whose_and_the_loss_is_not_the_setups() -> None:
    row = flat_row(record_of(rank(0, 900, 1000, 0, "loss"), rank(1, 800, 3000, 2, "backward")))
    assert (row["loss"], row["final_loss"]) == ("chunked", 4.5)  # the mean of 4 and 5
    assert (row["peak_allocated_bytes"], row["peak_allocated_rank"], row["peak_phase"]) == (900, 0, "loss")
    assert (row["peak_reserved_bytes"], row["peak_reserved_rank"]) == (3000, 1)
    assert (row["num_alloc_retries"], row["num_alloc_retries_rank"]) == (2, 1)
    assert row["fits"] is False


def test_what_no_rank_measured_stays_unknown() -> None:
    row = flat_row(record_of(rank(0, 900, None, None)))
    assert row["peak_reserved_bytes"] is row["peak_reserved_rank"] is row["num_alloc_retries"] is None
    nothing = flat_row(record_of())
    assert nothing["peak_allocated_bytes"] is nothing["peak_phase"] is nothing["final_loss"] is None


def test_the_committed_tables_say_what_their_records_say() -> None:
    """Of every committed trials.csv: the setup's loss, and the peaks, as the records' own JSON has them."""
    tables = sorted(RESULTS.glob("*/*/trials.csv"))
    assert tables
    for path in tables:
        with open(path, newline="") as file:
            rows = {row["id"]: row for row in csv.DictReader(file)}
        records = [json.loads(each.read_bytes()) for each in sorted((path.parent / "trials").glob("*.json"))]
        assert rows.keys() == {each["id"] for each in records}, path
        for raw in records:
            row = rows[raw["id"]]
            assert row["loss"] == raw["setup"]["loss"]
            known = [one["memory"]["peak_allocated_bytes"] for one in raw["ranks"] if one.get("memory")]
            assert row["peak_allocated_bytes"] == str(max((size for size in known if size is not None), default=""))
