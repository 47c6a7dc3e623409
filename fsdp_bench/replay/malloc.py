"""malloc and free of the caching allocator, frees that other streams defer, and a program run through them.

Follows DeviceCachingAllocator (segments.py says which); docstrings name its functions.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableSequence

from fsdp_bench.replay.heap import (
    ACTIVE,
    ALLOCATED,
    BLOCK_ROW,
    BLOCKS_OF,
    CAPACITY,
    DEVICE,
    EVENT_TIMES,
    FIRST_EVENT,
    FIRST_QUEUED,
    HOST,
    LAUNCH,
    MAX_EVENTS,
    MOST_BLOCKS,
    NEVER,
    NEXT_READY,
    NO_MEMORY,
    NUM_EVENTS,
    NUM_OOMS,
    NUM_POOLS,
    NUM_QUEUED,
    NUM_RETRIES,
    NUM_STREAMS,
    NUM_WAITING,
    PEAK_ACTIVE,
    PEAK_ALLOCATED,
    POOL,
    READY_ROW,
    SIZE,
    USES,
    Heap,
    num_blocks,
    row,
)
from fsdp_bench.replay.program import Code
from fsdp_bench.replay.segments import (
    MIN_BLOCK_BYTES,
    SMALL_BYTES,
    alloc_block,
    free_block,
    get_free_block,
    release_blocks,
)
from fsdp_bench.simulate.events import Kind


def allocate(heap: Heap, tensor: int, num_bytes: int, stream: int) -> bool:
    """Give a tensor its memory, or return False where there is none; malloc, round_size, get_pool."""
    if num_bytes == 0:  # NativeCachingAllocator::allocate
        heap[heap[BLOCKS_OF] + tensor] = NO_MEMORY
        return True
    if heap[NEXT_READY] <= heap[HOST]:
        process_events(heap)
    size = -(-num_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
    pool = 2 * stream + (1 if size <= SMALL_BYTES else 0)
    block = get_free_block(heap, pool, size)
    if block == 0:
        block = alloc_block_or_flush(heap, pool, size)
        if block == 0:
            return False
    heap[heap[BLOCKS_OF] + tensor] = block
    size = heap[block + SIZE]
    heap[ALLOCATED] += size
    if heap[ALLOCATED] > heap[PEAK_ALLOCATED]:
        heap[PEAK_ALLOCATED] = heap[ALLOCATED]
    heap[ACTIVE] += size
    if heap[ACTIVE] > heap[PEAK_ACTIVE]:
        heap[PEAK_ACTIVE] = heap[ACTIVE]
    return True


def alloc_block_or_flush(heap: Heap, pool: int, size: int) -> int:
    """Return new memory, after a flush if need be: malloc's chain of alloc_block, release_cached_blocks, alloc_block.

    release_available_cached_blocks, between the two, does nothing while max_split_size is unlimited. The retry is
    counted also when it fails, and does not search the pool again.
    """
    block = alloc_block(heap, pool, size)
    if block == 0:
        release_cached_blocks(heap)
        heap[NUM_RETRIES] += 1
        block = alloc_block(heap, pool, size)
        if block == 0:
            heap[NUM_OOMS] += 1
    return block


def release_cached_blocks(heap: Heap) -> None:
    """Wait for outstanding events and return what is free to the GPU; release_cached_blocks."""
    for stream in range(NUM_STREAMS):  # synchronize_and_free_events
        if heap[NUM_QUEUED + stream] > 0:
            last = (heap[FIRST_QUEUED + stream] + heap[NUM_QUEUED + stream] - 1) % heap[CAPACITY]
            heap[HOST] = max(heap[HOST], heap[row(heap, READY_ROW + stream) + last])
    process_events(heap)
    for pool in range(NUM_POOLS):
        release_blocks(heap, pool)


def free(heap: Heap, tensor: int) -> None:
    """Take a tensor's memory back; DeviceCachingAllocator::free. Raises KeyError for one that is not alive."""
    block = heap[heap[BLOCKS_OF] + tensor]
    if block == 0:
        raise KeyError("a tensor that is not alive")
    heap[heap[BLOCKS_OF] + tensor] = 0
    if block == NO_MEMORY:
        return
    heap[ALLOCATED] -= heap[block + SIZE]
    if heap[block + USES]:
        insert_events(heap, block)
    else:
        heap[ACTIVE] -= heap[block + SIZE]
        free_block(heap, block)


def record_stream(heap: Heap, tensor: int, stream: int) -> None:
    """Note that another stream uses a tensor; its own allocation stream is ignored; recordStream."""
    block = heap[heap[BLOCKS_OF] + tensor]
    if block != NO_MEMORY and stream != heap[block + POOL] // 2:
        heap[block + USES] |= 1 << stream


def insert_events(heap: Heap, block: int) -> None:
    """Record one event on every stream that uses a freed block; insert_events."""
    for stream in range(NUM_STREAMS):
        if heap[block + USES] >> stream & 1:
            ready = record_event(heap)
            at = (heap[FIRST_QUEUED + stream] + heap[NUM_QUEUED + stream]) % heap[CAPACITY]
            heap[row(heap, READY_ROW + stream) + at] = ready
            heap[row(heap, BLOCK_ROW + stream) + at] = block
            heap[NUM_QUEUED + stream] += 1
            heap[block + NUM_EVENTS] += 1
            heap[NEXT_READY] = min(heap[NEXT_READY], ready)
    heap[block + USES] = 0


