"""One training step as data for JSON documents: memory over the step and what runs when, as fine as a screen shows."""

from __future__ import annotations

import msgspec

from fsdp_bench.plan.chart_data.memory_timeline import CATEGORIES, MemoryTimeline, thinned, widths
from fsdp_bench.plan.chart_data.step_streams import StepStreams, merged, role_of
from fsdp_bench.replay.schedule import Span
from fsdp_bench.replay.step_parts import Intervals, union
from fsdp_bench.simulate.events import Stream

MOMENTS = 260
"""Most moments of a step."""
PIXELS = 1000
"""Spans that are less than half a pixel apart, of so many in the whole interval, become one."""
_DIGITS = 9
"""Decimals of a second that are kept."""


class DrawnPhase(msgspec.Struct, frozen=True, kw_only=True):
    """Live memory over one phase."""

    name: str
    width: float
    """Its fraction of the axis, which counts allocations and frees, not seconds."""
    live_bytes: dict[str, tuple[int, ...]]
    """By category, from the bottom of a stacked chart to its top: one number for each moment, equally far apart."""


class DrawnMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Live memory over one step. No peak is lost: of moments at the same place the highest is kept."""

    phases: tuple[DrawnPhase, ...]
    peak_bytes: int
    peak_phase: str
    peak_block: int | None
    peak_operator: str


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


def drawn_memory(timeline: MemoryTimeline, most: int = MOMENTS) -> DrawnMemory:
    """Return the data of the chart of live memory, of at most so many moments."""
    phases = []
    for phase, width in zip(timeline.phases, widths(timeline), strict=True):
        moments = thinned(phase, round(width * most))
        live = {
            category.value: tuple(moment.live[place] for moment in moments) for place, category in enumerate(CATEGORIES)
        }
        phases.append(DrawnPhase(name=phase.name, width=width, live_bytes={k: v for k, v in live.items() if any(v)}))
    peak = timeline.peak
    return DrawnMemory(
        phases=tuple(phases),
        peak_bytes=peak.total,
        peak_phase=timeline.peak_phase.name,
        peak_block=peak.block,
        peak_operator=peak.operator,
    )


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
