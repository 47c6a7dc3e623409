"""Tensors and streams: who gets which block, and when a freed one may be used again; and a program run through that.

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
    EVENT_FIELDS,
    EVENTS,
    FIRST_QUEUED,
    HAS_FINISHED,
    HOST_RUNS_AHEAD,
    MOST_BLOCKS,
    NO_MEMORY,
    NUM_EVENTS,
    NUM_OOMS,
    NUM_POOLS,
    NUM_QUEUED,
    NUM_RECORDED,
    NUM_RETRIES,
    NUM_STREAMS,
    NUM_WAITED,
    ORDERED,
    PASSED,
    PEAK_ACTIVE,
    PEAK_ALLOCATED,
    POOL,
    SIZE,
    STREAMS_KEEP_PACE,
    TICKET,
    TICKET_ROW,
    USES,
    Heap,
    num_blocks,
    row,
)
from fsdp_bench.replay.segments import MIN_BLOCK_BYTES, SMALL_BYTES, grow, put, take, trim
from fsdp_bench.simulate.repeat import Code


def allocate(heap: Heap, tensor: int, num_bytes: int, stream: int) -> bool:
    """Give a tensor its memory, or return False where there is none; malloc, round_size, get_pool."""
    if num_bytes == 0:  # NativeCachingAllocator::allocate
        heap[heap[BLOCKS_OF] + tensor] = NO_MEMORY
        return True
    if heap[HAS_FINISHED]:
        free_finished(heap)
    size = -(-num_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
    pool = 2 * stream + (1 if size <= SMALL_BYTES else 0)
    block = take(heap, pool, size)
    if block == 0:
        block = grow_or_flush(heap, pool, size)
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


def grow_or_flush(heap: Heap, pool: int, size: int) -> int:
    """Return new memory, after a flush if need be: malloc's chain of alloc_block, release_cached_blocks, alloc_block.

    release_available_cached_blocks, between the two, does nothing while max_split_size is unlimited. The retry is
    counted also when it fails, and does not search the pool again.
    """
    block = grow(heap, pool, size)
    if block == 0:
        empty_cache(heap)
        heap[NUM_RETRIES] += 1
        block = grow(heap, pool, size)
        if block == 0:
            heap[NUM_OOMS] += 1
    return block


def empty_cache(heap: Heap) -> None:
    """Wait for outstanding events and return what is free to the card; release_cached_blocks."""
    for stream in range(NUM_STREAMS):  # synchronize_and_free_events
        heap[PASSED + stream] = heap[TICKET]
    free_finished(heap)
    for pool in range(NUM_POOLS):
        trim(heap, pool)


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
        defer(heap, block)
    else:
        heap[ACTIVE] -= heap[block + SIZE]
        put(heap, block)


def record_stream(heap: Heap, tensor: int, stream: int) -> None:
    """Note that another stream uses a tensor; its own allocation stream is ignored; recordStream."""
    block = heap[heap[BLOCKS_OF] + tensor]
    if block != NO_MEMORY and stream != heap[block + POOL] // 2:
        heap[block + USES] |= 1 << stream


def defer(heap: Heap, block: int) -> None:
    """Record one event on every stream that uses a freed block; insert_events."""
    for stream in range(NUM_STREAMS):
        if heap[block + USES] >> stream & 1:
            heap[TICKET] += 1
            at = (heap[FIRST_QUEUED + stream] + heap[NUM_QUEUED + stream]) % heap[CAPACITY]
            heap[row(heap, TICKET_ROW + stream) + at] = heap[TICKET]
            heap[row(heap, BLOCK_ROW + stream) + at] = block
            heap[NUM_QUEUED + stream] += 1
            heap[block + NUM_EVENTS] += 1
    heap[block + USES] = 0
    if not heap[HOST_RUNS_AHEAD]:
        heap[HAS_FINISHED] = 1


def free_finished(heap: Heap) -> None:
    """Free what all events have happened for; process_events: each stream's queue up to the first that has not."""
    heap[HAS_FINISHED] = 0
    for stream in range(NUM_STREAMS):
        if not heap[HOST_RUNS_AHEAD]:
            heap[PASSED + stream] = heap[TICKET]
        while heap[NUM_QUEUED + stream] > 0:
            at = heap[FIRST_QUEUED + stream]
            if heap[row(heap, TICKET_ROW + stream) + at] > heap[PASSED + stream]:
                break
            heap[FIRST_QUEUED + stream] = (at + 1) % heap[CAPACITY]
            heap[NUM_QUEUED + stream] -= 1
            block = heap[row(heap, BLOCK_ROW + stream) + at]
            heap[block + NUM_EVENTS] -= 1
            if heap[block + NUM_EVENTS] == 0:
                heap[ACTIVE] -= heap[block + SIZE]
                put(heap, block)


