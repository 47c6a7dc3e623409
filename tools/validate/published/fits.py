"""Compares predicted with published outcomes: fits, runs with retries, or out of memory.

The caching allocator is replayed on the GPU that the source names. A run with allocation retries (cudaMalloc fails,
cached blocks are freed, then it succeeds) continues more slowly: "runs with retries" is a third answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from fsdp_bench.plan.estimate import Verdict
from fsdp_bench.plan.prediction import answer
from fsdp_bench.plan.question import Question
from fsdp_bench.rates.communicators import communicators_of
from fsdp_bench.report.table import table_columns, table_lines
from fsdp_bench.report.text.prediction import retries_text
from fsdp_bench.simulate.operators.kernels import kernels_on
from fsdp_bench.simulate.step import SimulatedSteps
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.units import format_gib
from tools.validate.published.cases import PublishedCase, read_cases
from tools.validate.published.hardware import cluster_of
from tools.validate.published.left_out import left_out, wrapped
from tools.validate.published.setups import Unpredictable, plan_case


class FitRow(msgspec.Struct, frozen=True, kw_only=True):
    """One published outcome and its prediction, or the reason why there is none."""

    case: str
    source: str
    compiled: bool
    """Whether the published code was compiled. Predictions are for eager mode where compiled code is not recorded."""
    ran: bool
    """Whether the published run completed. False: it ran out of memory."""
    predicted: Verdict | None = None
    reserved_bytes: int | None = None
    """Predicted peak reserved memory. Retries keep it within the GPU's memory."""
    gpu_bytes: int | None = None
    num_alloc_retries: int | None = None
    """Predicted allocation retries in the first steps."""
    num_retries_later: int | None = None
    """The most in one later step. None where memory ran out, or that is not known."""
    reason: str | None = None


def compare_fits(cases: Iterable[PublishedCase] | None = None) -> list[FitRow]:
    """Predict the outcome of every published run with a stated outcome; by default of the packaged cases."""
    return [_compare(case) for case in (read_cases() if cases is None else cases) if case.outcome is not None]


def _compare(case: PublishedCase) -> FitRow:
    inputs = case.inputs
    row = FitRow(case=inputs.case, source=inputs.source, compiled=inputs.compiled == "yes", ran=case.outcome == "fits")
    plan = plan_case(inputs)
    if isinstance(plan, Unpredictable):
        return msgspec.structs.replace(row, reason=plan.reason)
    if plan.gpu is None or plan.gpu.usable_memory_bytes is None:
        return msgspec.structs.replace(row, reason=f"{inputs.gpu}: the source does not state the GPU's memory")
    try:
        cluster = cluster_of(inputs)
        taken = communicators_of(plan.setup, cluster).num_bytes
        steps = SimulatedSteps(plan.model, plan.setup, kernels_on(plan.kernels, cluster.gpu))
        least = taken.low if taken else 0  # the least memory of NCCL
        found = answer(Question(plan.model, plan.setup, cluster, headroom_bytes=least).with_steps(steps))
    except SpecError as error:
        return msgspec.structs.replace(row, reason=str(error))
    return msgspec.structs.replace(
        row,
        predicted=found.verdict,
        reserved_bytes=found.allocator.peak_reserved_bytes,
        gpu_bytes=plan.gpu.usable_memory_bytes,
        num_alloc_retries=found.allocator.num_alloc_retries,
        num_retries_later=found.allocator.num_retries_later,
    )


# -- as text ----------------------------------------------------------------------------------------------------------


def format_fits(rows: Sequence[FitRow]) -> str:
    """Return the comparison as plain text; compiled code has its own column."""
    compared = [row for row in rows if row.predicted is not None]
    columns = {
        "ran, eager": [row for row in compared if row.ran and not row.compiled],
        "ran, compiled": [row for row in compared if row.ran and row.compiled],
        "out of memory": [row for row in compared if not row.ran],
    }
    counts = [
        (fit.text, *(str(sum(row.predicted is fit for row in group)) for group in columns.values())) for fit in Verdict
    ]
    lines = [
        f"does it fit: {len(rows)} published outcomes, {len(compared)} compared; compiled code not recorded: as eager",
        "",
        *table_lines(table_columns(("predicted", *columns), counts, columns), indent=2),
    ]
    differing = [line for row in compared if row.ran != (row.predicted is Verdict.FITS) for line in _named(row)]
    if differing:
        lines += ["", "predicted to need retries, or otherwise than it went:", *differing]
    return "\n".join([*lines, "", *left_out((row.case, row.reason) for row in rows)])


def _named(row: FitRow) -> list[str]:
    assert row.predicted is not None
    outcome = "ran" if row.ran else "out of memory"
    compiled = ", compiled" if row.compiled else ""
    text = f"{row.case} ({outcome}{compiled}): {row.predicted.text}"
    if row.predicted is Verdict.RUNS_WITH_RETRIES:
        text += f": {retries_text(row.num_alloc_retries or 0, row.num_retries_later)}"
    if row.reserved_bytes is not None and row.gpu_bytes is not None:
        text += f"; {format_gib(row.reserved_bytes)} of {format_gib(row.gpu_bytes)} reserved at most"
    return wrapped(text, 2)
