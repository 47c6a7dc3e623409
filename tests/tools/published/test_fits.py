"""Whether published runs fit: three answers, counted apart, for runs whose outcome is published."""

from __future__ import annotations

import msgspec
import pytest

from fsdp_bench.plan.estimate import Verdict
from fsdp_bench.replay.caching_allocator.replay import AllocatorReading, OutOfMemory
from fsdp_bench.spec.units import GIB
from tools.validate.published.cases import PublishedCase
from tools.validate.published.fits import FitRow, compare_fits, fit_of, format_fits


def _reading(retries: int, out_of_memory: OutOfMemory | None = None) -> AllocatorReading:
    return AllocatorReading(
        peak_allocated_bytes=1,
        phases={},
        peak_active_bytes=1,
        peak_reserved_bytes=1,
        num_alloc_retries=retries,
        out_of_memory=out_of_memory,
        full_in_phase=None,
    )


def test_retries_are_an_answer_of_their_own() -> None:
    assert fit_of(_reading(0)) is Verdict.FITS
    assert fit_of(_reading(3)) is Verdict.RUNS_WITH_RETRIES
    assert (
        fit_of(_reading(3, OutOfMemory(phase="forward", block=0, label="aten::mm", num_bytes=1)))
        is Verdict.DOES_NOT_FIT
    )


@pytest.mark.parametrize(
    "case",
    [
        "mpt_1b_a100_40gb_32g_s2048_mb10",
        "mpt_30b_h100_80gb_8g_s4096_mb1_ac",
        "mpt_3b_h100_80gb_8g_s8192_mb3",
        "mpt_3b_a100_80gb_8g_s8192_mb3",
        "ibm_7b_H100_compile-no",
    ],
)
def test_runs_that_fill_most_of_their_gpu_run_without_retries_after_the_first_steps(
    cases: dict[str, PublishedCase], case: str
) -> None:
    (row,) = compare_fits([cases[case]])
    assert row.ran
    assert row.predicted is not Verdict.DOES_NOT_FIT
    assert row.num_retries_later == 0


def test_a_run_on_a_gpu_that_is_too_small_does_not_fit(cases: dict[str, PublishedCase]) -> None:
    """36 GiB of the 40 GB GPU with 6 sequences: three times as many activations are more than it has."""
    case = cases["mpt_3b_a100_40gb_32g_s2048_mb6"]
    inputs = msgspec.structs.replace(case.inputs, micro_batch_size=18)
    (row,) = compare_fits([msgspec.structs.replace(case, inputs=inputs)])
    assert row.predicted is Verdict.DOES_NOT_FIT


def test_every_outcome_is_compared_or_left_out_with_a_reason(cases: dict[str, PublishedCase]) -> None:
    some = [case for case in cases.values() if case.inputs.family in ("lessw2020-g5", "torchtune", "vectorlm")]
    rows = compare_fits(some)
    assert len(rows) == len(some) == 7 + 9 + 9
    assert all(row.predicted is None and row.reason for row in rows)
    assert [row.case for row in rows if not row.ran] == ["less_2b_bs24"]  # the one that is published as out of memory


def test_the_text_counts_retries_that_ran_on_a_line_of_their_own() -> None:
    def row(name: str, predicted: Verdict, ran: bool = True, compiled: bool = False) -> FitRow:
        return FitRow(
            case=name,
            source="s",
            compiled=compiled,
            ran=ran,
            predicted=predicted,
            reserved_bytes=30 * GIB,
            gpu_bytes=40 * GIB,
            num_alloc_retries=5 if predicted is Verdict.RUNS_WITH_RETRIES else 0,
            num_retries_later=2 if predicted is Verdict.RUNS_WITH_RETRIES else 0,
        )

    rows = [
        row("a", Verdict.FITS),
        row("b", Verdict.RUNS_WITH_RETRIES),
        row("c", Verdict.RUNS_WITH_RETRIES, compiled=True),
        row("d", Verdict.DOES_NOT_FIT, ran=False),
        FitRow(case="e", source="s", compiled=False, ran=True, reason="not modelled"),
    ]
    text = format_fits(rows)
    counts = [line for line in text.splitlines() if line.endswith(("0", "1"))]
    lines = {line.rsplit(None, 3)[0].strip(): line.split()[-3:] for line in counts}
    assert lines["fits"] == ["1", "0", "0"]
    assert lines["runs with retries"] == ["1", "1", "0"]
    assert lines["does not fit"] == ["0", "0", "1"]
    words = " ".join(text.split())
    assert "b (ran): runs with retries: 5 allocation retries in the first 4 steps, up to 2 in each later one" in words
    assert "30.0 GiB of 40.0 GiB reserved at most" in words
    assert "d (" not in text
    assert "5 published outcomes, 4 compared" in text
    assert "  1  not modelled: e" in text
