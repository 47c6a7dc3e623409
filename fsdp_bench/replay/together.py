"""The steps of several ranks that wait for each other: pipeline stages, whose bubbles follow from it.

A collective or a message begins once every rank that takes part has come to it. All ranks begin the step together, and
it takes as long as the last of them needs.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from fsdp_bench.rates.datasheet import Rates
from fsdp_bench.replay.schedule import StepTime, step_time
from fsdp_bench.replay.streams import Ran, Streams
from fsdp_bench.simulate.events import Event


@dataclass(frozen=True)
class Meeting:
    """A collective, or a message, by which ranks wait for each other."""

    key: Hashable
    """The same for each rank that takes part."""
    ranks: frozenset[int]


@dataclass(frozen=True)
class RankLog:
    """The step of one rank."""

    events: Sequence[Event]
    meetings: Sequence[Sequence[Meeting]]
    """Those of collectives and messages, by Event.number; several where messages were issued as one batch."""
    rates: Rates


class _Arrivals:
    """When ranks have come to their meetings, and how long these then take."""

    def __init__(self, logs: Mapping[int, RankLog]) -> None:
        self._logs = logs
        self._arrived: dict[Hashable, dict[int, tuple[float, float]]] = {}

    def end_of(self, rank: int, ran: Ran, ready: float) -> float | None:
        """Return when a rank's collective ends; None if another rank that takes part has not come to it yet."""
        meetings = self._logs[rank].meetings[ran.event.number]
        for meeting in meetings:
            self._arrived.setdefault(meeting.key, {})[rank] = ready, ran.seconds
        ends = [self._end(meeting) for meeting in meetings]
        return None if None in ends else max([ready + ran.seconds, *(end for end in ends if end is not None)])

    def _end(self, meeting: Meeting) -> float | None:
        there = self._arrived[meeting.key]
        if not there.keys() >= (meeting.ranks & self._logs.keys()):
            return None
        return max(ready for ready, _ in there.values()) + max(seconds for _, seconds in there.values())


def run_together(logs: Mapping[int, RankLog]) -> dict[int, StepTime] | None:
    """Run the steps of ranks; return each rank's times, of which ``step_seconds`` is that of the last one.

    Ranks that are not among them are taken to be as early as their peers. Operators beside a collective are slowed
    down by what was known when nothing else could go on. None if the ranks wait for each other for ever.
    """
    arrivals = _Arrivals(logs)

    def rank_streams(rank: int) -> Streams:
        return Streams(logs[rank].rates, lambda ran, ready: arrivals.end_of(rank, ran, ready))

    streams = {rank: rank_streams(rank) for rank in logs}
    issued = {rank: iter(log.events) for rank, log in logs.items()}
    going = True
    while going:
        going = sum(one.advance(issued[rank]) for rank, one in streams.items()) > 0
        if not going:  # each rank, not only the first one that can
            going = sum(one.run_operators() for one in streams.values()) > 0
    if not all(one.is_done for one in streams.values()):
        return None
    end = max((one.end for one in streams.values()), default=0.0)
    found = {rank: step_time(logs[rank].events, one, end, with_spans=True) for rank, one in streams.items()}
    is_unknown = any(time.step_seconds is None for time in found.values())
    return {rank: replace(time, step_seconds=None) if is_unknown else time for rank, time in found.items()}
