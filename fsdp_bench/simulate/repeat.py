"""The log: one block stands for all blocks that are alike, and the last step for those that follow it.

The blocks between the first and the last have the same events, each on its own tensors and on those of its neighbours.
So a step is simulated with a few blocks, and the events of one of them, the repeated block, count once more for every
block that is not simulated. A pass over the blocks visits the repeated block that often before it goes on.

That blocks are alike is checked, not assumed: event by event, the repeated block and the next one must do the same.
Where they do not, every block is simulated (step.py).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import msgspec

from fsdp_bench.simulate.events import Event, Kind, Queue

T = TypeVar("T")

FEW_BLOCKS = 4
"""The two that are compared, and one before and behind them: prefetching and deferred frees reach one block."""

MORE_BLOCKS = 6
"""Where tensors are named (replay/caching_allocator/program.py): a block may use tensors of its second neighbour."""

_MARK, _REPEAT = Kind.MARK, Kind.REPEAT
_OF_A_TENSOR = (Kind.ALLOCATE, Kind.FREE, Kind.RECORD_STREAM)


def repeated_block(num_blocks: int) -> int:
    """Return the index of the block that stands for those that are not simulated."""
    return max(num_blocks // 2 - 1, 0)


class Part(msgspec.Struct, frozen=True, gc=False):
    """Consecutive events of one phase, of one block or of none."""

    phase: str
    block: int
    """Index among the simulated blocks; -1 outside of blocks."""
    goes_down: bool
    """Whether this pass visits the blocks from last to first."""
    pass_number: int
    """Number of the pass over the blocks. A new pass begins with a phase, and where the order of blocks reverses."""
    begin: int
    """Index of the first event; ``end`` is excluded."""
    end: int


@dataclass(frozen=True)
class Log:
    """The events of one rank while it loads and runs some steps, with a few of the model's blocks or all."""

    events: Sequence[Event]
    steps: Sequence[range]
    """The events of each step."""
    num_blocks: int
    extra_blocks: int
    """The number of blocks that the repeated block represents besides itself; 0 where every block was simulated."""
    rank: int = 0
    further_steps: int = 0
    """The number of following steps that repeat the last one."""
    replaces: Sequence[tuple[int, int]] = ()
    """Tensors that the last step frees, each with the tensor that replaces it."""

    @cached_property
    def repeated_block(self) -> int:
        """Index of the block that represents the others."""
        return repeated_block(self.num_blocks)

    @cached_property
    def parts(self) -> list[Part]:
        """The events, cut where a phase or a block begins."""
        return list(_cut(self.events))

    def times(self, part: Part) -> int:
        """Return how often a part runs."""
        return 1 + self.extra_blocks if part.block == self.repeated_block else 1

    def of_depth(self, num_layers: int) -> "Log":
        """Return this log for a model of the same width with more or fewer layers."""
        found = replace(self, extra_blocks=num_layers - self.num_blocks)
        found.__dict__["parts"] = self.parts  # what cached_property would find again
        return found

    @property
    def is_sound(self) -> bool:
        """Whether the repeated block can represent others: the block after it has the same events."""
        first, second = ([part for part in self.parts if part.block == self.repeated_block + i] for i in range(2))
        return len(first) == len(second) and all(map(self._are_alike, first, second))

    def _are_alike(self, one: Part, other: Part) -> bool:
        """Whether two parts have the same events, each on its own tensors."""
        if one.end - one.begin != other.end - other.begin:
            return False
        for a, b in zip(self.events[one.begin : one.end], self.events[other.begin : other.end], strict=True):
            same_number = a.number == b.number or a.kind in _OF_A_TENSOR or a.kind is _MARK
            if a.kind is not b.kind or a.num_bytes != b.num_bytes or not same_number:
                return False
            if a.stream is not b.stream or a.work != b.work:
                return False
        return True

    def last_step(self) -> Iterator[Event]:
        """Yield the last step with every block and micro-batch, after pending CUDA events of earlier steps."""
        return self.last_step_as(lambda events: events)

    def last_step_as(self, read: Callable[[list[Event]], list[T]]) -> Iterator[Event | T]:
        """Yield the last step as ``read`` has consecutive events, which it is given once for all alike blocks."""
        step, pending = self.steps[-1], Counter[int]()
        for event in self.events[: step.start]:
            if event.kind is Kind.RECORD_EVENT:
                pending[event.number] += 1
            elif event.kind in (Kind.WAIT_EVENT, Kind.HOST_WAIT):
                pending[event.number] -= 1
        yield from (Event(Kind.RECORD_EVENT, queue) for queue in pending.elements())
        micro_batch: list[T] = []
        times = 1
        for part in self.parts:
            events = self.events[max(part.begin, step.start) : min(part.end, step.stop)]
            if not events:
                continue
            for count, run in _runs(events):
                if count:
                    yield from micro_batch * times
                    micro_batch, times = [], count
                micro_batch += read(run) * self.times(part)
        yield from micro_batch * times


