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

from fsdp_bench.simulate.events import Event, Kind

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


Pairs = Iterable[tuple[int, int]]
"""Of tensors."""


class Code(NamedTuple):
    """A program in columns: instructions, then parts of them."""

    kind: Sequence[int]
    """events.Kind, without marks."""
    tensor: Sequence[int]
    stride: Sequence[int]
    """What is added to the tensor's number times the number of the turn."""
    num_bytes: Sequence[int]
    stream: Sequence[int]
    begin: Sequence[int]
    """Of the parts: the first instruction, and the one behind the last."""
    end: Sequence[int]
    first_turn: Sequence[int]
    turn_step: Sequence[int]
    num_turns: Sequence[int]


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


class Handover(NamedTuple):
    """A tensor that a step uses up, and the one that it leaves in its place."""

    block: int
    """Whose they are, in turn 0; -1 outside of blocks."""
    found: int
    left: int


class _Cuts(NamedTuple):
    """Events without marks, their parts, and the name of each one's tensor."""

    events: list[Event]
    parts: list[Part]
    names: list[int]
    hands_over: list[Handover]
    """What the last step does, by names."""


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
    step_ends: list[int]
    """Behind the last part of each step."""
    hands_over: list[Handover]
    """What the last step uses up and leaves, by numbers."""


@dataclass(frozen=True)
class Program:
    """Instructions, and for how many blocks and steps, besides those that were simulated, they stand."""

    instructions: Instructions
    extra_blocks: int
    further_steps: int = 0
    """Like the last one, behind it."""

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
    def num_instructions(self) -> int:
        """How many run, in all turns and steps."""
        each = [(part.end - part.begin) * len(self.turns(part)) for part in self.parts]
        return sum(sum(each[step.start : step.stop]) for step in self.steps)

    @property
    def num_events(self) -> int:
        """No fewer than are recorded."""
        return (1 + self.extra_blocks) * (1 + self.further_steps) * self.instructions.num_events

    @property
    def steps(self) -> list[range]:
        """The parts of each step, those of loading with the first one's.

        Before each of the further ones, what the one before left takes the place of what it finds.
        """
        simulated = [range(begin, end) for begin, end in pairwise([0, *self.instructions.step_ends])]
        return simulated + simulated[-1:] * self.further_steps

    def turns(self, part: Part) -> range:
        """Return the turns in which a part runs: its tensors' numbers grow by ``turn * stride``."""
        return self._turns_of(part.block)[:: -1 if part.goes_down else 1]

    def _turns_of(self, block: int) -> range:
        extra = self.extra_blocks
        if block == REPEATED_BLOCK:
            return range(extra + 1)
        return range(1) if 0 <= block < REPEATED_BLOCK else range(extra, extra + 1)

    def handed_over(self) -> list[tuple[int, int]]:
        """Return the numbers of what the last step uses up, each with that of what it leaves, in all blocks."""
        each = self.instructions.num_each
        return [
            (found + turn * each, left + turn * each) if block >= 0 else (found, left)
            for block, found, left in self.instructions.hands_over
            for turn in self._turns_of(block)
        ]

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


def plain(events: Iterable[Event], handed_on: Pairs = (), further_steps: int = 0) -> Program:
    """Return events as a program in which every block runs once, and the last step that often again.

    ``handed_on``: what it uses up and what it leaves, from further_steps.py.

    Raises:
        ValueError: when events are not waited for in the order in which they are recorded.
    """
    cuts = _cut(events, handed_on, is_plain=True)
    if isinstance(cuts, int):
        raise ValueError(f"event {cuts} is waited for out of turn; a program waits in the order of recording")
    columns = _columns(cuts)
    return Program(replace(columns, num_bytes=array("q", columns.num_bytes)), 0, further_steps)


def alike(events: Sequence[Event], handed_on: Pairs = ()) -> Instructions | None:
    """Return what SIMULATED_BLOCKS blocks do, to be repeated; None where the blocks are not alike."""
    cuts = _cut(events, handed_on)
    return None if isinstance(cuts, int) or not _repeats(cuts) else _columns(cuts)


def _cut(events: Iterable[Event], handed_on: Pairs, is_plain: bool = False) -> _Cuts | int:
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
    hands_over = [Handover(known[found] // BLOCK - 1, known[found], known[left]) for found, left in handed_on]
    return _Cuts(kept, parts, names, hands_over)


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
    return ours == next_ones and _hands_over_alike(cuts)


def _hands_over_alike(cuts: _Cuts) -> bool:
    """Whether each block leaves as much as it finds, and the repeated one and the next one the same."""
    relative = [Handover(block, found % BLOCK, left % BLOCK) for block, found, left in cuts.hands_over]
    ours = [each._replace(block=REPEATED_BLOCK + 1) for each in relative if each.block == REPEATED_BLOCK]
    next_ones = [each for each in relative if each.block == REPEATED_BLOCK + 1]
    return ours == next_ones and all(found // BLOCK == left // BLOCK for _, found, left in cuts.hands_over)


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
        step_ends=_step_ends(cuts.parts),
        hands_over=[Handover(block, number[found], number[left]) for block, found, left in cuts.hands_over],
    )


def _step_ends(parts: Sequence[Part]) -> list[int]:
    phases = [part.phase for part in parts]
    ends = [at for at, (phase, after) in enumerate(pairwise(phases), 1) if phase == LAST_PHASE != after]
    return [*ends, len(parts)]
