"""Live memory over one training step: bytes by category after every allocation and free, phase by phase."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from fsdp_bench.plan.question import Question
from fsdp_bench.replay.live_memory import worst_rank
from fsdp_bench.simulate.events import Category, Event, Kind
from fsdp_bench.simulate.simulation import BETWEEN_STEPS
from fsdp_bench.simulate.step import SimulatedSteps

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


@dataclass(frozen=True)
class PhaseMemory:
    """Live memory over one phase of one micro-batch, or over the optimizer's step."""

    name: str
    moments: tuple[Moment, ...]

    @property
    def peak(self) -> Moment:
        """The first moment with the most live bytes."""
        return max(self.moments, key=lambda moment: moment.total)


@dataclass(frozen=True)
class MemoryTimeline:
    """Live memory over one step of one setup."""

    phases: tuple[PhaseMemory, ...]

    @property
    def peak_phase(self) -> PhaseMemory:
        """The first phase that reaches the peak."""
        return max(self.phases, key=lambda phase: phase.peak.total)

    @property
    def peak(self) -> Moment:
        """The moment with the most live bytes."""
        return self.peak_phase.peak


def memory_timeline(question: Question) -> MemoryTimeline:
    """Simulate a step with every block, and return its live memory."""
    return rank_timeline(question.simulated, worst_rank(question.simulated.for_memory)[0].rank)


def rank_timeline(simulated: SimulatedSteps, rank: int) -> MemoryTimeline:
    """Return the live memory of one rank over a step with every block."""
    return MemoryTimeline(tuple(_shown(phases(simulated.step(rank, every_block=True).events))))


NARROWEST = 0.05
"""Least fraction of a chart's axis for a phase, so that its name is legible."""


def widths(timeline: MemoryTimeline) -> list[float]:
    """Return each phase's fraction of the axis, by its number of allocations and frees but wide enough for its name."""
    total = sum(len(phase.moments) for phase in timeline.phases)
    least = min(NARROWEST, 0.5 / len(timeline.phases))
    found = [max(len(phase.moments) / total, least) for phase in timeline.phases]
    return [width / sum(found) for width in found]


def thinned(phase: PhaseMemory, most: int) -> list[Moment]:
    """Return at most so many of a phase's moments: the highest of those that fall together, so that no peak is lost."""
    count = len(phase.moments)
    kept = min(max(1, most), count)
    bounds = [index * count // kept for index in range(kept + 1)]
    return [max(phase.moments[first:last], key=lambda moment: moment.total) for first, last in pairwise(bounds)]


def phases(events: Sequence[Event]) -> list[PhaseMemory]:
    """Return the phases of the step in order. Loading and the time between steps are not among them."""
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
    return [PhaseMemory(name, tuple(moments)) for name, moments in found]


def _shown(found: list[PhaseMemory]) -> list[PhaseMemory]:
    """Drop the phase that only the first step has, unless the peak is in it."""
    highest = max(found, key=lambda phase: phase.peak.total)
    return [phase for phase in found if phase.name != FIRST_FORWARD or phase is highest]


def _moment(live: list[int], block: int, operator: str) -> Moment:
    return Moment(tuple(live), block if block >= 0 else None, operator)


# -- as data for JSON documents, as fine as a screen shows -------------------------------------------------------------

MOMENTS = 260
"""Most moments of a step."""


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
