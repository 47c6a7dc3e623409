"""Published peaks and speeds beside rehearsals of the same code (results/rehearsed/published).

A record holds both, and ``rerun.py`` beside the records writes it. In a rehearsal only durations are predicted.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec

from fsdp_bench.plan.estimate import Verdict
from fsdp_bench.report.table import table_columns, table_lines
from fsdp_bench.report.terminal import wrapped
from fsdp_bench.spec.codec import from_json
from fsdp_bench.spec.errors import SpecError, shown
from fsdp_bench.spec.units import GIB

KINDS = ("max_allocated", "max_active", "max_reserved")
"""The peaks of ``torch.cuda.memory_stats`` that are compared, each with its own kind."""

WITHIN = 0.01
"""An error up to this counts in ``num_within``."""
WITHIN_BYTES = round(0.15 * GIB)
"""A difference up to this counts in ``num_within_bytes``."""


class Code(msgspec.Struct, frozen=True, kw_only=True):
    """Public code, as it was fetched for the run."""

    repository: str
    commit: str
    note: str


class RehearsedRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One rehearsal of a published run. Its file holds more, which is not read here."""

    case: str
    """The row's id in published.csv."""
    variant: str | None
    """The settings in which this run differs from the case's first run. None: nothing."""
    is_first: bool
    """Whether this is the case's main run: the nearest torch, and the framework's defaults for the unpublished."""
    code: Code
    torch: str
    changes: str
    """The parts that the driver replaces: data, tokenizer, checkpoint."""
    left_open: str
    """Facts that the source does not say."""
    published: dict[str, int]
    """Bytes, by kind: max_allocated, max_active, max_reserved."""
    peaks: dict[str, int]
    """The rehearsed bytes, by kind."""
    published_outcome: str | None = None
    """``fits`` or ``OOM``. None: the source does not say."""
    verdict: Verdict | None = None
    """The rehearsed one. None: unknown."""
    published_tokens_per_second: float | None = None
    """Tokens per second of one GPU."""
    tokens_per_second: float | None = None
    """Tokens per second of one GPU, by ``--time``. None: not rehearsed, or unknown."""


class RehearsedPeak(msgspec.Struct, frozen=True, kw_only=True):
    """A published peak and the rehearsed one."""

    case: str
    variant: str | None
    is_first: bool
    torch: str
    kind: str
    published_bytes: int
    rehearsed_bytes: int
    difference_bytes: int
    """Rehearsed less published."""
    error: float
    """The difference as a part of the published value."""
    code: Code
    changes: str
    left_open: str


class RehearsedSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """A published speed and the rehearsed one, in tokens per second of one GPU."""

    case: str
    torch: str
    published: float
    rehearsed: float
    error: float
    """``rehearsed / published - 1``."""


class RehearsedOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a published run ran, and the rehearsed verdict."""

    case: str
    torch: str
    ran: bool
    """Whether the published run completed. False: it ran out of memory."""
    verdict: Verdict


def read_rehearsed(folder: Path) -> list[RehearsedRecord]:
    """Read the records of a folder, by case, torch and variant.

    Raises SpecError if there is no record, or a file is not one.
    """
    files = sorted(folder.glob("*.json"))
    if not files:
        raise SpecError(f"--rehearsed: {shown(str(folder))} has no records of rehearsals (*.json)")
    try:
        found = [from_json(file.read_bytes(), RehearsedRecord) for file in files]
    except (msgspec.DecodeError, OSError) as error:
        raise SpecError(f"--rehearsed: {shown(str(folder))} holds a file that is no such record: {error}") from error
    for file, record in zip(files, found, strict=True):
        if not record.published.keys() <= record.peaks.keys() & set(KINDS):
            kinds = ", ".join(sorted(record.published))
            raise SpecError(f"--rehearsed: {shown(file.name)} has published peaks ({kinds}) and not all rehearsed ones")
    return sorted(found, key=lambda one: (one.case, not one.is_first, one.variant or "", one.torch))


def compare_rehearsed(records: list[RehearsedRecord]) -> list[RehearsedPeak]:
    """Return every published peak with the rehearsed peak of the same kind."""
    return [
        _compared(record, kind, record.published[kind], record.peaks[kind])
        for record in records
        for kind in KINDS
        if kind in record.published
    ]


def _compared(record: RehearsedRecord, kind: str, published: int, rehearsed: int) -> RehearsedPeak:
    common = set(RehearsedRecord.__struct_fields__).intersection(RehearsedPeak.__struct_fields__)
    return RehearsedPeak(
        **{name: getattr(record, name) for name in common},
        kind=kind,
        published_bytes=published,
        rehearsed_bytes=rehearsed,
        difference_bytes=rehearsed - published,
        error=(rehearsed - published) / published,
    )


def compare_rehearsed_speeds(records: list[RehearsedRecord]) -> list[RehearsedSpeed]:
    """Return every published speed with the rehearsed one, of first runs alone: torch's version hardly changes it."""
    return [
        RehearsedSpeed(
            case=record.case,
            torch=record.torch,
            published=record.published_tokens_per_second,
            rehearsed=record.tokens_per_second,
            error=record.tokens_per_second / record.published_tokens_per_second - 1,
        )
        for record in records
        if record.is_first and record.published_tokens_per_second and record.tokens_per_second
    ]


def compare_rehearsed_outcomes(records: list[RehearsedRecord]) -> list[RehearsedOutcome]:
    """Return every published outcome with the rehearsed verdict, of first runs alone."""
    return [
        RehearsedOutcome(
            case=record.case, torch=record.torch, ran=record.published_outcome == "fits", verdict=record.verdict
        )
        for record in records
        if record.is_first and record.published_outcome is not None and record.verdict is not None
    ]


class RehearsedSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of peaks that are near the published ones, and the worst."""

    num_peaks: int
    num_within: int
    """Peaks whose error is WITHIN or less."""
    num_within_bytes: int
    """Peaks that differ by WITHIN_BYTES or less."""
    worst: RehearsedPeak | None
    """The peak with the largest error."""


def summarize(peaks: list[RehearsedPeak]) -> RehearsedSummary:
    """Summarize some of the comparisons."""
    return RehearsedSummary(
        num_peaks=len(peaks),
        num_within=sum(abs(peak.error) <= WITHIN for peak in peaks),
        num_within_bytes=sum(abs(peak.difference_bytes) <= WITHIN_BYTES for peak in peaks),
        worst=max(peaks, key=lambda peak: abs(peak.error), default=None),
    )


# -- as text ----------------------------------------------------------------------------------------------------------


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
        lines += wrapped(f"  {record.case}: {repository} at {record.code.commit[:9]}, {record.code.note}")
        lines += wrapped(f"      replaced: {record.changes}")
        lines += wrapped(f"      left open: {record.left_open}")
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
            " a step issues is rehearsed, how long that takes predicted"
        ),
        "",
        *table_lines(table_columns(SPEED_HEADERS, cells, SPEED_HEADERS[2:])),
        "",
        *wrapped(
            f"median |error| {median(abs(row.error) for row in speeds):.1%}, worst {worst.error:+.1%}, {worst.case};"
            f" too fast in {sum(row.error > 0 for row in speeds)} of {len(speeds)}"
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
        f" {found.worst.difference_bytes / GIB:+.2f} GiB, {found.worst.case}"
    )
