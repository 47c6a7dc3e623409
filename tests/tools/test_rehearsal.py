"""Predictions against rehearsals of drawn setups."""

from __future__ import annotations

from fsdp_bench.spec.rank_report import Failure, MemoryReading, Outcome, RankReport
from fsdp_bench.sweep.run.rehearsed import rehearsed_gpu
from tools.validate import rehearsal
from tools.validate.rehearsal import compare_with_rehearsal

GPU = rehearsed_gpu("H200")


def test_drawn_cells_have_no_gradient_scaler_and_are_rank_0() -> None:
    cells = rehearsal._draw(40, 3)
    assert len(set(cells)) == 40
    assert not any(cell.setup.precision.needs_grad_scaler or cell.rank for cell in cells)


def test_trials_that_did_not_end_ok_are_counted_and_not_compared() -> None:
    (cell,) = rehearsal._draw(1, 3)
    failure = Failure(message="no such thing", phase="forward", at=0.0)
    crashed = compare_with_rehearsal(cell, RankReport(rank=0, outcome=Outcome.CRASHED, failure=failure), GPU)
    assert crashed.error == "the trial ended crashed: no such thing"
    ran_out = compare_with_rehearsal(cell, RankReport(rank=0, outcome=Outcome.OOM_GPU, failure=failure), GPU)
    assert (ran_out.error, ran_out.phases) == (None, {})
    assert (ran_out.fit.predicted, ran_out.fit.measured) == (True, False)


def test_the_peak_is_that_of_all_steps() -> None:
    """Phases are read in the first steps; a later step may allocate more."""
    (cell,) = rehearsal._draw(1, 3)
    memory = MemoryReading(
        peak_allocated_bytes=2**40, peak_phase="unknown", phases={"forward": 2**30}, peak_reserved_bytes=2**41
    )
    found = compare_with_rehearsal(cell, RankReport(rank=0, outcome=Outcome.OK, memory=memory), GPU)
    assert found.peak.reference_bytes == 2**40
