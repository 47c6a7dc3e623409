"""Data of predicted charts, as fine as a screen shows: live memory over a step, and what each stream runs when."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

import msgspec

from fsdp_bench.plan.question import Question
from fsdp_bench.plan.speed import Speed, speed
from fsdp_bench.replay.live_memory import worst_rank
from fsdp_bench.replay.schedule import Span, StepTime
from fsdp_bench.replay.step_parts import Intervals, union
from fsdp_bench.simulate.events import Category, Event, Kind, Stream
from fsdp_bench.simulate.simulation import BETWEEN_STEPS
from fsdp_bench.simulate.step import SimulatedSteps
from fsdp_bench.spec.errors import SpecError

# -- live memory -------------------------------------------------------------------------------------------------------

CATEGORIES = (
    Category.PARAMETERS,
    Category.OPTIMIZER_STATE,
    Category.GRADIENTS,
    Category.UNSHARDED_PARAMETERS,
    Category.REDUCTION_BUFFERS,
    Category.ACTIVATIONS,
    Category.LOGITS,
    Category.TEMPORARY,
)
"""Categories from the bottom of the stacked chart to its top: memory that stays longest is at the bottom."""

_PLACE = {category: index for index, category in enumerate(CATEGORIES)}
_SKIPPED = ("load", BETWEEN_STEPS)
FIRST_FORWARD = "first forward"
"""The phase of a wrapper's one-time work, before the first operator of the first forward."""
NARROWEST = 0.05
"""Least fraction of a chart's axis for a phase, so that its name is legible."""


@dataclass(frozen=True)
class Moment:
    """Live memory after one allocation or free."""

    live: tuple[int, ...]
    """Bytes in the order of CATEGORIES."""
    block: int | None
    operator: str
    """The operator or symbol of torch that allocated last."""

    @property
    def total(self) -> int:
        """Live bytes of all categories."""
        return sum(self.live)


def phases(events: Sequence[Event]) -> list[tuple[str, list[Moment]]]:
    """Return the names and moments of the phases in order, each micro-batch's; without what lies between steps."""
    live = [0] * len(CATEGORIES)
    found: list[tuple[str, list[Moment]]] = []
    name, block, operator = "load", -1, ""
    for event in events:
        if event.kind == Kind.MARK:
            begins = event.label != name or (name == "forward" and not found)
            if event.label == BETWEEN_STEPS and found and found[-1][0] == "forward":
                found[-1] = (FIRST_FORWARD, found[-1][1])
            name, block = event.label, event.number
            if begins and name not in _SKIPPED:
                found.append((name, [_moment(live, block, operator)]))
        elif event.kind in (Kind.ALLOCATE, Kind.FREE):
            sign = 1 if event.kind == Kind.ALLOCATE else -1
            live[_PLACE[event.category]] += sign * event.num_bytes
            operator = event.label if sign > 0 else operator
            if name not in _SKIPPED:
                found[-1][1].append(_moment(live, block, operator))
    return found


def _moment(live: list[int], block: int, operator: str) -> Moment:
    return Moment(tuple(live), block if block >= 0 else None, operator)


MOMENTS = 260
"""Most moments of a step."""


class DrawnPhase(msgspec.Struct, frozen=True, kw_only=True):
    """Live memory over one phase."""

    name: str
    width: float
    """Its fraction of the axis, which counts allocations and frees, not seconds."""
    live_bytes: dict[str, tuple[int, ...]]
    """By category, from the bottom of a stacked chart to its top: one number for each moment, equally far apart."""

    @property
    def peak_bytes(self) -> int:
        """The most live bytes of all categories together."""
        return max(map(sum, zip(*self.live_bytes.values(), strict=True)), default=0)


class DrawnMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Live memory over one step. No peak is lost: of moments at the same place the highest is kept."""

    phases: tuple[DrawnPhase, ...]
    peak_bytes: int
    peak_phase: str
    peak_block: int | None
    peak_operator: str


def drawn_memory(simulated: SimulatedSteps, rank: int | None = None, most: int = MOMENTS) -> DrawnMemory:
    """Simulate a step with every block, and return its live memory; by default of the rank with the highest peak.

    The phase that only the first step has is left out, unless the peak is in it. The width of a phase is by its number
    of allocations and frees, but enough for its name. Of moments that fall together the highest is kept.
    """
    rank = worst_rank(simulated.for_memory)[0].rank if rank is None else rank
    found = phases(simulated.step(rank, every_block=True).events)
    peaks = [max(moments, key=_total) for _, moments in found]
    peak = max(peaks, key=_total)
    highest = peaks.index(peak)
    shown = [one for place, one in enumerate(found) if one[0] != FIRST_FORWARD or place == highest]
    count, least = sum(len(moments) for _, moments in shown), min(NARROWEST, 0.5 / len(shown))
    widths = [max(len(moments) / count, least) for _, moments in shown]
    return DrawnMemory(
        phases=tuple(
            _drawn_phase(name, moments, width / sum(widths), most)
            for (name, moments), width in zip(shown, widths, strict=True)
        ),
        peak_bytes=peak.total,
        peak_phase=found[highest][0],
        peak_block=peak.block,
        peak_operator=peak.operator,
    )


def _drawn_phase(name: str, moments: Sequence[Moment], width: float, most: int) -> DrawnPhase:
    kept = min(max(1, round(width * most)), len(moments))
    bounds = [index * len(moments) // kept for index in range(kept + 1)]
    thinned = [max(moments[first:last], key=_total) for first, last in pairwise(bounds)]
    live = {category.value: tuple(one.live[place] for one in thinned) for place, category in enumerate(CATEGORIES)}
    return DrawnPhase(name=name, width=width, live_bytes={k: v for k, v in live.items() if any(v)})


_total = attrgetter("total")


# -- what runs when ----------------------------------------------------------------------------------------------------


def step_speeds(questions: Sequence[Question], option: str = "step-chart") -> list[Speed]:
    """Predict a step of each setup with the time spans of all it runs. Raises SpecError if a step's time is unknown."""
    found = [speed(q.simulated, q.hardware, q.profile, with_spans=True) for q in questions]
    unknown = next((one.time for one in found if one.time.step_seconds is None), None)
    if unknown is not None:
        raise SpecError(f"{option}: the step's time is unknown: {', '.join(unknown.unknown)}")
    return found


