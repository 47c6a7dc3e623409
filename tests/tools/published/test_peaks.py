"""Published peaks and outcomes: every row is accounted for, and predicted without its measured columns.

Expected numbers are those that the sources print, or worked out from shapes in the comment beside them.
"""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from fsdp_bench.plan.estimate import Verdict
from fsdp_bench.replay.caching_allocator.replay import AllocatorReading
from fsdp_bench.spec.units import GIB
from tools.validate.published import peaks as published
from tools.validate.published.cases import CaseInputs, PublishedCase, packaged_rows, read_cases
from tools.validate.published.peaks import (
    PREDICTED_KINDS,
    FitRow,
    PredictedPeaks,
    PublishedRow,
    compare_case,
    compare_fits,
    compare_published,
    format_fits,
    format_published,
    predict_case,
)
from tools.validate.published.setups import plan_case
from tools.validate.published.terms import Term

MEASURED_COLUMNS = (
    "peak_mem_as_printed",
    "peak_mem_gib",
    "second_mem_gib",
    "tokens_per_s_per_gpu",
    "step_time_s",
    "tflops_per_gpu",
    "mfu_pct",
    "hfu_pct",
    "max_model_params",
    "outcome",
)

H100_GIB = 95.0396
"""The memory that torchtitan prints for the GPU of PR 165, and of which its peaks are percentages."""


@pytest.fixture(scope="module")
def rows() -> list[PublishedRow]:
    return compare_published()


def test_every_row_and_peak_of_the_file_is_predicted_or_has_a_reason(rows: list[PublishedRow]) -> None:
    assert len(packaged_rows()) == 97
    assert {row.case for row in rows} == {row["id"] for row in packaged_rows()}
    assert all((row.predicted_bytes is None) != (row.reason is None) for row in rows)
    assert all(row.predicted_bytes is None for row in rows if row.kind == "unknown")
    printed = [
        (row["id"], kind) for row in packaged_rows() for kind in (row["peak_mem_kind"], row["second_mem_kind"]) if kind
    ]
    assert [(row.case, row.kind) for row in rows if row.kind] == printed


READING = AllocatorReading(
    peak_allocated_bytes=1,
    phases={},
    peak_active_bytes=2,
    peak_reserved_bytes=3,
    num_alloc_retries=0,
    out_of_memory=None,
    full_in_phase=None,
)