def _runs(events: Sequence[Event]) -> Iterator[tuple[int, list[Event]]]:
    """Yield runs of events with how often they are repeated; 0 where that was said before."""
    begin, count = 0, 0
    for index, event in enumerate(events):
        if event.kind is _REPEAT:
            yield count, list(events[begin:index])
            begin, count = index + 1, event.number
    yield count, list(events[begin:])


def _cut(events: Sequence[Event]) -> Iterator[Part]:
    """Cut at the marks; those that say where the step already is, as of several units in one block, cut nothing."""
    phase, block, direction, number, begin = "load", -1, 0, 0, 0
    for index in [index for index, event in enumerate(events) if event.kind is _MARK]:
        event = events[index]
        if event.label == phase and event.number == block:
            continue
        yield Part(phase, block, direction < 0, number, begin, index)
        step = event.number - block
        goes_on = block >= 0 and event.number >= 0 and event.label == phase
        if not goes_on or step not in (-1, 1) or direction not in (0, step):
            number, step = number + 1, 0
        phase, block, direction, begin = event.label, event.number, step, index
    yield Part(phase, block, direction < 0, number, begin, len(events))


# -- Further steps like the last one that was simulated: what each one uses up, and what it leaves in its place --------
#
# And what remains of a first step in the log of a later one (first_forward_alone).
#
# Reserved memory can grow beyond the second step, because each step cuts other blocks from what the steps before have
# freed. In the 146 settings of sweeps/h200.toml that fit, replayed for ten steps, it stopped growing after step 1 in
# 69, after 2 in 61, after 3 in 13 and after 4 in 3 (predicted events); in PyTorch's own allocator, eight steps of one
# trial, after step 4.
#
# A step that ends with as many live tensors as it began with can be replayed: each tensor that it left is renamed to
# the one that it replaces. Nothing is simulated or written out twice.

_ALLOCATE, _FREE, _RECORD_EVENT, _MARK = Kind.ALLOCATE, Kind.FREE, Kind.RECORD_EVENT, Kind.MARK
_WAITS = Kind.HOST_WAIT, Kind.WAIT_EVENT
_OF_QUEUES = (*_WAITS, _RECORD_EVENT)


def first_forward_alone(events: Sequence[Event], label: str) -> list[Event]:
    """Return a first step of which the first forward is whole, and what follows it happens at once, under ``label``.

    For readers of a later step, who need only the peak of the first one's forward, and the memory that it leaves.
    Behind forward the step frees what forward has left alive, and allocates what stays, each in its block's part.
    """
    cut = next(index for index, event in enumerate(events) if event.kind is _MARK and event.label == "loss")
    made = {event.number for event in events[cut:] if event.kind is _ALLOCATE}
    passing = made & {event.number for event in events[cut:] if event.kind is _FREE}
    found = [event for event in events[:cut] if event.kind is not Kind.REPEAT]
    for event in events[cut:]:
        if event.kind is _MARK:
            found.append(msgspec.structs.replace(event, label=label))
        elif event.kind in _OF_QUEUES or (event.kind in (_ALLOCATE, _FREE) and event.number not in passing):
            found.append(event)
    return found


def replaced_tensors(events: Sequence[Event], begin: int) -> list[tuple[int, int]] | None:
    """Return the tensors that the step ``events[begin:]`` uses up, each with the one that it leaves in its place.

    None where it does not leave as much as it found: tensors with the same labels, made in the same order, and as many
    recorded events of each queue that nobody waited for.
    """
    labels: tuple[dict[int, str], dict[int, str]] = {}, {}  # of what is alive: made before the step, and in it
    used_up: set[int] = set()
    queued, queued_before = [0] * len(Queue), [0] * len(Queue)
    alive = labels[0]
    for index, event in enumerate(events):
        if index == begin:
            alive, queued_before = labels[1], queued.copy()
        kind, number = event.kind, event.number
        if kind is _ALLOCATE:
            alive[number] = event.label
        elif kind is _FREE:
            if number in alive:
                del alive[number]
            else:
                used_up.add(number)
        elif kind is _RECORD_EVENT:
            queued[number] += 1
        elif kind in _WAITS:
            queued[number] -= 1
    found = [number for number in labels[0] if number in used_up]
    if [labels[0][number] for number in found] != list(labels[1].values()) or queued != queued_before:
        return None
    return list(zip(found, labels[1], strict=True))
