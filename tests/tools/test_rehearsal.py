"""Predictions against rehearsals of drawn setups."""

from __future__ import annotations

from fsdp_bench.spec.rank_report import MemoryReading, Outcome, RankReport
from fsdp_bench.sweep.run.rehearsed import rehearsed_gpu
from fsdp_bench.validate.memory import MemoryComparison
from tests.trial_records import record_with
from tools.validate import rehearsal
from tools.validate.rehearsal import compare_with_rehearsal


def compared(outcome: Outcome, memory: MemoryReading | None = None) -> MemoryComparison:
    """Compare a drawn setup with a rehearsal that ended like this."""
    (cell,) = rehearsal._draw(1, 3)
    rank = RankReport(rank=0, outcome=outcome, memory=memory)
    return compare_with_rehearsal(
        cell, record_with(outcome=outcome, reason="a reason", ranks=(rank,)), rehearsed_gpu("H200")
    )


def test_drawn_cells_have_no_gradient_scaler_and_are_rank_0() -> None:
    cells = rehearsal._draw(40, 3)
    assert len(set(cells)) == 40
    assert not any(cell.setup.precision.needs_grad_scaler or cell.rank for cell in cells)


def test_trials_that_did_not_end_ok_are_counted_and_not_compared() -> None:
    assert compared(Outcome.CRASHED).error == "the trial ended crashed: a reason"
    ran_out = compared(Outcome.OOM_GPU)
    assert (ran_out.error, ran_out.phases) == (None, {})
    assert (ran_out.fit.predicted, ran_out.fit.measured) == (True, False)


def test_the_peak_is_that_of_all_steps() -> None:
    """Phases are read in the first steps; a later step may allocate more."""
    memory = MemoryReading(
        peak_allocated_bytes=2**40, peak_phase="unknown", phases={"forward": 2**30}, peak_reserved_bytes=2**41
    )
    assert compared(Outcome.OK, memory).peak.reference_bytes == 2**40
