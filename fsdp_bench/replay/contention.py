"""How collectives slow down the operators that run beside them.

NCCL's kernels occupy a multiprocessor for each channel, and their buffers take part of the memory's bandwidth
(rates/datasheet.py). An operator beside a collective makes slower progress until the collective ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fsdp_bench.rates.datasheet import Rates
from fsdp_bench.simulate.events import Kind, Work


class Durations:
    """Durations of work; the rates are asked once for each."""

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self._alone: dict[tuple[Kind, Work], float | None] = {}
        self._beside: dict[tuple[Work, tuple[Work, ...]], float] = {}

    def seconds(self, kind: Kind, work: Work) -> float | None:
        """Return how long a piece of work takes; None where nobody knows."""
        key = (kind, work)
        if key not in self._alone:
            ask = {Kind.KERNEL: self._rates.run, Kind.COPY: self._rates.copy, Kind.HOST_WORK: self._rates.host}
            self._alone[key] = ask.get(kind, self._rates.collective)(work)
        return self._alone[key]

    def beside(self, work: Work, collectives: tuple[Work, ...]) -> float:
        """Return how long an operator takes while collectives run all the time."""
        key = (work, collectives)
        if key not in self._beside:
            self._beside[key] = self._rates.run(work, collectives) or 0.0
        return self._beside[key]


@dataclass(frozen=True)
class Period:
    """A time in which the same collectives run."""

    begin: float
    end: float
    collectives: tuple[Work, ...]


def periods_of(collectives: Iterable[tuple[float, float, Work]]) -> list[Period]:
    """Return the periods in which collectives run, in order, from when each begins and ends."""
    changes = sorted(
        (at, is_begin, number, work)
        for number, (begin, end, work) in enumerate(collectives)
        if end > begin
        for at, is_begin in ((begin, True), (end, False))
    )
    periods, running, since = list[Period](), dict[int, Work](), 0.0
    for at, is_begin, number, work in changes:
        if running and at > since:
            periods.append(Period(since, at, tuple(running.values())))
        if is_begin:
            running[number] = work
        else:
            del running[number]
        since = at
    return periods


class Contention:
    """When the operators of one stream end, given the periods in which collectives run.

    Operators are asked for in the order in which they begin.
    """

    def __init__(self, periods: Sequence[Period], durations: Durations) -> None:
        self._periods = periods
        self._durations = durations
        self._next = 0

    def end_of(self, work: Work, begin: float, seconds: float) -> float:
        """Return when an operator ends that begins at ``begin`` and takes ``seconds`` where no collective runs."""
        now, left = begin, 1.0
        while self._next < len(self._periods):
            period = self._periods[self._next]
            if period.end <= now:
                self._next += 1
                continue
            if period.begin > now:
                if now + left * seconds <= period.begin:
                    break
                left -= (period.begin - now) / seconds
                now = period.begin
            slow = self._durations.beside(work, period.collectives)
            if now + left * slow <= period.end:
                return now + left * slow
            left -= (period.end - now) / slow
            now = period.end
        return now + max(left, 0.0) * seconds
