"""A step's events as a program: the part of a middle block written once, with how often it runs.

The blocks between the first and the last do the same, each to its own tensors and to those of its neighbours. So six
blocks are simulated, and the parts of one of them stand for all that are left out: in the turn for block ``v`` they
name what is in block ``v - 1`` where the simulated part names what is in block 1. What comes behind it runs once, in
the turn that the number of blocks left out gives: so one simulation is the program of every depth.

That this is so is checked, not assumed: the parts of blocks 2 and 3 must be the same instruction by instruction, no
block may name what is further away than its second neighbour, and nothing outside of blocks may name what those two
make. Where it is not so ``alike`` gives None, and every block has to be simulated.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from fsdp_bench.predict.events import Event, Kind
from fsdp_bench.predict.malloc import Code

SIMULATED_BLOCKS = 6
"""Two that are compared, and as many before and behind them as a part reaches."""

REPEATED_BLOCK = 2
"""Whose parts are repeated; the next one's are compared with them."""

REACH = 2
"""How many blocks away a block's part may name something."""

LAST_PHASE = "optimizer"
"""With which a step ends."""

BLOCK = 1 << 24
"""What names of tensors grow by from one block to the next, and within a block from one pass over them to the next."""
PASS = 1 << 14

_ALLOCATE, _RECORD_EVENT, _HOST_WAIT, _MARK = Kind.ALLOCATE, Kind.RECORD_EVENT, Kind.HOST_WAIT, Kind.MARK
_OF_A_TENSOR = (Kind.FREE, Kind.RECORD_STREAM)


class Part(NamedTuple):
    """Consecutive instructions of one phase, of one block or of none."""

    phase: str
    block: int
    """In turn 0; -1 outside of blocks."""
    goes_down: bool
    """In this pass a later block comes before an earlier one."""
    begin: int
    """The first instruction, and the one behind the last."""
    end: int


class _Cuts(NamedTuple):
    """Events without marks, their parts, and the name of each one's tensor."""

    events: list[Event]
    parts: list[Part]
    names: list[int]


@dataclass(frozen=True)
class Instructions:
    """What simulated blocks do, in columns: of as many blocks as one likes."""

    events: list[Event]
    """The event that each instruction is from, for its label."""
    parts: list[Part]
    kind: Sequence[int]
    tensor: Sequence[int]
    stride: Sequence[int]
    num_bytes: Sequence[int]
    """Symbolic while a simulation is traced."""
    stream: Sequence[int]
    num_outside: int
    """Tensors that are made outside of blocks; they have the first numbers."""
    num_each: int
    """Numbers for those of each block."""
    num_blocks: int
    num_events: int
    """That are recorded."""
    num_repeated: int = 0
    """Instructions of a step that is there several times, at the end."""
    repetitions: int = 0
    """How often besides the first."""


@dataclass(frozen=True)
class Program:
    """Instructions and for how many blocks, besides those that were simulated, they stand."""

    instructions: Instructions
    extra_blocks: int

    @property
    def parts(self) -> list[Part]:
        """In their order."""
        return self.instructions.parts

    @property
    def num_tensors(self) -> int:
        """Numbers for tensors."""
        done = self.instructions
        return done.num_outside + done.num_each * (done.num_blocks + self.extra_blocks)

    @property
    def num_events(self) -> int:
        """No fewer than are recorded."""
        return (1 + self.extra_blocks) * self.instructions.num_events

    def num_parts(self, steps: int) -> int:
        """Return how many parts there are to the end of a step; all of them where there are no more steps."""
        phases = [part.phase for part in self.parts]
        ends = [at for at, (phase, after) in enumerate(pairwise(phases), 1) if phase == LAST_PHASE != after]
        return ends[steps - 1] if steps <= len(ends) else len(phases)

    def turns(self, part: Part) -> range:
        """Return the turns in which a part runs: its tensors' numbers grow by ``turn * stride``."""
        extra = self.extra_blocks
        if part.block == REPEATED_BLOCK:
            return range(extra + 1)[:: -1 if part.goes_down else 1]
        is_before = 0 <= part.block < REPEATED_BLOCK
        return range(1) if is_before else range(extra, extra + 1)

    def code(self) -> Code:
        """Return what the allocator runs."""
        done, turns = self.instructions, [self.turns(part) for part in self.parts]
        return Code(
            kind=done.kind,
            tensor=done.tensor,
            stride=done.stride,
            num_bytes=done.num_bytes,
            stream=done.stream,
            begin=array("q", [part.begin for part in self.parts]),
            end=array("q", [part.end for part in self.parts]),
            first_turn=array("q", [turn.start for turn in turns]),
            turn_step=array("q", [turn.step for turn in turns]),
            num_turns=array("q", [len(turn) for turn in turns]),
        )


def plain(events: Iterable[Event]) -> Program:
    """Return events as a program in which everything runs once.

    Raises:
        ValueError: when events are not waited for in the order in which they are recorded.
    """
    cuts = _cut(events, is_plain=True)
    if isinstance(cuts, int):
        raise ValueError(f"event {cuts} is waited for out of turn; a program waits in the order of recording")
    columns = _columns(cuts)
    return Program(replace(columns, num_bytes=array("q", columns.num_bytes)), 0)


def alike(events: Sequence[Event], others: Sequence[Event] = ()) -> Instructions | None:
    """Return what SIMULATED_BLOCKS blocks do, to be repeated; None where the blocks are not alike.

    ``others`` is a repetition of what they do, which is known to be alike when they are.
    """
    cuts = _cut(events)
    if isinstance(cuts, int) or not _repeats(cuts):
        return None
    whole = _cut([*events, *others]) if others else cuts
    return None if isinstance(whole, int) else _columns(whole)


