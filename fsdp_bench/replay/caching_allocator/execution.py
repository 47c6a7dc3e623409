"""Execute a program on the allocator, with clocks for the host, for each stream and for each communicator."""

from __future__ import annotations

from collections.abc import Iterable, MutableSequence

from fsdp_bench.replay.caching_allocator.heap import (
    ALLOCATED,
    BLOCKS_OF,
    EVENT_TIMES,
    FIRST_EVENT,
    GROUP_CLOCK,
    HOST,
    IS_ONE_CLOCK,
    LAUNCH,
    MAX_EVENTS,
    MOST_BLOCKS,
    NUM_PENDING,
    NUM_RETRIES,
    PEAK_ALLOCATED,
    STARTED,
    Heap,
    num_blocks,
)
from fsdp_bench.replay.caching_allocator.malloc import allocate, clock_of, free, record_event, record_stream
from fsdp_bench.replay.caching_allocator.program import Code
from fsdp_bench.simulate.events import Kind, Queue

KIND, NUMBER, STRIDE, AMOUNT, STREAM, GROUP, BEGIN, END, FIRST_RUN, RUN_STEP, NUM_RUNS = range(11)
"""The columns of program.Code."""

PART, LAYERS_SKIPPED, INSTRUCTION, STATUS, FIRST_FULL_PART = range(5)
NUM_FIELDS = 5
"""The fields of ``progress``: where the program is, its status, and the part with the first allocation retry, or -1.
After them comes, for each part, the most that was allocated in any of its runs."""

RUNNING, ENDED, OUT_OF_MEMORY, TOO_MANY_BLOCKS = range(4)

# Values of events.Kind as integers, because numba does not know the enum.
_ALLOCATE, _FREE, _RECORD_STREAM = int(Kind.ALLOCATE), int(Kind.FREE), int(Kind.RECORD_STREAM)
_LAST_WORK, _START_COLLECTIVE = int(Kind.COPY), int(Kind.START_COLLECTIVE)
_WAIT_STREAM, _WAIT_COLLECTIVES = int(Kind.WAIT_STREAM), int(Kind.WAIT_COLLECTIVES)
_RESHARD = int(Queue.RESHARD)
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
    amounts, streams, groups = code[AMOUNT], code[STREAM], code[GROUP]
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
            issue(heap, kind, stream, groups[index], amounts[index])
        else:
            wait(heap, kind, stream, number, amounts[index])


def issue(heap: Heap, kind: int, stream: int, group: int, nanoseconds: int) -> None:
    """Give a stream an operator, a copy or a collective."""
    heap[HOST] += heap[LAUNCH]
    clock = clock_of(heap, stream)
    begin = max(heap[HOST], heap[clock])
    if heap[IS_ONE_CLOCK] or group == 0:
        heap[clock] = begin + nanoseconds
        return
    begin = max(begin, heap[GROUP_CLOCK + group - 1])
    heap[GROUP_CLOCK + group - 1] = begin + nanoseconds
    if kind == _START_COLLECTIVE:
        heap[STARTED] = max(heap[STARTED], begin + nanoseconds)
    else:
        heap[clock] = begin + nanoseconds


def wait(heap: Heap, kind: int, stream: int, number: int, nanoseconds: int) -> None:
    """Execute an instruction about time: record an event, wait for one, synchronize, or let the host work.

    ``number`` is the other stream, or the queue of the event.
    """
    clock = clock_of(heap, stream)
    if kind == _RECORD_EVENT:
        at = (heap[FIRST_EVENT + number] + heap[NUM_PENDING + number]) % MAX_EVENTS
        heap[EVENT_TIMES + number * MAX_EVENTS + at] = record_event(heap, stream)
        heap[NUM_PENDING + number] += 1
    elif kind in (_WAIT_EVENT, _HOST_WAIT):
        time = next_event(heap, number)
        if kind == _HOST_WAIT:
            heap[HOST] = max(heap[HOST], time)
        else:
            heap[clock] = max(heap[clock], time)
    elif kind == _SYNCHRONIZE:
        heap[HOST] = max(heap[HOST], heap[clock])
    elif kind == _HOST_WORK:
        heap[HOST] += nanoseconds
    elif kind == _WAIT_STREAM:
        heap[clock] = max(heap[clock], heap[clock_of(heap, number)])
    elif kind == _WAIT_COLLECTIVES:
        heap[clock] = max(heap[clock], heap[STARTED])


def next_event(heap: Heap, queue: int) -> int:
    """Take the next event of a queue that nobody waited for, of RESHARD the last one; return when it completes."""
    first = heap[FIRST_EVENT + queue]
    heap[NUM_PENDING + queue] -= 1
    if queue == _RESHARD:
        first = (first + heap[NUM_PENDING + queue]) % MAX_EVENTS
    else:
        heap[FIRST_EVENT + queue] = (first + 1) % MAX_EVENTS
    return heap[EVENT_TIMES + queue * MAX_EVENTS + first]