def exposed_spans(spans: Sequence[Span]) -> Intervals:
    """Return the time spans in which a collective runs and no operator does."""
    compute = union([(span.begin, span.end) for span in spans if span.kind == "compute"])
    found: Intervals = []
    for begin, end in union([(span.begin, span.end) for span in spans if span.kind == "collective"]):
        for start, stop in compute:
            if stop <= begin or start >= end:
                continue
            if start > begin:
                found.append((begin, start))
            begin = max(begin, stop)
        if end > begin:
            found.append((begin, end))
    return found


def role_of(span: Span) -> str:
    """Return what a span does: an operator's phase, a collective's kind, ``copy``, ``host``, else ``cast``.

    Operators on a stream of collectives are casts, copies and divisions of what is sent, in any phase.
    """
    if span.kind == "collective":
        return span.work.name
    if span.kind in ("copy", "host"):
        return span.kind
    return span.phase if span.stream is Stream.COMPUTE else "cast"


def merged(spans: Intervals, begin: float, end: float, pixel: float) -> Intervals:
    """Return the parts of spans in an interval; those that are less than half a pixel apart become one."""
    found: Intervals = []
    for start, stop in spans:
        start, stop = max(start, begin), min(stop, end)
        if found and start - found[-1][1] < pixel / 2:
            found[-1] = (found[-1][0], stop)
        elif stop > start:
            found.append((start, stop))
    return found


PIXELS = 1000
"""Spans that are less than half a pixel apart, of so many in the whole interval, become one."""
_DIGITS = 9
"""Decimals of a second that are kept."""


class DrawnRow(msgspec.Struct, frozen=True, kw_only=True):
    """The work of one stream in one role."""

    stream: str
    """The name of simulate.events.Stream in lower case, or ``host``."""
    role: str
    """A phase of the step for operators, the kind of a collective, ``copy``, ``cast`` or ``host``."""
    spans: tuple[tuple[float, float], ...]
    """Begin and end in seconds, in order."""


class DrawnView(msgspec.Struct, frozen=True, kw_only=True):
    """One interval of a step."""

    begin: float
    end: float
    rows: tuple[DrawnRow, ...]
    exposed: tuple[tuple[float, float], ...]
    """When a collective runs and no operator does."""

    def __post_init__(self) -> None:
        if not self.begin < self.end:
            raise ValueError(f"an interval from {self.begin} to {self.end} s")


class DrawnStreams(msgspec.Struct, frozen=True, kw_only=True):
    """The streams of one step, in seconds."""

    step_seconds: float
    compute_seconds: float
    communication_seconds: float
    exposed_communication_seconds: float
    whole: DrawnView
    middle_of_backward: DrawnView


class DrawnStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step of one setup."""

    num_micro_batches: int
    """Micro-batches that are drawn; of many, the first few."""
    memory: DrawnMemory
    streams: DrawnStreams | None
    """None if the step's time is not known."""


def drawn_streams(time: StepTime, num_blocks: int, with_host: bool = False) -> DrawnStreams | None:
    """Return the chart of a model's streams, ``with_host`` also the host's work; None if the time is unknown."""
    if time.step_seconds is None or not time.spans:
        return None
    return DrawnStreams(
        step_seconds=time.step_seconds,
        compute_seconds=time.compute_seconds or 0.0,
        communication_seconds=time.communication_seconds or 0.0,
        exposed_communication_seconds=time.exposed_communication_seconds or 0.0,
        whole=_view(time.spans, 0.0, time.step_seconds, with_host),
        middle_of_backward=_view(time.spans, *_middle_of_backward(time.spans, num_blocks), with_host),
    )


def _middle_of_backward(spans: Sequence[Span], num_blocks: int) -> tuple[float, float]:
    """Return the time span of about three blocks; of three parts of the step if it has no backward."""
    operators = [span for span in spans if span.phase == "backward" and span.kind == "compute"] or spans
    begin, end = operators[0].begin, max(span.end for span in operators)
    middle, each = (begin + end) / 2, (end - begin) / num_blocks
    return max(middle - 1.5 * each, begin), min(middle + 1.5 * each, end)


def _view(spans: Sequence[Span], begin: float, end: float, with_host: bool) -> DrawnView:
    by_row: dict[tuple[str, str], list[Span]] = {}
    for span in spans:
        if (with_host or span.kind != "host") and span.end > begin and span.begin < end:
            stream = "host" if span.kind == "host" else span.stream.name.lower()
            by_row.setdefault((stream, role_of(span)), []).append(span)

    def kept(intervals: Intervals) -> tuple[tuple[float, float], ...]:
        found = merged(intervals, begin, end, (end - begin) / PIXELS)
        return tuple((round(start, _DIGITS), round(stop, _DIGITS)) for start, stop in found)

    rows = [
        DrawnRow(stream=stream, role=role, spans=kept(union([(span.begin, span.end) for span in own])))
        for (stream, role), own in by_row.items()
    ]
    return DrawnView(begin=begin, end=end, rows=tuple(rows), exposed=kept(exposed_spans(spans)))
