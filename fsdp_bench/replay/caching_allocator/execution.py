"""Execute a program's instructions on the allocator."""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_bench.replay.caching_allocator.allocator import CachingAllocator
from fsdp_bench.replay.caching_allocator.program import Instruction, Op

# Members of an enum are looked up at each use.
_ALLOCATE, _FREE, _RECORD_STREAM = int(Op.ALLOCATE), int(Op.FREE), int(Op.RECORD_STREAM)


def execute(allocator: CachingAllocator, instructions: Iterable[Instruction], layers_skipped: int) -> int | None:
    """Execute a section once: for one of the layers that the repeated block represents.

    Returns the index of the event that runs out of memory, where one does.
    """
    allocate, free = allocator.allocate, allocator.free
    for op, number, second, third, fourth, index in instructions:
        if op == _FREE:
            free(number + layers_skipped * second)
        elif op == _ALLOCATE:
            if not allocate(number + layers_skipped * second, third, fourth):
                return index
        elif op == _RECORD_STREAM:
            allocator.record_stream(number + layers_skipped * second, fourth)
        else:
            wait(allocator, op, number)
    return None


def wait(allocator: CachingAllocator, op: int, queue: int) -> None:
    """Execute an instruction about events: record one, wait for one, or synchronize."""
    if op == Op.RECORD_EVENT:
        allocator.events[queue].append(allocator.record_event())
    elif op == Op.SYNCHRONIZE:
        allocator.num_completed = allocator.num_recorded
    else:
        number = allocator.events[queue].popleft()
        if op == Op.HOST_WAIT:
            allocator.num_completed = max(allocator.num_completed, number)
