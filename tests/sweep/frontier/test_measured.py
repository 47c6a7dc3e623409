"""The frontier that was measured on two cores, results/xeon-2-cores/max-size-quick, against predictions."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_bench.simulate.operators.kernels import CPU_GLOO
from fsdp_bench.spec.frontier import FrontierRecord, read_frontier
from fsdp_bench.spec.rank_report import Outcome
from fsdp_bench.sweep.results.load import read_records
from tests.predicted import memory_of

FOLDER = Path(__file__).parents[3] / "results" / "xeon-2-cores" / "max-size-quick"


@pytest.fixture(scope="module")
def measured() -> FrontierRecord:
    return read_frontier((FOLDER / "frontier.json").read_bytes(), "frontier.json")


def test_predicted_and_measured_are_the_same_step_in_9_of_10_cells_and_never_more_than_one_apart(
    measured: FrontierRecord,
) -> None:
    apart = [cell.steps_apart for cell in measured.cells if cell.status != "skipped"]
    assert len(apart) >= 30
    assert None not in apart
    assert apart.count(0) >= 0.9 * len(apart)
    assert {abs(steps or 0) for steps in apart} <= {0, 1}


def test_no_cell_took_more_than_4_trials(measured: FrontierRecord) -> None:
    assert max(len(cell.trials) for cell in measured.cells) <= 4


def test_todays_prediction_tells_of_every_trial_whether_it_ran_out() -> None:
    records = read_records(FOLDER)
    assert {record.outcome for record in records} == {Outcome.OK, Outcome.OOM_HOST}
    for record in records:
        predicted = memory_of(record.model, record.setup, CPU_GLOO).peak_allocated_bytes
        fits = predicted <= (record.run.memory_limit_bytes or 0)
        assert fits == (record.outcome is Outcome.OK), f"{record.id}: predicted {predicted}, {record.outcome}"
