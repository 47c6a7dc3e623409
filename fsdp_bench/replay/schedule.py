"""When everything of a step runs: the host issues, streams run in order, a group's collectives come one by one.

An operator starts when the host has issued it and its stream is free. A collective also waits for its group's previous
collective, because a communicator runs one at a time. On a CPU the host executes everything itself, including gloo's
copies and reductions: a collective that runs beside operators takes their cores from them. On a GPU a collective slows
down the operators beside it (streams.py).
Exposed time is that in which a collective runs and no operator does.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fsdp_bench.rates.datasheet import Rates
from fsdp_bench.replay.step_parts import Intervals, StepPart, length, overlap, part_of, parts_of, union
from fsdp_bench.replay.streams import Ran, Streams, without_single_operators
from fsdp_bench.simulate.events import Event, Kind, Stream, Work
from fsdp_bench.simulate.repeat import Log


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
    """The step's parts, which add up to it. Empty where the step is unknown."""
    spans: tuple[Span, ...] = ()
    """Where they were asked for."""


def schedule(log: Log, rates: Rates, with_spans: bool = False) -> StepTime:
    """Return when the last step of a log ends, and what was exposed."""
    return run(log.last_step(), rates, with_spans)


def only_step_seconds(log: Log, rates: Rates) -> float | None:
    """Return when the last step of a log ends, as ``schedule`` does; None if a rate is unknown."""
    streams = Streams(rates)
    end = streams.run(log.last_step() if rates.blocks_host else log.last_step_as(without_single_operators))
    return None if streams.unknown else end


KIND = {
    Kind.KERNEL: "compute",
    Kind.COLLECTIVE: "collective",
    Kind.START_COLLECTIVE: "collective",
    Kind.COPY: "copy",
    Kind.HOST_WORK: "host",
}


def run(events: Iterable[Event], rates: Rates, with_spans: bool = False) -> StepTime:
    """Run a step's events."""
    listed, streams = list(events), Streams(rates)
    return step_time(listed, streams, streams.run(listed), with_spans)


def step_time(events: Iterable[Event], streams: Streams, end: float, with_spans: bool) -> StepTime:
    """Return the time of a step that has run on ``streams`` and took until ``end``."""
    spans = tuple(_spans(events, streams.ran)) if with_spans else ()
    waits = [*streams.waits, (streams.end, end)] if streams.end < end else streams.waits
    return _step_time(end, streams.ran, streams.unknown, spans, waits)


def _spans(events: Iterable[Event], ran: Iterable[Ran]) -> Iterator[Span]:
    """Yield when each piece of work ran, with the phase and the block that it belongs to."""
    phase, block, each = "", -1, iter(ran)
    for event in events:
        if event.kind is Kind.MARK:
            phase, block = event.label, event.number
        elif event.work is not None:
            one = next(each)
            yield Span(KIND[event.kind], event.stream, one.begin, one.end, event.work, phase, block)


def _step_time(
    end: float, ran: Iterable[Ran], missing: Sequence[tuple[Kind, Work]], spans: tuple[Span, ...], waits: Intervals
) -> StepTime:
    """Return the step time and what it consists of."""
    busy: dict[str, Intervals] = {"compute": [], "collective": [], "copy": [], "host": []}
    operators, cpu_optimizer, slowed = dict[StepPart, float](), Intervals(), 0.0
    for one in ran:
        kind = one.event.kind
        busy[KIND[kind]].append((one.begin, one.end))
        if kind is Kind.KERNEL and one.event.stream is Stream.COMPUTE:
            part = part_of(one.work, one.event.label)
            operators[part] = operators.get(part, 0.0) + one.end - one.begin
            slowed += one.end - one.begin - one.seconds
        elif kind is Kind.HOST_WORK and one.work.name.startswith("optimizer"):
            cpu_optimizer.append((one.begin, one.end))
    compute, collectives = union(busy["compute"]), union(busy["collective"])
    is_known, unknown_kinds = not missing, {KIND[kind] for kind, _ in missing}
    names = [work.name if not work.group else f"{work.name} ({work.group})" for _, work in missing]
    return StepTime(
        step_seconds=end if is_known else None,
        compute_seconds=length(compute) if unknown_kinds <= {"collective", "copy"} else None,
        communication_seconds=length(collectives) if "collective" not in unknown_kinds else None,
        exposed_communication_seconds=length(collectives) - overlap(collectives, compute) if is_known else None,
        host_copy_seconds=length(union(busy["copy"])) if "copy" not in unknown_kinds else None,
        unknown=tuple(dict.fromkeys(names)),
        cpu_optimizer_seconds=length(cpu_optimizer),
        slowed_seconds=max(slowed, 0.0),
        parts=parts_of(end, operators, busy, cpu_optimizer, waits) if is_known else {},
        spans=spans,
    )
