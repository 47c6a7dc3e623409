"""When everything of a step runs: the host issues, streams run in order, a group's collectives come one by one.

An operator starts when the host has issued it and its stream is free. A collective also waits for its group's previous
collective, because a communicator runs one at a time. On a CPU the host executes everything itself, including gloo's
copies and reductions: a collective that runs beside operators takes their cores from them.
What is exposed is the time in which a collective runs and no operator does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from fsdp_bench.rates.datasheet import Rates
from fsdp_bench.simulate.events import Event, Kind, Queue, Stream, Work
from fsdp_bench.simulate.operators.kernels import Kernels
from fsdp_bench.simulate.repeat import Log
from fsdp_bench.simulate.step import steady_step
from fsdp_bench.spec.recording.model import Model
from fsdp_bench.spec.setup import TrainSetup

Intervals = list[tuple[float, float]]
"""Begin and end in seconds, in order."""


@dataclass(frozen=True)
class Span:
    """When one action ran."""

    kind: str
    """``compute``, ``collective``, ``copy`` or ``host``."""
    stream: Stream
    begin: float
    end: float
    work: Work
    phase: str
    block: int
    """Index among the simulated blocks; -1 outside of blocks."""


@dataclass(frozen=True)
class StepTime:
    """One step of one rank, in seconds. Each time is None where a rate that it needs is unknown."""

    step_seconds: float | None
    compute_seconds: float | None
    """In which an operator runs."""
    communication_seconds: float | None
    """In which a collective runs."""
    exposed_communication_seconds: float | None
    host_copy_seconds: float | None
    """In which something is copied to or from the host."""
    unknown: tuple[str, ...] = ()
    """Names of the work whose duration is not known."""
    cpu_optimizer_seconds: float = 0.0
    """The optimizer's step in host memory, under offload: the GPU has nothing to do meanwhile."""
    spans: tuple[Span, ...] = ()
    """Where they were asked for."""


def step_time(shape: Model, setup: TrainSetup, kernels: Kernels, rates: Rates, with_spans: bool = False) -> StepTime:
    """Return when a step ends, in the steady state, and what was exposed.

    Raises:
        SpecError: for models that cannot be predicted.
    """
    return schedule(steady_step(shape, setup, kernels), rates, with_spans)


def schedule(log: Log, rates: Rates, with_spans: bool = False) -> StepTime:
    """Return when the last step of a log ends, and what was exposed."""
    return run(log.last_step(), rates, with_spans)


class _Clock:
    """The host, the streams and the communicators of one rank."""

    def __init__(self, rates: Rates) -> None:
        self.rates = rates
        self.host = 0.0
        self.streams = [0.0] * len(Stream)
        self.groups: dict[str, float] = {}
        self.events: dict[int, deque[float]] = {}
        self.started = 0.0
        """When the last of the collectives that nobody waited for ends."""

    def issue(self, event: Event, work: Work, seconds: float) -> float:
        """Let an operator, a copy or a collective run as soon as it can; return when it begins."""
        self.host += self.rates.launch_seconds
        begin = max(self.host, self.streams[event.stream])
        if work.group:
            begin = max(begin, self.groups.get(work.group, 0.0))
            self.groups[work.group] = begin + seconds
        end = begin + seconds
        if event.kind is Kind.START_COLLECTIVE and not self.rates.blocks_host:
            self.started = max(self.started, end)
            return begin
        self.streams[event.stream] = end
        if self.rates.blocks_host:
            self.host = end
        return begin

    def wait(self, event: Event) -> None:
        """Follow the events that only order others."""
        kind, stream, streams = event.kind, event.stream, self.streams
        if kind is Kind.WAIT_STREAM:
            streams[stream] = max(streams[stream], streams[event.number])
        elif kind is Kind.RECORD_EVENT:
            self.events.setdefault(event.number, deque()).append(streams[stream])
        elif kind is Kind.WAIT_EVENT:
            pending = self.events[event.number]
            at = pending.pop() if event.number == Queue.RESHARD else pending.popleft()
            streams[stream] = max(streams[stream], at)
        elif kind is Kind.HOST_WAIT:
            self.host = max(self.host, self.events[event.number].popleft())
        elif kind is Kind.SYNCHRONIZE:
            self.host = max(self.host, streams[stream])
        elif kind is Kind.WAIT_COLLECTIVES:
            streams[stream] = max(streams[stream], self.started)

    @property
    def now(self) -> float:
        """When the host and all streams are done."""
        return max(self.host, self.started, *self.streams)


