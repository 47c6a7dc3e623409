"""Replays a step's events: peak allocated by phase, and what the peak consists of.

The middle blocks of a model all do the same. So a step is simulated with SIMULATED_BLOCKS blocks, and the events of
one of them count as often as the whole model has more: exact, because what a block adds is the same each time, so
that a peak within it lies in its first or in its last turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul
from typing import NamedTuple

from fsdp_bench.simulate.events import Category, Event, Kind

SIMULATED_BLOCKS = 3
"""The first, the last, and the one between them: prefetching and deferred frees reach one block ahead and one back."""

STRETCHED_BLOCK = 1
"""The one of them that stands for all that are left out: its neighbours on both sides are simulated."""

BREAKDOWN = tuple(category.value for category in Category)


@dataclass(frozen=True)
class Peak:
    """Where the most is allocated in one phase."""

    num_bytes: int
    event: int
    """Index of the event that reaches it; -1 for the phase's beginning."""
    turn: int
    """How often the stretched block's part had been repeated before."""


@dataclass(frozen=True)
class Replay:
    """Peak allocated bytes of one step of one rank."""

    phases: dict[str, Peak]
    end_bytes: int
    """What is left at the end of the events."""

    @property
    def peak_phase(self) -> str:
        """The phase with the highest peak; the first of equals."""
        return max(self.phases, key=lambda phase: self.phases[phase].num_bytes)

    @property
    def peak_bytes(self) -> int:
        """Peak allocated over all phases."""
        return self.phases[self.peak_phase].num_bytes


class Part(NamedTuple):
    """What lies between two marks."""

    first: int
    """The first event, and the one behind the last."""
    last: int
    phase: str
    block: int
    """-1 outside of blocks."""


class Course(NamedTuple):
    """What happens, cut at the marks. Each event's size is told apart: models share a course."""

    events: Sequence[Event]
    parts: list[Part]
    signs: list[int]
    """1 for what is allocated, -1 for what is freed."""

    @classmethod
    def of(cls, events: Sequence[Event]) -> Course:
        """Cut events at the marks."""
        sign = {Kind.ALLOCATE: 1, Kind.FREE: -1}
        return cls(events, _parts(events), [sign.get(event[0], 0) for event in events])

    def replay(self, num_bytes: Sequence[int], extra_blocks: int) -> Replay:
        """Follow the live bytes; the stretched block's parts run ``1 + extra_blocks`` times."""
        phases: dict[str, Peak] = {}
        levels = list(accumulate(map(mul, self.signs, num_bytes), initial=0))
        repeated = 0
        for first, last, phase, block in self.parts:
            top, turn = max(levels[first : last + 1]) + repeated, 0
            if block == STRETCHED_BLOCK and extra_blocks:
                added = extra_blocks * (levels[last] - levels[first])
                repeated += added
                if added > 0:
                    top, turn = top + added, extra_blocks
            known = phases.get(phase)
            if known is None or top > known.num_bytes:
                event = first - 1 + levels[first : last + 1].index(max(levels[first : last + 1]))
                phases[phase] = Peak(top, event, turn)
        return Replay(phases, levels[-1] + repeated)

    def breakdown(self, num_bytes: Sequence[int], peak: Peak, extra_blocks: int) -> dict[str, int]:
        """Return what is alive at a peak by category; the values add up to it."""
        totals: dict[str, int] = dict.fromkeys(BREAKDOWN, 0)
        changes = list(map(mul, self.signs, num_bytes))

        def add(first: int, last: int, times: int) -> None:
            for event, change in zip(self.events[first:last], changes[first:last], strict=True):
                totals[event[3]] += times * change

        for first, last, _, block in self.parts:
            reached = first <= peak.event + 1 <= last
            whole_turns = 0
            if block == STRETCHED_BLOCK and extra_blocks:
                whole_turns = peak.turn if reached else 1 + extra_blocks
            elif not reached:
                whole_turns = 1
            if whole_turns:
                add(first, last, whole_turns)
            if reached:
                add(first, peak.event + 1, 1)
                return totals
        return totals


def _parts(events: Sequence[Event]) -> list[Part]:
    mark = Kind.MARK
    cuts = [index for index, event in enumerate(events) if event[0] == mark]
    parts = [Part(0, cuts[0] if cuts else len(events), "load", -1)]
    for index, last in pairwise([*cuts, len(events)]):
        phase, block, before = events[index].label, events[index].number, parts[-1]
        if (phase, block) == (before.phase, before.block):  # as of several units in one block, which repeat together
            parts[-1] = before._replace(last=last)
        else:
            parts.append(Part(index + 1, last, phase, block))
    return parts


def replay(events: Sequence[Event], extra_blocks: int = 0) -> Replay:
    """Follow the live bytes of events with their sizes."""
    return Course.of(events).replay([event[2] for event in events], extra_blocks)


def breakdown(events: Sequence[Event], peak: Peak, extra_blocks: int = 0) -> dict[str, int]:
    """Return what is alive at a peak of events with their sizes."""
    return Course.of(events).breakdown([event[2] for event in events], peak, extra_blocks)
