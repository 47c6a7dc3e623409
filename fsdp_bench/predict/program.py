"""A step's events as a program: the part of a middle block written once, with how often it runs.

The blocks between the first and the last do the same, each to its own tensors and to those of its neighbours. So six
blocks are simulated, and the parts of one of them stand for all that are left out: in the turn for block ``v`` they
name what is in block ``v - 1`` where the simulated part names what is in block 1.

That this is so is checked, not assumed: the parts of blocks 2 and 3 must be the same instruction by instruction, no
block may name what is further away than its second neighbour, and nothing outside of blocks may name what those two
make. Where it is not so ``alike`` gives None, and every block has to be simulated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fsdp_bench.predict.events import Event, Kind

SIMULATED_BLOCKS = 6
"""Two that are compared, and as many before and behind them as a part reaches."""

REPEATED_BLOCK = 2
"""Whose parts are repeated; the next one's are compared with them."""

REACH = 2
"""How many blocks away a block's part may name something."""

BLOCK_STRIDE = 1 << 24
"""Tensors are numbered by the block in whose part they are made: what a number grows by from one block to the next."""
_PASS_STRIDE = 1 << 14

Instruction = tuple[int, int, int, int, Event]
"""Kind, number, bytes and stream, and the event that they are from. Tensors that are made outside of blocks have
negative numbers, which no turn changes. Events are waited for in the order in which they are recorded: FSDP1's
_FreeEventQueue is the only one that waits. So their numbers are not needed."""


class Part(NamedTuple):
    """Consecutive events of one phase, of one block or of none."""

    phase: str
    block: int
    """Of the turn 0; -1 outside of blocks."""
    turns: Sequence[int]
    """How many blocks on each turn is: (0,) for a part that runs once."""
    instructions: Sequence[Instruction]


@dataclass(frozen=True)
class Program:
    """Parts in their order."""

    parts: list[Part]


class Section(NamedTuple):
    """What a block does in one pass over the blocks, or what is between them."""

    phase: str
    block: int
    goes_down: bool
    events: list[Event]
    numbers: list[int]


def plain(events: Iterable[Event]) -> Program:
    """Return events as a program in which everything runs once.

    Raises:
        ValueError: when events are not waited for in the order in which they are recorded.
    """
    instructions: list[Instruction] = []
    parts = [Part("", -1, (0,), instructions)]
    recorded: deque[int] = deque()
    for event in events:
        if event.kind == Kind.RECORD_EVENT:
            recorded.append(event.number)
        if event.kind == Kind.HOST_WAIT and recorded.popleft() != event.number:
            raise ValueError(
                f"event {event.number} is waited for out of turn; a program waits in the order of recording"
            )
        if event.kind == Kind.MARK:
            instructions = []
            parts.append(Part(event.label, event.number, (0,), instructions))
        else:
            instructions.append((event.kind, -1 - event.number, event.num_bytes, event.stream, event))
    return Program(parts)


def alike(events: Sequence[Event]) -> list[Section] | None:
    """Return what SIMULATED_BLOCKS blocks do, to be repeated; None where the blocks are not alike."""
    sections = _sections(events)
    return sections if sections is not None and _repeats(sections) else None


def repeated(sections: Sequence[Section], extra_blocks: int) -> Program:
    """Return the program of SIMULATED_BLOCKS blocks and ``extra_blocks`` more."""
    shift = extra_blocks * BLOCK_STRIDE
    return Program([_part(section, extra_blocks, shift) for section in sections])


def _sections(events: Sequence[Event]) -> list[Section] | None:
    """Cut at the marks and number what is made; None where events are not waited for in their order."""
    numbering = _Numbering()
    sections: list[Section] = [Section("load", -1, False, [], [])]
    phase, block, pass_, step = "load", -1, 0, 0
    for event in events:
        if event[0] == Kind.MARK:
            new_phase, new_block = event[5], event[1]
            if (new_phase, new_block) == (phase, block):
                continue
            new_step = new_block - block
            if block < 0 or new_block < 0 or new_phase != phase or new_step not in (-1, 1) or step not in (0, new_step):
                pass_, new_step = pass_ + 1, 0
            phase, block, step = new_phase, new_block, new_step
            sections.append(Section(phase, block, step < 0, [], []))
        else:
            number = numbering.number(event, pass_, block)
            if number is None:
                return None
            sections[-1].events.append(event)
            sections[-1].numbers.append(number)
    return sections


class _Numbering:
    """Numbers tensors by where they are made: block, pass over the blocks, and how many were made there before."""

    def __init__(self) -> None:
        self._tensors: dict[int, int] = {}
        self._next: dict[tuple[int, int], int] = {}
        self._outside = 0
        self._recorded: deque[int] = deque()

    def number(self, event: Event, pass_: int, block: int) -> int | None:
        """Return the number of an event's tensor, 0 for events; None for a wait out of turn."""
        kind = event[0]
        if kind == Kind.RECORD_EVENT:
            self._recorded.append(event[1])
            return 0
        if kind == Kind.HOST_WAIT:
            return 0 if self._recorded and self._recorded.popleft() == event[1] else None
        if kind != Kind.ALLOCATE:
            return self._tensors[event[1]]
        if block < 0:
            self._outside -= 1
            number = self._outside
        else:
            ordinal = self._next.get((pass_, block), 0)
            assert ordinal < _PASS_STRIDE  # else two tensors would share a number
            assert pass_ * _PASS_STRIDE < BLOCK_STRIDE
            self._next[pass_, block] = ordinal + 1
            number = block * BLOCK_STRIDE + pass_ * _PASS_STRIDE + ordinal
        self._tensors[event[1]] = number
        return number


def _repeats(sections: Sequence[Section]) -> bool:
    """Whether the repeated block and the next one do the same, and no one but their neighbours names what is theirs."""
    done: dict[int, list[list[tuple[object, ...]]]] = {REPEATED_BLOCK: [], REPEATED_BLOCK + 1: []}
    for section in sections:
        homes = {number // BLOCK_STRIDE for number in section.numbers if number > 0}
        if section.block < 0:
            if not homes.isdisjoint(done):
                return False
        elif any(abs(home - section.block) > REACH for home in homes):
            return False
        if section.block in done:
            done[section.block].append(_relative(section))
    ours, next_ones = done.values()
    return ours == next_ones


def _relative(section: Section) -> list[tuple[object, ...]]:
    """Return what a section does, with tensors numbered from its own block on."""
    own = section.block * BLOCK_STRIDE
    return [
        (event[0], event[2], event[4], number if number <= 0 else number - own)
        for event, number in zip(section.events, section.numbers, strict=True)
    ]


def _part(section: Section, extra_blocks: int, shift: int) -> Part:
    """Return a section as a part: what lies behind the repeated block moves by all the blocks that were left out."""
    block, turns, numbers = section.block, range(1), section.numbers
    if block == REPEATED_BLOCK:
        turns = range(extra_blocks + 1)[:: -1 if section.goes_down else 1]
    elif block > REPEATED_BLOCK:
        block += extra_blocks
        numbers = [number + shift if number > 0 else number for number in numbers]
    elif block < 0:
        behind = (REPEATED_BLOCK + 1) * BLOCK_STRIDE
        numbers = [number + shift if number >= behind else number for number in numbers]
    instructions = [
        (event[0], number, event[2], event[4], event) for event, number in zip(section.events, numbers, strict=True)
    ]
    return Part(section.phase, block, turns, instructions)
