"""Rehearsed and published peaks and speeds as text: tables, how near they are, and what the sources leave open."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from fsdp_bench.plan.estimate import Verdict
from fsdp_bench.report.table import table_columns, table_lines
from fsdp_bench.spec.units import GIB
from tools.validate.published.rehearsed import (
    WITHIN,
    WITHIN_BYTES,
    RehearsedOutcome,
    RehearsedPeak,
    RehearsedRecord,
    RehearsedSpeed,
    RehearsedSummary,
)
from tools.validate.text.left_out import wrapped

HEADERS = ("case", "torch", "kind", "published", "rehearsed", "error")
SPEED_HEADERS = ("case", "torch", "published", "rehearsed", "error")


def format_rehearsed(
    records: Sequence[RehearsedRecord],
    peaks: Sequence[RehearsedPeak],
    first: RehearsedSummary,
    other: RehearsedSummary,
    speeds: Sequence[RehearsedSpeed],
    outcomes: Sequence[RehearsedOutcome],
) -> str:
    """Return the comparison as plain text: ``first`` and ``other`` summarize peaks of first and of further runs."""
    lines = [
        f"peaks of memory that people published, and their code rehearsed: {_num_cases(peaks)} runs; GiB",
        "",
        *table_lines(table_columns(HEADERS, map(_cells, peaks), HEADERS[3:])),
        "",
        *_summary("with the nearest torch and the framework's defaults", first),
        *_summary("with another torch, or another setting where the source says nothing", other),
        "",
        *_outcomes(outcomes),
        *_speeds(speeds),
        "where the code is, what was replaced, and what the source leaves open:",
    ]
    of_cases: dict[str, RehearsedRecord] = {}
    for record in records:
        of_cases.setdefault(record.case, record)
    for record in of_cases.values():
        repository = record.code.repository.removeprefix("https://github.com/")
        lines += wrapped(f"{record.case}: {repository} at {record.code.commit[:9]}, {record.code.note}", 2)
        lines += wrapped(f"replaced: {record.changes}", 6)
        lines += wrapped(f"left open: {record.left_open}", 6)
    return "\n".join(lines)


def _num_cases(rows: Sequence[RehearsedPeak] | Sequence[RehearsedSpeed]) -> int:
    return len({row.case for row in rows})


def _outcomes(outcomes: Sequence[RehearsedOutcome]) -> list[str]:
    if not outcomes:
        return []
    groups = {"ran": [one for one in outcomes if one.ran], "out of memory": [one for one in outcomes if not one.ran]}
    cells = [
        (verdict.text, *(str(sum(one.verdict is verdict for one in group)) for group in groups.values()))
        for verdict in Verdict
    ]
    return [
        f"whether runs fitted, and their code rehearsed: {len(outcomes)} published outcomes",
        "",
        *table_lines(table_columns(("rehearsed", *groups), cells, groups), indent=2),
        "",
    ]


def _speeds(speeds: Sequence[RehearsedSpeed]) -> list[str]:
    if not speeds:
        return []
    cells = (
        (row.case, row.torch.partition("+")[0], f"{row.published:,.0f}", f"{row.rehearsed:,.0f}", f"{row.error:+.1%}")
        for row in speeds
    )
    worst = max(speeds, key=lambda row: abs(row.error))
    return [
        *wrapped(
            f"speeds that people published, and their code rehearsed: {_num_cases(speeds)} runs; tokens/s per GPU; what"
            " a step issues is rehearsed, how long that takes predicted",
            0,
        ),
        "",
        *table_lines(table_columns(SPEED_HEADERS, cells, SPEED_HEADERS[2:])),
        "",
        *wrapped(
            f"median |error| {median(abs(row.error) for row in speeds):.1%}, worst {worst.error:+.1%}, {worst.case};"
            f" too fast in {sum(row.error > 0 for row in speeds)} of {len(speeds)}",
            0,
        ),
        "",
    ]


def _cells(peak: RehearsedPeak) -> list[str]:
    return [
        peak.case + (f", {peak.variant}" if peak.variant else ""),
        peak.torch.partition("+")[0],
        peak.kind.removeprefix("max_"),
        f"{peak.published_bytes / GIB:.2f}",
        f"{peak.rehearsed_bytes / GIB:.2f}",
        f"{peak.error:+.2%}",
    ]


def _summary(name: str, found: RehearsedSummary) -> list[str]:
    if found.worst is None:
        return []
    return wrapped(
        f"{name}: {found.num_within} of {found.num_peaks} within {WITHIN:.0%}, {found.num_within_bytes} within"
        f" {WITHIN_BYTES / GIB:.2f} GiB; worst {found.worst.error:+.1%},"
        f" {found.worst.difference_bytes / GIB:+.2f} GiB, {found.worst.case}",
        0,
    )
