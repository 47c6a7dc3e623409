"""Predicted and published throughput as text: a table, a summary with constant MFUs, and the rows left out."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_bench.report.table import table_columns, table_lines
from tools.validate.published.peaks import left_out, taken
from tools.validate.published.ranges import CENTRAL, fraction_inside, speed_errors
from tools.validate.published.speed import SpeedRow, SpeedSummary, kind_of

HEADERS = ("case", "code", "published", "predicted", "error", "constant\nMFU", "exposed")


def format_speed(rows: Sequence[SpeedRow], summary: SpeedSummary) -> str:
    """Return the comparison as plain text."""
    compared = [row for row in rows if row.error is not None]
    constants = ", ".join(f"{mfu:.1%} on {gpu}" for gpu, mfu in summary.best_constant_mfu.items())
    lines = [
        f"throughput: {len(rows)} published, {len(compared)} compared; from datasheets alone; tokens/s per GPU",
        f"constant MFU: what fits the rows of each GPU best, chosen afterwards: {constants}",
        "",
        *table_lines(table_columns(HEADERS, map(_cells, compared), HEADERS[2:], ("exposed", "code")), indent=2),
    ]
    lines += ["", *_groups(summary), "", *_range(compared), ""]
    lines += taken((row.family, row.assumptions) for row in compared)
    return "\n".join([*lines, "", *left_out((row.case, row.reason) for row in rows)])


def _cells(row: SpeedRow) -> list[str]:
    assert row.predicted_tokens_per_second is not None
    return [
        row.case,
        kind_of(row),
        f"{row.published_tokens_per_second:,.0f}",
        f"{row.predicted_tokens_per_second:,.0f}",
        f"{row.error:+.1%}",
        f"{row.constant_mfu_error:+.1%}",
        f"{row.exposed_share:.1%}",
    ]


def _groups(summary: SpeedSummary) -> list[str]:
    found = (
        (
            name,
            str(group.num_rows),
            f"{group.median_error:.1%}",
            f"{group.median_error_of_constant_mfu:.1%}",
            f"{group.num_too_fast} of {group.num_rows}",
        )
        for name, group in summary.groups.items()
    )
    headers = ("median |error|", "rows", "predicted", "constant MFU", "too fast")
    return table_lines(table_columns(headers, found, headers[1:]), indent=2)


def _range(rows: Sequence[SpeedRow]) -> list[str]:
    """Return the range that plans print beside a speed, and how it holds for publishers that did not make it."""
    found = speed_errors(rows)
    lines = [
        f"range: {CENTRAL:.0%} of the errors are between {found.lowest:+.1%} and {found.highest:+.1%}",
        f"  of a publisher that is left out the range of the others holds {fraction_inside(found):.0%} of the rows:",
    ]
    return lines + [f"    {name}: {one.inside} of {one.num_runs}" for name, one in found.held_out.items()]