@pytest.mark.parametrize(
    ("case", "num_retries", "expected"),
    [  # a run of PR 165 prints active and reserved memory
        ("pr165_FSDP1_full_eager", 0, [("max_active", 2), ("max_reserved", 3)]),
        ("litgpt_tinyllama_ddp_eager", 0, [("max_allocated", 1)]),
        # Reserved memory that retries keep within the GPU is compared with nothing.
        ("pr165_FSDP1_full_eager", 4, [("max_active", 2), ("max_reserved", None)]),
    ],
)
def test_each_peak_is_compared_with_its_own_kind(
    case: str,
    num_retries: int,
    expected: list[tuple[str, int | None]],
    cases: dict[str, PublishedCase],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading = dataclasses.replace(READING, num_alloc_retries=num_retries)
    monkeypatch.setattr(published, "predict_case", lambda _plan: PredictedPeaks(reading, "forward", "aten::mm"))
    compared = compare_case(cases[case])
    assert [(row.kind, row.predicted_bytes) for row in compared] == expected
    assert num_retries == 0 or "retries" in (compared[-1].reason or "")


def test_blanking_the_measured_columns_changes_no_prediction(rows: list[PublishedRow]) -> None:
    def forged(row: dict[str, str]) -> dict[str, str]:
        blanked = {**row, **dict.fromkeys(MEASURED_COLUMNS, "")}
        return {**blanked, "peak_mem_gib": "1.0", "second_mem_gib": "1.0"}  # any number, so that there is a comparison

    some = ("pr165_FSDP1_full_eager", "litgpt_tinyllama_fsdp_eager", "tune_ladder_4")
    after = compare_published(read_cases([forged(row) for row in packaged_rows() if row["id"] in some]))
    before = {(row.case, row.kind): (row.predicted_bytes, row.with_terms_bytes) for row in rows}
    assert len(after) == 4
    for row in after:
        assert row.predicted_bytes is not None
        assert (row.predicted_bytes, row.with_terms_bytes) == before[row.case, row.kind]


def test_the_inputs_of_a_prediction_have_no_measured_field() -> None:
    words = ("measured", "peak", "tokens_per", "seconds", "flops", "mfu", "outcome")
    assert not [field for field in CaseInputs.__struct_fields__ if any(word in field for word in words)]


@pytest.mark.parametrize(
    ("case", "kind", "printed_gib"),
    [
        # torchtitan PR 165 prints percentages of the GPU.
        ("pr165_FSDP1_full_eager", "max_active", 0.2481 * H100_GIB),
        ("pr165_FSDP1_selective_op_eager", "max_active", 0.5298 * H100_GIB),
        ("pr165_FSDP2_full_eager", "max_active", 0.2392 * H100_GIB),
        ("pr165_FSDP2_selective_op_eager", "max_active", 0.5213 * H100_GIB),
        # torchtune's README prints GiB, litgpt's prints GB of 10^9 bytes.
        ("tune_ladder_1", "max_active", 60.0),
        ("litgpt_tinyllama_fsdp_eager", "max_allocated", 22.13e9 / GIB),
        ("litgpt_tinyllama_ddp_eager", "max_allocated", 32.04e9 / GIB),
        ("litgpt_tinyllama_1gpu_eager", "max_allocated", 29.84e9 / GIB),
    ],
)
def test_eager_live_bytes_are_met_once_the_frameworks_own_tensors_are_named(
    rows: list[PublishedRow], case: str, kind: str, printed_gib: float
) -> None:
    row = next(row for row in rows if (row.case, row.kind) == (case, kind))
    assert row.with_terms_bytes / GIB == pytest.approx(printed_gib, rel=0.002)


def test_selective_checkpointing_is_predicted_as_the_framework_does_it(rows: list[PublishedRow]) -> None:
    """It was 33 % too high while every product was kept: the terms left are 4TV + 4TD = 2.2 of 50.35 GiB."""
    row = next(row for row in rows if row.case == "pr165_FSDP1_selective_op_eager" and row.kind == "max_active")
    assert -0.05 < row.error < 0


def test_ddp_needs_its_buckets_more_than_the_bare_model(cases: dict[str, PublishedCase]) -> None:
    # litgpt prints 32.04 GB with DDP and 29.84 GB on one GPU: 2.2 GB, 2 bytes for each of 1,100,048,384 parameters.
    ddp = predict_case(plan_case(cases["litgpt_tinyllama_ddp_eager"].inputs)).reading.peak_allocated_bytes
    bare = predict_case(plan_case(cases["litgpt_tinyllama_1gpu_eager"].inputs)).reading.peak_allocated_bytes
    assert ddp - bare == pytest.approx(2 * 1100048384, rel=1e-3)


def test_terms_are_sizes_of_shapes(rows: list[PublishedRow]) -> None:
    row = next(row for row in rows if row.case == "pr165_FSDP2_selective_op_eager" and row.kind == "max_active")
    sizes = {term.formula: term.num_bytes for term in row.terms}
    tokens = 8 * 2048
    assert sizes["4TV"] == 4 * tokens * 32000
    assert sizes["1 x 4TD"] == 4 * tokens * 4096
    assert sizes["p x its parameters"] == 2 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096)


def test_terms_are_beside_the_prediction_and_never_in_it(rows: list[PublishedRow]) -> None:
    for row in rows:
        if row.with_terms_bytes is None:
            continue
        assert row.with_terms_bytes == row.predicted_bytes + sum(term.num_bytes or 0 for term in row.terms)
        assert not row.compiled
        assert row.kind != "max_reserved"


def test_compiled_code_has_a_term_without_size(rows: list[PublishedRow]) -> None:
    compiled = [row for row in rows if row.compiled and row.predicted_bytes is not None]
    assert compiled
    assert all(any("torch.compile" in term.name and term.num_bytes is None for term in row.terms) for row in compiled)


def test_a_case_that_does_not_fit_has_no_peak_and_a_reason(cases: dict[str, PublishedCase]) -> None:
    case = cases["pr165_FSDP2_compile_SAC_bs16"]
    larger = msgspec.structs.replace(case.inputs, micro_batch_size=32)
    (row,) = compare_case(msgspec.structs.replace(case, inputs=larger))
    assert row.predicted_bytes is None
    assert "not to fit" in (row.reason or "")


def test_the_table_names_every_predicted_case_every_term_and_counts_the_rest(rows: list[PublishedRow]) -> None:
    text = format_published(rows)
    predicted = [row for row in rows if row.predicted_bytes is not None]
    assert all(row.case in text for row in predicted)
    flat = " ".join(text.split())
    terms: list[Term] = [term for row in predicted for term in row.terms]
    assert all(term.name in flat for term in terms)
    for kind in PREDICTED_KINDS:
        assert f"{kind}, eager" in text
    assert f"left out: {len(rows) - len(predicted)} " in text
    # All of MPT (38) and IBM (16), the first blog post (2), VectorLM (9), and the DeepViT run that was out of memory.
    assert f" {38 + 16 + 2 + 9 + 1}  the source prints no memory\n" in text
    assert max(len(line) for line in text.splitlines()) <= 100


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
