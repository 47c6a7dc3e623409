"""When everything of a step runs: the host issues, streams run in order, a group's collectives come one by one.

An operator starts when the host has issued it and its stream is free. A collective also waits for its group's previous
collective, because a communicator runs one at a time. On a CPU the host executes everything itself, including gloo's
copies and reductions: a collective that runs beside operators takes their cores from them. On a GPU a collective slows
down the operators beside it (contention.py). When collectives run is known after a first pass without that effect; each
further pass takes them from the pass before, until the step no longer changes.
What is exposed is the time in which a collective runs and no operator does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fsdp_bench.rates.datasheet import Rates
from fsdp_bench.replay.clock import Clock
from fsdp_bench.replay.contention import Contention, Durations, Period, periods_of
from fsdp_bench.replay.intervals import Intervals, length, overlap, union
from fsdp_bench.replay.step_parts import StepPart, part_of, parts_of
from fsdp_bench.simulate.events import Event, Kind, Stream, Work
from fsdp_bench.simulate.operators.kernels import Kernels
from fsdp_bench.simulate.repeat import Log
from fsdp_bench.simulate.step import steady_step
from fsdp_bench.spec.recording.model import Model
from fsdp_bench.spec.setup import TrainSetup

MOST_PASSES = 10
SETTLED = 1e-4
"""The last pass is the one that changes the step by less than this fraction."""


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
    slowed_seconds: float = 0.0
    """By which operators take longer because collectives run beside them; a part of ``compute_seconds``."""
    parts: Mapping[StepPart, float] = field(default_factory=dict)
    """What the step consists of: parts that add up to it. Empty where the step is unknown."""
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


KIND = {
    Kind.KERNEL: "compute",
    Kind.COLLECTIVE: "collective",
    Kind.START_COLLECTIVE: "collective",
    Kind.COPY: "copy",
    Kind.HOST_WORK: "host",
}


def run(events: Iterable[Event], rates: Rates, with_spans: bool = False) -> StepTime:
    """Run a step's events."""
    listed, durations = list(events), Durations(rates)
    found = _Pass(listed, rates, durations, ())
    for _ in range(0 if rates.blocks_host or not found.collectives else MOST_PASSES):
        before = found
        found = _Pass(listed, rates, durations, periods_of(before.collectives))
        if abs(found.end - before.end) <= SETTLED * before.end:
            break
    return found.step_time(found.spans() if with_spans else ())


class _Pass:
    """A step's events in time, with operators slowed down in the periods of collectives of the pass before."""

    def __init__(self, events: Sequence[Event], rates: Rates, durations: Durations, periods: Sequence[Period]) -> None:
        self.ran: list[tuple[Event, float, float]] = []
        """What ran, with when it began and ended."""
        self.collectives: list[tuple[float, float, Work]] = []
        self.unknown: dict[str, None] = {}
        self.slowed = 0.0
        self._events = events
        clock = Clock(rates, Contention(periods, durations))
        for event in events:
            work = event.work
            if work is None:
                if event.kind > Kind.RECORD_STREAM:  # the others are what the allocator alone sees
                    clock.wait(event)
                continue
            seconds = durations.seconds(event.kind, work)
            if seconds is None:
                self.unknown[work.name if not work.group else f"{work.name} ({work.group})"] = None
                seconds = 0.0
            if event.kind is Kind.HOST_WORK:
                begin, end = clock.work_on_host(seconds)
            else:
                begin, end = clock.issue(event, work, seconds)
                self.slowed += end - begin - seconds
                if work.group and event.kind is not Kind.COPY:
                    self.collectives.append((begin, end, work))
            self.ran.append((event, begin, end))
        self.end = clock.now

    def spans(self) -> tuple[Span, ...]:
        """Return when each piece of work ran, with the phase and the block that it belongs to."""
        spans, phase, block, ran = list[Span](), "", -1, iter(self.ran)
        for event in self._events:
            if event.kind is Kind.MARK:
                phase, block = event.label, event.number
            elif event.work is not None:
                _, begin, end = next(ran)
                spans.append(Span(KIND[event.kind], event.stream, begin, end, event.work, phase, block))
        return tuple(spans)

    def step_time(self, spans: tuple[Span, ...]) -> StepTime:
        """Return the step time and what it consists of."""
        busy: dict[str, Intervals] = {"compute": [], "collective": [], "copy": [], "host": []}
        operators, cpu_optimizer = dict[StepPart, float](), Intervals()
        for event, begin, end in self.ran:
            assert event.work is not None
            busy[KIND[event.kind]].append((begin, end))
            if event.kind is Kind.KERNEL and event.stream is Stream.COMPUTE:
                part = part_of(event.work)
                operators[part] = operators.get(part, 0.0) + end - begin
            elif event.kind is Kind.HOST_WORK and event.work.name.startswith("optimizer"):
                cpu_optimizer.append((begin, end))
        compute, collectives = union(busy["compute"]), union(busy["collective"])
        unknown = tuple(self.unknown)
        is_known = not unknown
        copies_are_known = not any(name in unknown for name in ("to_device", "to_host"))
        collectives_are_known = not any("(" in name for name in unknown)
        compute_is_known = all("(" in name or name in ("to_device", "to_host") for name in unknown)
        return StepTime(
            step_seconds=self.end if is_known else None,
            compute_seconds=length(compute) if compute_is_known else None,
            communication_seconds=length(collectives) if collectives_are_known else None,
            exposed_communication_seconds=length(collectives) - overlap(collectives, compute) if is_known else None,
            host_copy_seconds=length(union(busy["copy"])) if copies_are_known else None,
            unknown=unknown,
            cpu_optimizer_seconds=length(cpu_optimizer),
            slowed_seconds=self.slowed,
            parts=parts_of(self.end, operators, busy, cpu_optimizer) if is_known else {},
            spans=spans,
        )