def record_event(heap: Heap) -> int:
    """Return when an event that is recorded now happens. It takes a nanosecond, so that events have an order."""
    heap[DEVICE] += 1
    return heap[DEVICE]


def process_events(heap: Heap) -> None:
    """Free blocks whose events have all happened; process_events: each stream's queue up to the first that has not."""
    heap[NEXT_READY] = NEVER
    for stream in range(NUM_STREAMS):
        while heap[NUM_QUEUED + stream] > 0:
            at = heap[FIRST_QUEUED + stream]
            ready = heap[row(heap, READY_ROW + stream) + at]
            if ready > heap[HOST]:
                heap[NEXT_READY] = min(heap[NEXT_READY], ready)
                break
            heap[FIRST_QUEUED + stream] = (at + 1) % heap[CAPACITY]
            heap[NUM_QUEUED + stream] -= 1
            block = heap[row(heap, BLOCK_ROW + stream) + at]
            heap[block + NUM_EVENTS] -= 1
            if heap[block + NUM_EVENTS] == 0:
                heap[ACTIVE] -= heap[block + SIZE]
                free_block(heap, block)


KIND, NUMBER, STRIDE, AMOUNT, STREAM, BEGIN, END, FIRST_RUN, RUN_STEP, NUM_RUNS = range(10)
"""The columns of program.Code."""

PART, LAYERS_SKIPPED, INSTRUCTION, STATUS, FIRST_FULL_PART = range(5)
NUM_FIELDS = 5
"""The fields of ``progress``: how far a program ran, its status, and the part in which the first retry came, or -1.
Behind them for each part the most that was allocated in it, in any of its runs."""

RUNNING, ENDED, OUT_OF_MEMORY, TOO_MANY_BLOCKS = range(4)

# What numba takes of events.Kind. WAIT_STREAM and WAIT_COLLECTIVES cost nothing here: the device has one clock.
_ALLOCATE, _FREE, _RECORD_STREAM = int(Kind.ALLOCATE), int(Kind.FREE), int(Kind.RECORD_STREAM)
_LAST_WORK = int(Kind.COPY)
_RECORD_EVENT, _WAIT_EVENT, _HOST_WAIT = int(Kind.RECORD_EVENT), int(Kind.WAIT_EVENT), int(Kind.HOST_WAIT)
_SYNCHRONIZE, _HOST_WORK = int(Kind.SYNCHRONIZE), int(Kind.HOST_WORK)


def rename_tensors(heap: Heap, pairs: Iterable[tuple[int, int]]) -> None:
    """Rename each tensor that a step left to the one that it replaces, so that the step can run again."""
    blocks_of = heap[BLOCKS_OF]
    for found, left in pairs:
        heap[blocks_of + found], heap[blocks_of + left] = heap[blocks_of + left], 0


def run(heap: Heap, code: Code, first_part: int, last_part: int, progress: MutableSequence[int]) -> None:
    """Run a program from a part up to another: until the GPU is full, or the heap has no room for more blocks."""
    progress[STATUS] = RUNNING
    for part in range(first_part, last_part):
        progress[PART] = part
        heap[PEAK_ALLOCATED] = heap[ALLOCATED]
        for count in range(code[NUM_RUNS][part]):
            progress[LAYERS_SKIPPED] = code[FIRST_RUN][part] + code[RUN_STEP][part] * count
            run_part(heap, code, progress)
            progress[NUM_FIELDS + part] = max(heap[PEAK_ALLOCATED], progress[NUM_FIELDS + part])
            if heap[NUM_RETRIES] > 0 and progress[FIRST_FULL_PART] < 0:
                progress[FIRST_FULL_PART] = part
            if progress[STATUS] != RUNNING:
                return
    progress[STATUS] = ENDED


def run_part(heap: Heap, code: Code, progress: MutableSequence[int]) -> None:
    """Run a part once, for one of the layers that its block stands for."""
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
    """Record an event, let the host wait for one or for the device, or let the host work."""
    if kind == _RECORD_EVENT:
        at = (heap[FIRST_EVENT + queue] + heap[NUM_WAITING + queue]) % MAX_EVENTS
        heap[EVENT_TIMES + queue * MAX_EVENTS + at] = record_event(heap)
        heap[NUM_WAITING + queue] += 1
    elif kind in (_WAIT_EVENT, _HOST_WAIT):
        at = heap[FIRST_EVENT + queue]
        if kind == _HOST_WAIT:
            heap[HOST] = max(heap[HOST], heap[EVENT_TIMES + queue * MAX_EVENTS + at])
        heap[FIRST_EVENT + queue] = (at + 1) % MAX_EVENTS
        heap[NUM_WAITING + queue] -= 1
    elif kind == _SYNCHRONIZE:
        heap[HOST] = max(heap[HOST], heap[DEVICE])
    elif kind == _HOST_WORK:
        heap[HOST] += nanoseconds
