"""Live memory of one rank: the peak of each phase, and what is alive there.

Each run of the repeated block changes live memory by the same amount (simulate/repeat.py), so a peak within its part
lies in its first or in its last run.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from fsdp_bench.simulate.events import Category, Kind
from fsdp_bench.simulate.repeat import Log

BREAKDOWN = tuple(category.value for category in Category)

_ALLOCATE, _FREE = Kind.ALLOCATE, Kind.FREE


@dataclass(frozen=True)
class Peak:
    """The peak of one phase, and where it is."""

    num_bytes: int
    event: int
    """Index of the allocation that reaches it, or of the part's MARK where the part begins with it."""
    runs: int
    """The number of times that the repeated block's part ran before."""


@dataclass(frozen=True)
class LiveMemory:
    """Live bytes of one rank."""

    phases: dict[str, Peak]
    end_bytes: int
    """Live bytes after the last event."""

    @property
    def peak_phase(self) -> str:
        """The phase with the highest peak; the first of equals."""
        return max(self.phases, key=lambda phase: self.phases[phase].num_bytes)

    @property
    def peak_bytes(self) -> int:
        """Peak allocated over all phases."""
        return self.phases[self.peak_phase].num_bytes


def live_memory(log: Log) -> LiveMemory:
    """Follow the live bytes of a log."""
    phases: dict[str, Peak] = {}
    level, events = 0, log.events
    for part in log.parts:
        before, top, reached_by, runs = level, level, part.begin, 0
        for index in range(part.begin, part.end):
            event = events[index]
            if event.kind is _ALLOCATE:
                level += event.num_bytes
                if level > top:
                    top, reached_by = level, index
            elif event.kind is _FREE:
                level -= event.num_bytes
        further = log.times(part) - 1
        added = further * (level - before)
        if added > 0:
            top, runs = top + added, further
        level += added
        if part.phase not in phases or top > phases[part.phase].num_bytes:
            phases[part.phase] = Peak(top, reached_by, runs)
    return LiveMemory(phases, level)


def worst_rank(logs: Iterable[Log]) -> tuple[Log, LiveMemory]:
    """Return the log with the highest peak, of several ranks' steps, and its live memory; of ties the first."""
    return max(((log, live_memory(log)) for log in logs), key=lambda found: found[1].peak_bytes)


def breakdown(log: Log, peak: Peak) -> dict[str, int]:
    """Return what is alive at a peak by category; the values add up to it."""
    totals: dict[str, int] = dict.fromkeys(BREAKDOWN, 0)

    def add(begin: int, end: int, times: int) -> None:
        for event in log.events[begin:end]:
            if event.kind is _ALLOCATE:
                totals[event.category] += times * event.num_bytes
            elif event.kind is _FREE:
                totals[event.category] -= times * event.num_bytes

    for part in log.parts:
        if peak.event in range(part.begin, part.end):
            if peak.runs:
                add(part.begin, part.end, peak.runs)
            add(part.begin, peak.event + 1, 1)
            break
        add(part.begin, part.end, log.times(part))
    return totals
