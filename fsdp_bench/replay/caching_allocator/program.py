"""A log as a program for the allocator, in which the repeated block's parts are written once, with how often they run.

In the run for block ``v`` the repeated block's parts name tensors of block ``v - 1`` where the simulated ones name
those of block 1. What comes after them runs once, with tensors' numbers moved on by the number of blocks left out. So
one simulation is the program of every depth.

That this is so is checked, not assumed: the parts of the repeated block and of the next one must be the same with the
names moved on by one block, no block may name what is further away than its second neighbour, and nothing outside of
blocks may name what those two make. Where it is not so there is no program, and every block has to be simulated.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

from msgspec.structs import replace

from fsdp_bench.replay.caching_allocator.allocator import Instruction
from fsdp_bench.replay.caching_allocator.blocks import NUM_POOLS, pool_of, rounded
from fsdp_bench.simulate.events import Event, Kind, Stream
from fsdp_bench.simulate.repeat import Log, Part

FURTHEST_BLOCK = 2
"""The largest distance, in blocks, between a block's part and a tensor that it names."""

BLOCK = 1 << 24
"""The difference of names from one block to the next, and, in a block, from one pass to the next."""
PASS = 1 << 14

_ALLOCATE, _FREE = Kind.ALLOCATE, Kind.FREE
_OF_A_TENSOR = (Kind.FREE, Kind.RECORD_STREAM)


_READ = {
    *(Kind.ALLOCATE, Kind.FREE, Kind.RECORD_STREAM),
    *(Kind.RECORD_EVENT, Kind.WAIT_EVENT, Kind.HOST_WAIT, Kind.SYNCHRONIZE),
}
"""The kinds that the allocator reads. Each simulated micro-batch runs once here."""

LAUNCHES = 32
"""Operators that are launched together, in one instruction."""


class _Replaced(NamedTuple):
    """A tensor that a step uses up, and the one that it leaves in its place."""

    block: int
    """The block of both; -1 outside of blocks."""
    found: int
    left: int


@dataclass(frozen=True)
class Program:
    """Instructions for the allocator, and for how many blocks and steps they are executed."""

    log: Log
    events: list[Event]
    """The event that each instruction is from."""
    sections: list[Part]
    """The log's parts, by the instructions that they became."""
    instructions: list[list[Instruction]]
    """The instructions of each section."""
    num_each: int
    """Numbers for the tensors of each block; those that are made outside of blocks have the first numbers."""
    replaces: list[_Replaced]

    @property
    def steps(self) -> list[range]:
        """The sections of each step, those of loading with the first one's.

        Before each of the further ones, what the one before left takes the place of what it finds.
        """
        ends = [sum(part.end <= step.stop for part in self.log.parts) for step in self.log.steps]
        simulated = [range(begin, end) for begin, end in pairwise([0, *ends])]
        return simulated + simulated[-1:] * self.log.further_steps

    def runs(self, block: int) -> range:
        """Return how many blocks are skipped before each run of a block's part."""
        extra, repeated = self.log.extra_blocks, self.log.repeated_block
        if block == repeated:
            return range(extra + 1)
        return range(1) if 0 <= block < repeated else range(extra, extra + 1)

    @cached_property
    def least_bytes(self) -> int:
        """The least that segments hold by the end of the simulated steps, if the cache is never flushed.

        No pool uses another one's segments, so the peaks of all pools add up. Blocks whose free is deferred are not
        counted. All runs of a part allocate and free as much as the first one.
        """
        blocks: dict[int, tuple[int, int]] = {}
        live, peaks = [0] * NUM_POOLS, [0] * NUM_POOLS
        for section, instructions in zip(self.sections, self.instructions, strict=True):
            before, highest = live.copy(), live.copy()
            for kind, number, _, size, pool, _ in instructions:
                if kind is _ALLOCATE:
                    blocks[number] = size, pool
                    live[pool] += size
                    if live[pool] > highest[pool]:
                        highest[pool] = live[pool]
                elif kind is _FREE:
                    size, pool = blocks[number]
                    live[pool] -= size
            further = len(self.runs(section.block)) - 1
            for pool in range(NUM_POOLS):
                more = further * (live[pool] - before[pool])
                peaks[pool] = max(peaks[pool], highest[pool] + max(more, 0))
                live[pool] += more
        return sum(peaks)

    def replaced_tensors(self) -> list[tuple[int, int]]:
        """Return the numbers of what the last step uses up, each with that of what it leaves, in all blocks."""
        return [
            (found + run * self.num_each, left + run * self.num_each) if block >= 0 else (found, left)
            for block, found, left in self.replaces
            for run in self.runs(block)
        ]


def program(log: Log) -> Program | None:
    """Return a log as a program; None where its blocks may not stand for others."""
    names = _Names(log)
    if log.extra_blocks and not names.repeat():
        return None
    return names.program()


