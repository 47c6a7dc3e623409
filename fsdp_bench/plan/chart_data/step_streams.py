"""The streams of one training step: what runs when on each, and when communication is exposed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from fsdp_bench.plan.chart_data.memory_timeline import DrawnMemory
from fsdp_bench.plan.question import Question
from fsdp_bench.plan.speed import Speed, speed
from fsdp_bench.replay.schedule import Span
from fsdp_bench.replay.step_parts import Intervals, union
from fsdp_bench.simulate.events import Stream
from fsdp_bench.spec.errors import SpecError


@dataclass(frozen=True)
class StepStreams:
    """The streams of one training step of a setup."""

    question: Question
    speed: Speed

    @property
    def spans(self) -> Sequence[Span]:
        """Operators, copies and collectives with their stream, begin and end in seconds."""
        return self.speed.time.spans

    @property
    def exposed(self) -> Intervals:
        """Times at which a collective runs and no operator does."""
        return exposed_spans(self.spans)

    @property
    def middle_of_backward(self) -> tuple[float, float]:
        """The time span of about three blocks in the middle of backward."""
        spans = [span for span in self.spans if span.phase == "backward" and span.kind == "compute"]
        begin, end = spans[0].begin, max(span.end for span in spans)
        middle, each = (begin + end) / 2, (end - begin) / self.question.model.num_hidden_layers
        return max(middle - 1.5 * each, begin), min(middle + 1.5 * each, end)


def step_streams(questions: Sequence[Question]) -> list[StepStreams]:
    """Predict the streams of a training step for each setup.

    Raises:
        SpecError: if a setup's step time is not known.
    """
    found = [StepStreams(q, speed(q.simulated, q.hardware, q.profile, with_spans=True)) for q in questions]
    unknown = next((one.speed.time for one in found if one.speed.time.step_seconds is None), None)
    if unknown is not None:
        raise SpecError(f"step-chart: the step's time is unknown: {', '.join(unknown.unknown)}")
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
    """Return what a span does: the phase of an operator, the kind of a collective, ``copy``; else ``cast``.

    Operators on a stream of collectives are casts, copies and divisions of what is sent, in any phase.
    """
    if span.kind == "collective":
        return span.work.name
    if span.kind == "copy":
        return "copy"
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


# -- as data for JSON documents, as fine as a screen shows -------------------------------------------------------------

PIXELS = 1000
"""Spans that are less than half a pixel apart, of so many in the whole interval, become one."""
_DIGITS = 9
"""Decimals of a second that are kept."""


class DrawnRow(msgspec.Struct, frozen=True, kw_only=True):
    """The work of one stream in one role."""

    stream: str
    """The name of simulate.events.Stream in lower case."""
    role: str
    """A phase of the step for operators, the kind of a collective, ``copy`` or ``cast``."""
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


def drawn_streams(streams: StepStreams) -> DrawnStreams | None:
    """Return the data of the chart of streams; None if the step's time is not known."""
    time = streams.speed.time
    if time.step_seconds is None or not streams.spans:
        return None
    return DrawnStreams(
        step_seconds=time.step_seconds,
        compute_seconds=time.compute_seconds or 0.0,
        communication_seconds=time.communication_seconds or 0.0,
        exposed_communication_seconds=time.exposed_communication_seconds or 0.0,
        whole=_view(streams, 0.0, time.step_seconds),
        middle_of_backward=_view(streams, *streams.middle_of_backward),
    )


def _view(streams: StepStreams, begin: float, end: float) -> DrawnView:
    by_row: dict[tuple[Stream, str], list[Span]] = {}
    for span in streams.spans:
        if span.kind != "host" and span.end > begin and span.begin < end:
            by_row.setdefault((span.stream, role_of(span)), []).append(span)

    def kept(intervals: Intervals) -> tuple[tuple[float, float], ...]:
        found = merged(intervals, begin, end, (end - begin) / PIXELS)
        return tuple((round(start, _DIGITS), round(stop, _DIGITS)) for start, stop in found)

    rows = [
        DrawnRow(stream=stream.name.lower(), role=role, spans=kept(union([(span.begin, span.end) for span in own])))
        for (stream, role), own in by_row.items()
    ]
    return DrawnView(begin=begin, end=end, rows=tuple(rows), exposed=kept(streams.exposed))
