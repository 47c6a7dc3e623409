"""``python -m tools.validate``: options that would be ignored are refused in one line, and what it prints."""

import json
from functools import partial
from itertools import islice
from pathlib import Path

import pytest

from fsdp_bench.spec.rank_report import MemoryReading, Outcome, RankReport
from fsdp_bench.sweep.run.rehearsed import rehearsed_gpu
from fsdp_bench.validate.memory import MemoryComparison
from tests.conftest import run_command
from tests.spec.test_record import record_with
from tools.validate.__main__ import main
from tools.validate.published import cases as published_cases
from tools.validate.rehearsal import compare_with_rehearsal, endless_rehearsable_cells

RECORDS = Path(__file__).parents[2] / "results" / "rehearsed" / "published" / "records"
run_validate = partial(run_command, program=main)

SOME = (
    "pr165_FSDP1_full_eager",
    "ibm_7b_A100_compile-yes",
    "mpt_7b_a100_80gb_8g_s4096_mb16_ac",
    "mpt_7b_h100_80gb_8g_s2048_mb6",
    "less_2b_bs24",
)


@pytest.fixture
def _few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row for row in published_cases.packaged_rows() if row["id"] in SOME]
    monkeypatch.setattr(published_cases, "packaged_rows", lambda: rows)


@pytest.mark.usefixtures("_few_rows")
def test_the_json_document_has_every_row() -> None:
    found = json.loads(run_validate("--against", "published", "--json").stdout)
    assert {row["case"] for row in found["fits"]} == set(SOME)
    assert found["throughput"]["summary"]["num_rows"] == 4
    assert found["throughput"]["summary"]["num_left_out"] == 0
    assert set(found["throughput"]["summary"]["best_constant_mfu"]) == {"A100", "H100"}
    assert {row["case"] for row in found["memory"]} == set(SOME)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("published", "--cells", 3), "--cells means nothing with --against published; it goes with --against dry-run"),
        (("published", "--kernels", "cuda"), "--kernels means nothing"),
        (("rehearsal", "--real-tensors"), "--real-tensors means nothing with --against rehearsal; it goes with"),
        (
            ("dry-run", "--code", "torchtitan", "--kernels", "cpu"),
            "--kernels: is for benchmark models; --code torchtitan",
        ),
        (("dry-run", "--code", "huggingface", "--real-tensors"), "--real-tensors: is for benchmark models"),
        (("dry-run", "--kernels", "cuda", "--real-tensors"), "--real-tensors: run on the CPU"),
        (("dry-run", "--model-type", "llama"), "--model-type goes with --code huggingface or torchtitan"),
        (("rehearsal", "--model-type", "llama"), "--model-type goes with --code huggingface"),
        (("rehearsal", "--code", "torchtitan"), "'torchtitan' is not allowed with --against rehearsal"),
        (("published", "--code", "huggingface"), "--code means nothing with --against published"),
        (("published", "--chart", "x.png"), "it goes with --against published-sizes"),
        (
            ("dry-run", "--rehearsed", RECORDS),
            "--rehearsed means nothing with --against dry-run; it goes with --against published",
        ),
        (("published", "--rehearsed", RECORDS.parent), "has no records of rehearsals"),
        (("dry-run", "--cells", "x"), "cells: 'x' is not allowed; a whole number, 1 or more"),
    ],
)
def test_an_option_without_effect_is_refused_in_one_line(words: tuple[object, ...], part: str) -> None:
    done = run_validate("--against", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert part in done.stderr
    assert done.stderr.count("\n") == 1


def test_rehearsals_of_published_runs_are_compared_and_nothing_is_predicted() -> None:
    document = json.loads(run_validate("--against", "published", "--rehearsed", RECORDS, "--json").stdout)
    assert len(document["peaks"]) == sum(part["num_peaks"] for part in document["summary"].values()) == 35


def test_dry_runs_of_drawn_setups_are_as_predicted() -> None:
    found = json.loads(run_validate("--against", "dry-run", "--cells", 1, "--seed", 3, "--json").stdout)
    assert found["summary"]["num_cells"] == found["summary"]["num_equal"] == len(found["cells"]) == 1


@pytest.mark.slow
def test_the_published_chart_stands_beside_predictions_without_a_claim(tmp_path: Path) -> None:
    path = tmp_path / "published.png"
    done = run_validate("--against", "published-sizes", "--json", "--chart", path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert path.exists()
    published = {bar["strategy"]: bar["published"]["max_parameters"] for bar in found["bars"]}
    assert published == {"NO_SHARD": 750e6, "SHARD_GRAD_OP": 2e9, "FULL_SHARD": 2.5e9}
    assert {bar["micro_batch_size"] for bar in found["bars"]} == {15, 16, 18}
    assert "says nothing about accuracy" in found["claim"]
    assert {"precision", "sequence length", "activation checkpointing"} <= set(found["not_stated"])
    for bar in found["bars"]:
        for cell in bar["predicted"]:
            assert cell["memory"]["peak_reserved_bytes"] <= bar["published"]["reserved_bytes"]


def compared(outcome: Outcome, memory: MemoryReading | None = None) -> MemoryComparison:
    """Compare a drawn setup with a rehearsal that ended like this."""
    cell = next(endless_rehearsable_cells(3))
    rank = RankReport(rank=0, outcome=outcome, memory=memory)
    return compare_with_rehearsal(
        cell, record_with(outcome=outcome, reason="a reason", ranks=(rank,)), rehearsed_gpu("H200")
    )


def test_drawn_cells_have_no_gradient_scaler_and_are_rank_0() -> None:
    cells = list(islice(endless_rehearsable_cells(3), 40))
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
