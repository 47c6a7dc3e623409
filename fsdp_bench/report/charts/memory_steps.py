"""What the picture of a step shows: live bytes by category over the step's events, with the phases.

The axis has no seconds: within a phase the events stand evenly, in the order in which Python issues them, and a phase
with few events is as wide as people can read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_bench.plan.question import Question
from fsdp_bench.replay.live_memory import worst_rank
from fsdp_bench.simulate.events import Category, Event, Kind
from fsdp_bench.simulate.step import BETWEEN_STEPS, steady_step

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
"""From the bottom of the stack to its top: what stays longest is lowest, so that it stands level."""

_PLACE = {category: index for index, category in enumerate(CATEGORIES)}
_SKIPPED = ("load", BETWEEN_STEPS)
FIRST_FORWARD = "first forward"
"""What a wrapper does once, before the first forward's first operator."""


@dataclass(frozen=True)
class Moment:
    """What is alive after one event."""

    live: tuple[int, ...]
    """Bytes in the order of CATEGORIES."""
    block: int | None
    operator: str
    """The operator or symbol of torch that allocated last."""

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self.live)


@dataclass(frozen=True)
class Phase:
    """One phase of one micro-batch, or the optimizer's."""

    name: str
    moments: tuple[Moment, ...]


@dataclass(frozen=True)
class Column:
    """A moment and where on the axis it begins, from 0 to 1."""

    x: float
    moment: Moment


@dataclass(frozen=True)
class Span:
    """A phase's place on the axis."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """One setup's step, thinned to the columns of a picture."""

    columns: tuple[Column, ...]
    spans: tuple[Span, ...]
    peak: Column
    peak_phase: str
    num_events: int
    """Allocations and frees in the step, before thinning."""


def timeline(question: Question, num_columns: int, narrowest: float = 0.08) -> Timeline:
    """Simulate a step with every block, and thin it to a picture.

    Args:
        question: the setup.
        num_columns: about how many columns are kept; of each, its highest moment, so that no peak is lost.
        narrowest: part of the axis that a phase takes at least, as long as there are few phases.
    """
    asked = question.model, question.setup, question.kernel_set
    rank = worst_rank(*asked)[0].rank
    found = _shown(phases(steady_step(*asked, rank, num_blocks=question.model.num_hidden_layers).events))
    spans = _spans(found, narrowest)
    columns: list[Column] = []
    for phase, span in zip(found, spans, strict=True):
        columns += _thinned(phase, span, num_columns)
    peak = max(columns, key=lambda column: column.moment.total)
    peak_phase = next(span.name for span in spans if span.start <= peak.x < span.end)
    return Timeline(tuple(columns), spans, peak, peak_phase, sum(len(phase.moments) for phase in found))


def phases(events: Sequence[Event]) -> list[Phase]:
    """Return the step's phases in order; loading, and what lies between steps, only decides where they begin."""
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
    return [Phase(name, tuple(moments)) for name, moments in found]


def _shown(found: list[Phase]) -> list[Phase]:
    """Leave out what only the first step does, unless the peak is there."""
    highest = max(found, key=lambda phase: max(moment.total for moment in phase.moments))
    return [phase for phase in found if phase.name != FIRST_FORWARD or phase is highest]


def _moment(live: list[int], block: int, operator: str) -> Moment:
    return Moment(tuple(live), block if block >= 0 else None, operator)


def _spans(found: list[Phase], narrowest: float) -> tuple[Span, ...]:
    """Give every phase room by its events, and each at least that part of the axis."""
    least = min(narrowest, 0.5 / len(found))
    total = sum(len(phase.moments) for phase in found)
    widths = [max(len(phase.moments) / total, least) for phase in found]
    spans, start = [], 0.0
    for phase, width in zip(found, widths, strict=True):
        end = start + width / sum(widths)
        spans.append(Span(phase.name, start, end))
        start = end
    return tuple(spans)


def _thinned(phase: Phase, span: Span, num_columns: int) -> list[Column]:
    """Keep the highest moment of every column."""
    count = len(phase.moments)
    width = span.end - span.start
    most = max(1, round(width * num_columns))
    kept: list[Column] = []
    for column in range(min(most, count)):
        first, last = column * count // min(most, count), (column + 1) * count // min(most, count)
        moment = max(phase.moments[first:last], key=lambda moment: moment.total)
        kept.append(Column(span.start + width * first / count, moment))
    return kept
