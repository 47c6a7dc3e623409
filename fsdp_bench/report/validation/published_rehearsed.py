"""Rehearsed and published peaks as text: a table, how near they are, and what the sources leave open."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_bench.report.table import table_columns, table_lines
from fsdp_bench.report.validation.left_out import wrapped
from fsdp_bench.spec.units import GIB
from fsdp_bench.validate.published.rehearsed import WITHIN, WITHIN_BYTES, RehearsedPeak, RehearsedSummary

HEADERS = ("case", "torch", "kind", "published", "rehearsed", "error")


def format_rehearsed(peaks: Sequence[RehearsedPeak], first: RehearsedSummary, other: RehearsedSummary) -> str:
    """Return the comparison as plain text: ``first`` and ``other`` summarize first runs and further ones."""
    cases = list(dict.fromkeys(peak.case for peak in peaks))
    lines = [
        f"peaks of memory that people published, and their code rehearsed: {len(cases)} runs; GiB",
        "",
        *table_lines(table_columns(HEADERS, map(_cells, peaks), HEADERS[3:])),
        "",
        *_summary("with the nearest torch and the framework's defaults", first),
        *_summary("with another torch, or another setting where the source says nothing", other),
        "",
        "where the code is, what was replaced, and what the source leaves open:",
    ]
    for case in cases:
        peak = next(peak for peak in peaks if peak.case == case)
        repository = peak.code.repository.removeprefix("https://github.com/")
        lines += wrapped(f"{case}: {repository} at {peak.code.commit[:9]}, {peak.code.note}", 2)
        lines += wrapped(f"replaced: {peak.changes}", 6)
        lines += wrapped(f"left open: {peak.left_open}", 6)
    return "\n".join(lines)


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
