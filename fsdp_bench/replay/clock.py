"""The clocks of one rank: of its host, its streams and its communicators."""

from __future__ import annotations

from collections import deque

from fsdp_bench.rates.datasheet import Rates
from fsdp_bench.replay.contention import Contention
from fsdp_bench.simulate.events import Event, Kind, Queue, Stream, Work


class Clock:
    """When the host, each stream and each communicator have done what they were given."""

    def __init__(self, rates: Rates, contention: Contention) -> None:
        self.host = 0.0
        self._rates = rates
        self._contention = contention
        self._streams = [0.0] * len(Stream)
        self._groups: dict[str, float] = {}
        self._events: dict[int, deque[float]] = {}
        self._started = 0.0
        """When the last of the collectives that nobody waited for ends."""

    def issue(self, event: Event, work: Work, seconds: float) -> tuple[float, float]:
        """Let an operator, a copy or a collective run as soon as it can; return when it begins and ends."""
        self.host += self._rates.launch_seconds
        begin = max(self.host, self._streams[event.stream])
        if work.group:
            begin = max(begin, self._groups.get(work.group, 0.0))
            self._groups[work.group] = begin + seconds
        end = begin + seconds
        if event.kind is Kind.KERNEL and event.stream is Stream.COMPUTE:
            end = self._contention.end_of(work, begin, seconds)
        if event.kind is Kind.START_COLLECTIVE and not self._rates.blocks_host:
            self._started = max(self._started, end)
            return begin, end
        self._streams[event.stream] = end
        if self._rates.blocks_host:
            self.host = end
        return begin, end

    def work_on_host(self, seconds: float) -> tuple[float, float]:
        """Let the host work; return when that begins and ends."""
        begin = self.host
        self.host += seconds
        return begin, self.host

    def wait(self, event: Event) -> None:
        """Follow the events that only order others."""
        kind, stream, streams = event.kind, event.stream, self._streams
        if kind is Kind.WAIT_STREAM:
            streams[stream] = max(streams[stream], streams[event.number])
        elif kind is Kind.RECORD_EVENT:
            self._events.setdefault(event.number, deque()).append(streams[stream])
        elif kind is Kind.WAIT_EVENT:
            pending = self._events[event.number]
            at = pending.pop() if event.number == Queue.RESHARD else pending.popleft()
            streams[stream] = max(streams[stream], at)
        elif kind is Kind.HOST_WAIT:
            self.host = max(self.host, self._events[event.number].popleft())
        elif kind is Kind.SYNCHRONIZE:
            self.host = max(self.host, streams[stream])
        elif kind is Kind.WAIT_COLLECTIVES:
            streams[stream] = max(streams[stream], self._started)

    @property
    def now(self) -> float:
        """When the host and all streams are done."""
        return max(self.host, self._started, *self._streams)