KIND = {
    Kind.KERNEL: "compute",
    Kind.COLLECTIVE: "collective",
    Kind.START_COLLECTIVE: "collective",
    Kind.COPY: "copy",
    Kind.HOST_WORK: "host",
}


def run(events: Iterable[Event], rates: Rates, with_spans: bool = False) -> StepTime:
    """Run a step's events."""
    clock, durations, unknown = _Clock(rates), Durations(rates), dict[str, None]()
    intervals: dict[str, Intervals] = {"compute": [], "collective": [], "copy": [], "host": []}
    spans: list[Span] = []
    phase, block, cpu_optimizer = "", -1, 0.0
    for event in events:
        work = event.work
        if work is None:
            if event.kind <= Kind.RECORD_STREAM:  # what the allocator alone sees
                continue
            clock.wait(event)
            if event.kind is Kind.MARK:
                phase, block = event.label, event.number
            continue
        seconds = durations.seconds(event.kind, work)
        if seconds is None:
            unknown[work.name if not work.group else f"{work.name} ({work.group})"] = None
            seconds = 0.0
        if event.kind is Kind.HOST_WORK:
            begin = clock.host
            clock.host += seconds
            cpu_optimizer += seconds if work.name.startswith("optimizer") else 0.0
        else:
            begin = clock.issue(event, work, seconds)
        kind = KIND[event.kind]
        intervals[kind].append((begin, begin + seconds))
        if with_spans:
            spans.append(Span(kind, event.stream, begin, begin + seconds, work, phase, block))
    return _summary(clock.now, intervals, tuple(unknown), tuple(spans), cpu_optimizer)


class Durations:
    """Durations of work; the rates are asked once for each."""

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self._known: dict[tuple[Kind, Work], float | None] = {}

    def seconds(self, kind: Kind, work: Work) -> float | None:
        """Return how long a piece of work takes; None where nobody knows."""
        key = (kind, work)
        if key not in self._known:
            ask = {Kind.KERNEL: self._rates.run, Kind.COPY: self._rates.copy, Kind.HOST_WORK: self._rates.host}
            self._known[key] = ask.get(kind, self._rates.collective)(work)
        return self._known[key]


def _summary(
    end: float,
    intervals: dict[str, Intervals],
    unknown: tuple[str, ...],
    spans: tuple[Span, ...],
    cpu_optimizer_seconds: float,
) -> StepTime:
    compute, collectives = union(intervals["compute"]), union(intervals["collective"])
    copies_are_known = not any(name in unknown for name in ("to_device", "to_host"))
    collectives_are_known = not any("(" in name for name in unknown)
    is_known = not unknown
    compute_is_known = all("(" in name or name in ("to_device", "to_host") for name in unknown)
    return StepTime(
        step_seconds=end if is_known else None,
        compute_seconds=length(compute) if compute_is_known else None,
        communication_seconds=length(collectives) if collectives_are_known else None,
        exposed_communication_seconds=length(collectives) - overlap(collectives, compute) if is_known else None,
        host_copy_seconds=length(union(intervals["copy"])) if copies_are_known else None,
        unknown=unknown,
        cpu_optimizer_seconds=cpu_optimizer_seconds,
        spans=spans,
    )


def union(spans: Intervals) -> Intervals:
    """Return spans without overlap, in order."""
    merged: Intervals = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        elif end > begin:
            merged.append((begin, end))
    return merged


def length(spans: Intervals) -> float:
    """Return the seconds of spans that do not overlap."""
    return sum(end - begin for begin, end in spans)


def overlap(one: Intervals, other: Intervals) -> float:
    """Return the seconds that two lists of such spans share."""
    shared, index = 0.0, 0
    for begin, end in one:
        while index < len(other) and other[index][1] <= begin:
            index += 1
        position = index
        while position < len(other) and other[position][0] < end:
            shared += min(end, other[position][1]) - max(begin, other[position][0])
            position += 1
    return shared
