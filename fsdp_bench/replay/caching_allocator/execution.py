"""Execute a program on the allocator, with one clock for the host and one for the device."""

from __future__ import annotations

from collections.abc import Iterable, MutableSequence

from fsdp_bench.replay.caching_allocator.heap import (
    ALLOCATED,
    BLOCKS_OF,
    DEVICE,
    EVENT_TIMES,
    FIRST_EVENT,
    HOST,
    LAUNCH,
    MAX_EVENTS,
    MOST_BLOCKS,
    NUM_PENDING,
    NUM_RETRIES,
    PEAK_ALLOCATED,
    Heap,
    num_blocks,
)
from fsdp_bench.replay.caching_allocator.malloc import allocate, free, record_event, record_stream
from fsdp_bench.replay.caching_allocator.program import Code
from fsdp_bench.simulate.events import Kind

KIND, NUMBER, STRIDE, AMOUNT, STREAM, BEGIN, END, FIRST_RUN, RUN_STEP, NUM_RUNS = range(10)
"""The columns of program.Code."""

PART, LAYERS_SKIPPED, INSTRUCTION, STATUS, FIRST_FULL_PART = range(5)
NUM_FIELDS = 5
"""The fields of ``progress``: where the program is, its status, and the part with the first allocation retry, or -1.
After them comes, for each part, the most that was allocated in any of its runs."""

RUNNING, ENDED, OUT_OF_MEMORY, TOO_MANY_BLOCKS = range(4)

# Values of events.Kind as integers, because numba does not know the enum.
# WAIT_STREAM and WAIT_COLLECTIVES cost nothing here: the device has one clock.
_ALLOCATE, _FREE, _RECORD_STREAM = int(Kind.ALLOCATE), int(Kind.FREE), int(Kind.RECORD_STREAM)
_LAST_WORK = int(Kind.COPY)
_RECORD_EVENT, _WAIT_EVENT, _HOST_WAIT = int(Kind.RECORD_EVENT), int(Kind.WAIT_EVENT), int(Kind.HOST_WAIT)
_SYNCHRONIZE, _HOST_WORK = int(Kind.SYNCHRONIZE), int(Kind.HOST_WORK)


def rename_tensors(heap: Heap, pairs: Iterable[tuple[int, int]]) -> None:
    """Give each tensor that a step leaves the number of the tensor that it replaces, so that the step can run again."""
    blocks_of = heap[BLOCKS_OF]
    for old, new in pairs:
        heap[blocks_of + old], heap[blocks_of + new] = heap[blocks_of + new], 0


def execute(heap: Heap, code: Code, first_part: int, last_part: int, progress: MutableSequence[int]) -> None:
    """Execute the parts of a program from ``first_part`` up to ``last_part``, excluded.

    It stops early where the GPU is out of memory, or the heap has no space for more blocks.
    """
    progress[STATUS] = RUNNING
    for part in range(first_part, last_part):
        progress[PART] = part
        heap[PEAK_ALLOCATED] = heap[ALLOCATED]
        for count in range(code[NUM_RUNS][part]):
            progress[LAYERS_SKIPPED] = code[FIRST_RUN][part] + code[RUN_STEP][part] * count
            execute_part(heap, code, progress)
            progress[NUM_FIELDS + part] = max(heap[PEAK_ALLOCATED], progress[NUM_FIELDS + part])
            if heap[NUM_RETRIES] > 0 and progress[FIRST_FULL_PART] < 0:
                progress[FIRST_FULL_PART] = part
            if progress[STATUS] != RUNNING:
                return
    progress[STATUS] = ENDED


def execute_part(heap: Heap, code: Code, progress: MutableSequence[int]) -> None:
    """Execute a part once: for one of the layers that the repeated block represents."""
    layers_skipped, part = progress[LAYERS_SKIPPED], progress[PART]
    kinds, numbers, strides = code[KIND], code[NUMBER], code[STRIDE]
    amounts, streams = code[AMOUNT], code[STREAM]
    for index in range(code[BEGIN][part], code[END][part]):
        kind, stream = kinds[index], streams[index]
        number = numbers[index] + layers_skipped * strides[index]
        if kind == _ALLOCATE:
            if num_blocks(heap) > heap[MOST_BLOCKS]:
                progress[STATUS] = TOO_MANY_BLOCKS
                return
            if not allocate(heap, number, amounts[index], stream):
                progress[STATUS], progress[INSTRUCTION] = OUT_OF_MEMORY, index
                return
        elif kind == _FREE:
            free(heap, number)
        elif kind == _RECORD_STREAM:
            record_stream(heap, number, stream)
        elif kind <= _LAST_WORK:
            heap[HOST] += heap[LAUNCH]
            heap[DEVICE] = max(heap[HOST], heap[DEVICE]) + amounts[index]
        else:
            wait(heap, kind, number, amounts[index])


def wait(heap: Heap, kind: int, queue: int, nanoseconds: int) -> None:
    """Execute an instruction about time: record an event, wait for one, synchronize, or let the host work."""
    if kind == _RECORD_EVENT:
        at = (heap[FIRST_EVENT + queue] + heap[NUM_PENDING + queue]) % MAX_EVENTS
        heap[EVENT_TIMES + queue * MAX_EVENTS + at] = record_event(heap)
        heap[NUM_PENDING + queue] += 1
    elif kind in (_WAIT_EVENT, _HOST_WAIT):
        at = heap[FIRST_EVENT + queue]
        if kind == _HOST_WAIT:
            heap[HOST] = max(heap[HOST], heap[EVENT_TIMES + queue * MAX_EVENTS + at])
        heap[FIRST_EVENT + queue] = (at + 1) % MAX_EVENTS
        heap[NUM_PENDING + queue] -= 1
    elif kind == _SYNCHRONIZE:
        heap[HOST] = max(heap[HOST], heap[DEVICE])
    elif kind == _HOST_WORK:
        heap[HOST] += nanoseconds
