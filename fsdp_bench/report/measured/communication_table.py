"""The communication of a step by kind of collective, and its exposed part, which is measured in two ways."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdp_bench.report import terminal
from fsdp_bench.report.measured.tables import disagrees
from fsdp_bench.report.table import table_columns, table_lines
from fsdp_bench.spec.rank_report import CollectiveReading, Outcome
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.spec.units import format_gib, format_seconds
from fsdp_bench.sweep.results.flat import kinds_of, trial_labels

if TYPE_CHECKING:
    from rich.console import Console

KIND_HEADERS = ("kind", "calls", "bytes", "ranks", "seconds", "bus bandwidth")

LEGEND = (
    "exposed: time in which a collective ran and no compute did; by the profiler, with its part of the profiled step,"
    " and by difference: the step less the same step where collectives end at once; ! where the parts are more than 10"
    " points apart",
    "bytes: of whole messages (an all-gather's output, a reduce-scatter's input); bus bandwidth: bytes / seconds as"
    " nccl-tests' busbw, times (n - 1) / n, twice that for all-reduce",
    "seconds of a kind: the median over profiled steps, of the rank with the most, which waited longest for its peers:"
    " kinds may add up to more than the total, and bus bandwidth is less than the links'; copies are in no total",
)


def print_communication(records: list[TrialRecord], console: Console) -> None:
    """Print one line of times per trial, and one row per kind of collective."""
    measured = [record for record in records if record.outcome is Outcome.OK]
    lines = []
    for record, label in zip(measured, trial_labels(measured), strict=True):
        rows = [_kind_row(kind) for kind in kinds_of(record)]
        lines += [f"{label}: {_trial_text(record)}"]
        lines += table_lines(table_columns(KIND_HEADERS, rows, KIND_HEADERS[1:]), console.width, 2) if rows else []
        lines += [""]
    ranks = [rank for record in measured for rank in record.ranks]
    failures = {rank.without_communication_failure for rank in ranks if rank.without_communication_failure}
    lines += [*LEGEND, *(f"steps without communication failed: {failure}" for failure in sorted(failures))]
    terminal.note_lines(console, lines)


def _trial_text(record: TrialRecord) -> str:
    """Return a trial's step times, and its exposed communication by the profiler and by difference."""
    fractions = record.exposed_fractions
    profiled, difference = (f" ({fraction:.0%})" for fraction in fractions) if fractions else ("", "")
    mark = " !" if disagrees(record) else ""
    return (
        f"step {_seconds(record.step_seconds)}, without communication {_seconds(record.seconds_without_communication)};"
        f" communication {_seconds(record.communication_seconds)}, exposed"
        f" {_seconds(record.exposed_communication_seconds)}{profiled} by the profiler,"
        f" {_seconds(record.exposed_by_difference_seconds)}{difference} by difference{mark}"
    )


def _kind_row(kind: CollectiveReading) -> list[str]:
    bandwidth = kind.bus_bandwidth
    return [
        kind.kind,
        str(kind.calls),
        format_gib(kind.message_bytes),
        "unknown" if kind.group_size is None else str(kind.group_size),
        _seconds(kind.seconds),
        "unknown" if bandwidth is None else f"{bandwidth / 1e9:.3g} GB/s",
    ]


def _seconds(value: float | None) -> str:
    return "unknown" if value is None else format_seconds(value)