def _cut(events: Iterable[Event], is_plain: bool = False) -> _Cuts | int:
    """Cut at the marks and name tensors; returns the number of an event that is waited for out of turn.

    Events are waited for in the order in which they are recorded: FSDP1's _FreeEventQueue is the only one that waits.
    So their numbers are not needed.
    """
    kept: list[Event] = []
    names: list[int] = []
    parts: list[Part] = []
    known: dict[int, int] = {}
    recorded = deque[int]()
    passes, begin = _Passes(is_plain), 0
    name = 0
    for event in events:
        kind = event[0]
        if kind == _MARK:
            if not passes.are_at(event[5], event[1]):
                parts.append(passes.part(begin, len(kept)))
                begin = len(kept)
                name = passes.move(event[5], event[1], name)
            continue
        if kind == _ALLOCATE:
            known[event[1]] = name
            names.append(name)
            name += 1
        elif kind in _OF_A_TENSOR:
            names.append(known[event[1]])
        else:
            names.append(-1)
            if kind == _RECORD_EVENT:
                recorded.append(event[1])
            elif kind == _HOST_WAIT and (not recorded or recorded.popleft() != event[1]):
                return event[1]
        kept.append(event)
    parts.append(passes.part(begin, len(kept)))
    return _Cuts(kept, parts, names)


class _Passes:
    """Counts the passes over the blocks: where their order turns, or a phase, a new one begins.

    A tensor's name says where it is made: in which block, in which pass, and how many were made there before. Outside
    of blocks it is only counted. So the same tensors of two blocks have names that are BLOCK apart.
    """

    def __init__(self, names_count_on: bool) -> None:
        self.phase = "load"
        self.block = -1
        self.number = 0
        self.direction = 0
        """1 or -1 from the second block of a pass on."""
        self._names_count_on = names_count_on
        self._next: dict[int, int] = {}

    def part(self, begin: int, end: int) -> Part:
        return Part(self.phase, self.block, self.direction < 0, begin, end)

    def are_at(self, phase: str, block: int) -> bool:
        return (phase, block) == (self.phase, self.block)

    def move(self, phase: str, block: int, name: int) -> int:
        """Go on elsewhere; takes the name after those that were given here, and returns the first one there."""
        here = self._place()
        self._next[here] = name
        step = block - self.block
        goes_on = self.block >= 0 and block >= 0 and phase == self.phase
        if not goes_on or step not in (-1, 1) or self.direction not in (0, step):
            self.number, step = self.number + 1, 0
        self.phase, self.block, self.direction = phase, block, step
        if self._names_count_on:
            return name
        assert name - here < (PASS if here else BLOCK)  # else two tensors would have one name
        place = self._place()
        return self._next.get(place, place)

    def _place(self) -> int:
        return (self.block + 1) * BLOCK + self.number * PASS if self.block >= 0 else 0


def _repeats(cuts: _Cuts) -> bool:
    """Whether the repeated block and the next one do the same, and no one but their neighbours names what is theirs."""
    done: dict[int, list[list[tuple[object, ...]]]] = {REPEATED_BLOCK: [], REPEATED_BLOCK + 1: []}
    for part in cuts.parts:
        homes = {name // BLOCK - 1 for name in set(cuts.names[part.begin : part.end]) if name >= BLOCK}
        if part.block < 0:
            if not homes.isdisjoint(done):
                return False
        elif any(abs(home - part.block) > REACH for home in homes):
            return False
        if part.block in done:
            done[part.block].append(_relative(cuts, part))
    ours, next_ones = done.values()
    return ours == next_ones


def _relative(cuts: _Cuts, part: Part) -> list[tuple[object, ...]]:
    """Return what a part does, with names as they would be in the repeated block."""
    shift, where = (part.block - REPEATED_BLOCK) * BLOCK, slice(part.begin, part.end)
    return [
        (event[0], event[2], event[4], name if name < BLOCK else name - shift)
        for event, name in zip(cuts.events[where], cuts.names[where], strict=True)
    ]


def _columns(cuts: _Cuts) -> Instructions:
    """Give each tensor a number. Outside of blocks only what was made behind the repeated ones moves on."""
    made = sorted(set(cuts.names))
    within = sorted({name % BLOCK for name in made if name >= BLOCK})
    place = {name: index for index, name in enumerate(within)}
    outside, each = 1 + max((name for name in made if name < BLOCK), default=0), len(within)
    number = {
        name: name if name < BLOCK else outside + (name // BLOCK - 1) * each + place[name % BLOCK] for name in made
    }
    strides: list[int] = []
    for part in cuts.parts:
        first = BLOCK if part.block >= 0 else (REPEATED_BLOCK + 2) * BLOCK
        strides += [each if name >= first else 0 for name in cuts.names[part.begin : part.end]]
    return Instructions(
        events=cuts.events,
        parts=cuts.parts,
        kind=array("q", [event[0] for event in cuts.events]),
        tensor=array("q", [number[name] for name in cuts.names]),
        stride=array("q", strides),
        num_bytes=[event[2] for event in cuts.events],
        stream=array("q", [event[4] for event in cuts.events]),
        num_outside=outside,
        num_each=each,
        num_blocks=1 + max((part.block for part in cuts.parts), default=0),
        num_events=sum(event[0] == _RECORD_EVENT for event in cuts.events),
    )