class _Names:
    """Names tensors after where they are made.

    A name says in which block, in which pass over the blocks, and how many were made there before; outside of blocks
    tensors are only counted. So the same tensors of two blocks have names that are BLOCK apart.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self.events: list[Event] = []
        self.sections: list[Part] = []
        self.names: list[int] = []
        # Where no other stream uses what is freed, nothing waits for anything.
        has_deferred = any(event.kind is Kind.RECORD_STREAM for event in log.events)
        read = _READ if has_deferred else {Kind.ALLOCATE, Kind.FREE}
        known: dict[int, int] = {}
        self._end: dict[int, int] = {}
        """The name that would be next at each place: in each block's passes, and 0 outside of blocks."""
        for part in log.parts:
            is_of_a_block = part.block >= 0 and log.extra_blocks
            place = (part.block + 1) * BLOCK + part.pass_number * PASS if is_of_a_block else 0
            name, begin, launches = self._end.get(place, place), len(self.events), 0
            for event in log.events[part.begin : part.end]:
                kind = event.kind
                if kind is Kind.KERNEL and has_deferred and event.stream is Stream.COMPUTE:
                    launches += 1
                    if launches % LAUNCHES == 0:
                        self._launch(LAUNCHES)
                if kind not in read:
                    continue
                if kind is _ALLOCATE:
                    known[event.number] = name
                    self.names.append(name)
                    name += 1
                else:
                    self.names.append(known[event.number] if kind in _OF_A_TENSOR else -1)
                self.events.append(event)
            if launches % LAUNCHES:
                self._launch(launches % LAUNCHES)
            assert name - place < (PASS if place else BLOCK) or not log.extra_blocks  # else two would have one name
            self._end[place] = name
            self.sections.append(replace(part, begin=begin, end=len(self.events)))
        self.replaces = [
            _Replaced(known[found] // BLOCK - 1 if log.extra_blocks else -1, known[found], known[left])
            for found, left in log.replaces
        ]

    def _launch(self, count: int) -> None:
        """Add an event of its own that stands for so many operators of the log."""
        self.events.append(Event(Kind.KERNEL, count))
        self.names.append(-1)

    def repeat(self) -> bool:
        """Whether the repeated block and the next one do the same, and only their neighbours name what is theirs."""
        first = self._log.repeated_block
        done: dict[int, list[list[tuple[object, ...]]]] = {first: [], first + 1: []}
        for section in self.sections:
            homes = {name // BLOCK - 1 for name in set(self.names[section.begin : section.end]) if name >= BLOCK}
            if section.block < 0:
                if not homes.isdisjoint(done):
                    return False
            elif any(abs(home - section.block) > FURTHEST_BLOCK for home in homes):
                return False
            if section.block in done:
                done[section.block].append(self._relative(section))
        return done[first] == done[first + 1] and self._replace_alike()

    def _relative(self, section: Part) -> list[tuple[object, ...]]:
        """Return what a section does, with names as they would be in the repeated block."""
        shift, where = (section.block - self._log.repeated_block) * BLOCK, slice(section.begin, section.end)
        return [
            (event.kind, event.num_bytes, event.stream, event.work, name if name < BLOCK else name - shift)
            for event, name in zip(self.events[where], self.names[where], strict=True)
        ]

    def _replace_alike(self) -> bool:
        """Whether each block leaves as much as it finds, and the repeated one and the next one the same."""
        first = self._log.repeated_block
        relative = [_Replaced(block, found % BLOCK, left % BLOCK) for block, found, left in self.replaces]
        ours = [each._replace(block=first + 1) for each in relative if each.block == first]
        next_ones = [each for each in relative if each.block == first + 1]
        return ours == next_ones and all(found // BLOCK == left // BLOCK for _, found, left in self.replaces)

    def program(self) -> Program:
        """Give each tensor a number. Outside of blocks only what was made after the repeated ones moves on."""
        places, each = self._places()
        num_outside = self._end.get(0, 0)
        further = {place // PASS: num_outside + index - place for place, index in places.items()}
        """The difference from a name to a number, for names in blocks; outside of blocks they are equal."""

        def number(name: int) -> int:
            return name + further.get(name // PASS, 0)

        instructions = []
        for section in self.sections:
            first = BLOCK if section.block >= 0 else (self._log.repeated_block + 2) * BLOCK
            own: list[Instruction] = []
            for index in range(section.begin, section.end):
                event, name = self.events[index], self.names[index]
                if name < 0:
                    own.append((event.kind, event.number, 0, 0, 0, index))
                    continue
                stride = each if each and name >= first else 0
                size, last = 0, int(event.stream)
                if event.kind is _ALLOCATE:
                    size = rounded(event.num_bytes)
                    last = pool_of(size, event.stream)
                own.append((event.kind, number(name), stride, size, last, index))
            instructions.append(own)
        return Program(
            log=self._log,
            events=self.events,
            sections=self.sections,
            instructions=instructions,
            num_each=each,
            replaces=[_Replaced(block, number(found), number(left)) for block, found, left in self.replaces],
        )

    def _places(self) -> tuple[dict[int, int], int]:
        """Return the number, from 0, of the first tensor of each place in blocks, and how many numbers a block has.

        Each pass has as many numbers as the block that makes the most tensors in it.
        """
        inside = [(place, end - place) for place, end in self._end.items() if place]
        counts: dict[int, int] = {}
        for place, count in inside:
            counts[place % BLOCK] = max(count, counts.get(place % BLOCK, 0))
        first = dict(zip(counts, accumulate(counts.values(), initial=0), strict=False))
        each = sum(counts.values())
        return {place: (place // BLOCK - 1) * each + first[place % BLOCK] for place, _ in inside}, each