def record_event(heap: Heap, event: int, stream: int) -> None:
    """Event.record on a stream: the event comes after what that stream waited for, and after what it did."""
    record, known = heap[EVENTS] + EVENT_FIELDS * event, ORDERED + NUM_STREAMS * stream
    for other in range(NUM_STREAMS):
        heap[record + other] = heap[known + other]
    heap[record + stream] = heap[TICKET]
    heap[record + NUM_STREAMS] = heap[TICKET]


def stream_wait(heap: Heap, stream: int, event: int) -> None:
    """Stream.wait_event: what ``stream`` does from now on happens after ``event``."""
    record, known = heap[EVENTS] + EVENT_FIELDS * event, ORDERED + NUM_STREAMS * stream
    for other in range(NUM_STREAMS):
        heap[known + other] = max(heap[known + other], heap[record + other])


def host_wait(heap: Heap, event: int) -> None:
    """Event.synchronize: the host goes on when ``event``, recorded before, has happened."""
    record = heap[EVENTS] + EVENT_FIELDS * event
    for stream in range(NUM_STREAMS):
        ticket = heap[record + (NUM_STREAMS if heap[STREAMS_KEEP_PACE] else stream)]
        heap[PASSED + stream] = max(heap[PASSED + stream], ticket)
    heap[HAS_FINISHED] = 1


def synchronize(heap: Heap, stream: int) -> None:
    """cudaStreamSynchronize: the host goes on when all that a stream was given has happened."""
    for other in range(NUM_STREAMS):
        ticket = heap[ORDERED + NUM_STREAMS * stream + other]
        if other == stream or heap[STREAMS_KEEP_PACE]:
            ticket = heap[TICKET]
        heap[PASSED + other] = max(heap[PASSED + other], ticket)
    heap[HAS_FINISHED] = 1


KIND, TENSOR, STRIDE, NUM_BYTES, STREAM, BEGIN, END, FIRST_TURN, TURN_STEP, TURNS = range(len(Code._fields))

PART, TURN, INSTRUCTION, STATUS, FIRST_FULL_PART = range(5)
PLACES = 5
"""Where a program ends, what it ends with, and the part in which the first retry came, or -1. Behind them for each part
the most that was allocated in it, in any of its runs."""

RUNNING, ENDED, OUT_OF_MEMORY, TOO_MANY_BLOCKS = range(4)


def hand_over(heap: Heap, pairs: Iterable[tuple[int, int]]) -> None:
    """Give the memory that a step left in tensors to those that it found and used up, so that it can run again."""
    blocks_of = heap[BLOCKS_OF]
    for found, left in pairs:
        heap[blocks_of + found], heap[blocks_of + left] = heap[blocks_of + left], 0


def run(heap: Heap, code: Code, first_part: int, last_part: int, at: MutableSequence[int]) -> None:
    """Run a program from a part up to another: until the card is full, or the heap has no room for more blocks."""
    at[STATUS] = RUNNING
    for part in range(first_part, last_part):
        at[PART] = part
        heap[PEAK_ALLOCATED] = heap[ALLOCATED]
        for turn in range(code[TURNS][part]):
            at[TURN] = code[FIRST_TURN][part] + code[TURN_STEP][part] * turn
            run_turn(heap, code, at)
            at[PLACES + part] = max(heap[PEAK_ALLOCATED], at[PLACES + part])
            if heap[NUM_RETRIES] > 0 and at[FIRST_FULL_PART] < 0:
                at[FIRST_FULL_PART] = part
            if at[STATUS] != RUNNING:
                return
    at[STATUS] = ENDED


def run_turn(heap: Heap, code: Code, at: MutableSequence[int]) -> None:
    """Run one turn of a part."""
    turn, part = at[TURN], at[PART]
    kinds, tensors, strides = code[KIND], code[TENSOR], code[STRIDE]
    sizes, streams = code[NUM_BYTES], code[STREAM]
    for index in range(code[BEGIN][part], code[END][part]):
        kind = kinds[index]
        tensor = tensors[index] + turn * strides[index]
        if kind == 0:
            if num_blocks(heap) > heap[MOST_BLOCKS]:
                at[STATUS] = TOO_MANY_BLOCKS
                return
            if not allocate(heap, tensor, sizes[index], streams[index]):
                at[STATUS], at[INSTRUCTION] = OUT_OF_MEMORY, index
                return
        elif kind == 1:
            free(heap, tensor)
        elif kind == 2:
            record_stream(heap, tensor, streams[index])
        elif kind == 3:
            record_event(heap, heap[NUM_RECORDED], streams[index])
            heap[NUM_RECORDED] += 1
        elif kind == 4:
            host_wait(heap, heap[NUM_WAITED])
            heap[NUM_WAITED] += 1
        else:
            synchronize(heap, streams[index])
