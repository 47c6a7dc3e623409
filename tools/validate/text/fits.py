"""Predicted and published outcomes as text: counts, the cases that differ, and the rows left out with reasons."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_bench.plan.estimate import Verdict
from fsdp_bench.report.table import table_columns, table_lines
from fsdp_bench.report.text.verdict import retries_text
from fsdp_bench.spec.units import format_gib
from tools.validate.published.fits import FitRow
from tools.validate.text.left_out import left_out, wrapped


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
    if row.reserved_bytes is not None and row.card_bytes is not None:
        text += f"; {format_gib(row.reserved_bytes)} of {format_gib(row.card_bytes)} reserved at most"
    return wrapped(text, 2)
