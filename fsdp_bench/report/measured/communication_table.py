"""What was sent in a step, kind by kind, and how much of it compute did not hide, found in two ways."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from fsdp_bench.report import terminal
from fsdp_bench.report.measured.tables import disagrees
from fsdp_bench.spec.rank_report import CollectiveReading, Outcome
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.spec.units import format_gib, format_seconds
from fsdp_bench.sweep.config.trial import distinct_labels

TRIAL_COLUMNS = ("trial", "step", "without comm.", "total", "exposed: profiler", "by difference")
KIND_COLUMNS = ("kind", "calls", "bytes", "ranks", "seconds", "bus bandwidth")

LEGEND = (
    "exposed, profiler: time in which a collective ran and no compute did, and its part of the profiled step; by"
    " difference: the step less the same step where collectives end at once; ! where the parts are more than 10 points"
    " apart",
    "bytes: of whole messages (an all-gather's output, a reduce-scatter's input); bus bandwidth: bytes / seconds as"
    " nccl-tests' busbw, times (n - 1) / n, twice that for all-reduce",
    "seconds of a kind: the median over profiled steps, of the rank with the most, which waited longest for its peers:"
    " kinds may add up to more than the total, and bus bandwidth is less than the links'; copies are in no total",
)


def print_communication(records: list[TrialRecord], console: Console) -> None:
    """Print a block of rows a trial: the trial in the first, then a row for each kind."""
    table = Table(header_style="bold", box=None, padding=(0, 1))
    for column in (*TRIAL_COLUMNS, *KIND_COLUMNS):
        table.add_column(column, justify="left" if column in ("trial", "kind") else "right", no_wrap=True)
    measured = [record for record in records if record.outcome is Outcome.OK]
    for record, label in zip(measured, _labels(measured), strict=True):
        first = [label, *_trial_words(record)]
        kinds: list[CollectiveReading | None] = [*kinds_of(record)] or [None]
        for kind in kinds:
            terminal.add_row(table, [*first, *_kind_words(kind)])
            first = [""] * len(first)
    terminal.print_table(table, console, 250)
    ranks = [rank for record in measured for rank in record.ranks]
    failures = {rank.without_communication_failure for rank in ranks if rank.without_communication_failure}
    for line in (*LEGEND, *(f"steps without communication failed: {failure}" for failure in sorted(failures))):
        terminal.note(console, line)


def communication_rows(records: list[TrialRecord]) -> list[dict[str, Any]]:
    """Return the same as data: bytes and seconds."""
    measured = [record for record in records if record.outcome is Outcome.OK]
    return [
        {
            "id": record.id,
            "label": label,
            "device": record.device,
            "step_seconds": record.step_seconds,
            "seconds_without_communication": record.seconds_without_communication,
            "communication_seconds": record.communication_seconds,
            "exposed_communication_seconds": record.exposed_communication_seconds,
            "exposed_by_difference_seconds": record.exposed_by_difference_seconds,
            "exposed_shares": record.exposed_shares,
            "collectives": [
                {
                    "kind": kind.kind,
                    "calls": kind.calls,
                    "message_bytes": kind.message_bytes,
                    "group_size": kind.group_size,
                    "seconds": kind.seconds,
                    "algorithm_bandwidth_bytes_per_second": kind.algorithm_bandwidth,
                    "bus_bandwidth_bytes_per_second": kind.bus_bandwidth,
                }
                for kind in kinds_of(record)
            ],
        }
        for record, label in zip(measured, _labels(measured), strict=True)
    ]


def kinds_of(record: TrialRecord) -> list[CollectiveReading]:
    """Return one reading a kind: the rank with the most seconds, the median over its profiled steps."""
    found: dict[str, CollectiveReading] = {}
    for rank in record.ranks:
        names = {reading.kind for step in rank.communication for reading in step.collectives}
        for name in sorted(names):
            readings = [reading for step in rank.communication for reading in step.collectives if reading.kind == name]
            seconds = [reading.seconds for reading in readings if reading.seconds is not None]
            known = found.get(name)
            median = float(statistics.median(seconds)) if seconds else None
            if known is None or (median or 0.0) > (known.seconds or 0.0):
                first = readings[0]
                found[name] = CollectiveReading(
                    kind=name,
                    calls=first.calls,
                    message_bytes=first.message_bytes,
                    seconds=median,
                    group_size=first.group_size,
                )
    return [found[name] for name in sorted(found)]


def _labels(records: list[TrialRecord]) -> list[str]:
    return distinct_labels([(record.model, record.setup, record.device == "emulated") for record in records])


def _trial_words(record: TrialRecord) -> list[str]:
    shares = record.exposed_shares
    profiled, difference = (f" ({share:4.0%})" for share in shares) if shares else ("", "")
    return [
        _seconds(record.step_seconds),
        _seconds(record.seconds_without_communication),
        _seconds(record.communication_seconds),
        _seconds(record.exposed_communication_seconds) + profiled,
        _seconds(record.exposed_by_difference_seconds) + difference + (" !" if disagrees(record) else ""),
    ]


def _kind_words(kind: CollectiveReading | None) -> list[str]:
    if kind is None:
        return ["unknown"] * len(KIND_COLUMNS)
    rate = kind.bus_bandwidth
    return [
        kind.kind,
        str(kind.calls),
        format_gib(kind.message_bytes),
        "unknown" if kind.group_size is None else str(kind.group_size),
        _seconds(kind.seconds),
        "unknown" if rate is None else f"{rate / 1e9:.3g} GB/s",
    ]


def _known(tell: Callable[[float], str]) -> Callable[[float | None], str]:
    return lambda value: "unknown" if value is None else tell(value)


_seconds = _known(format_seconds)
