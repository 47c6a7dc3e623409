"""Live memory over one training step: bytes by category after every allocation and free, phase by phase."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

import msgspec

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
    """Simulate a step with every block, and return its live memory.

    The phase that only the first step has is left out, unless the peak is in it. The width of a phase is by its number
    of allocations and frees, but enough for its name.

    Args:
        simulated: the steps of the setup.
        rank: the rank; by default the one with the highest peak.
        most: the most moments; of those that fall together the highest is kept.
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
