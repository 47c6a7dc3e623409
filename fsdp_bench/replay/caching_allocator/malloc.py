"""Allocate and free blocks, and defer frees until other streams are done (Tensor.record_stream).

Free blocks are split and merged in split_and_merge.py; new memory comes from segments.py. Follows class
DeviceCachingAllocator in torch's c10/cuda/CUDACachingAllocator.cpp; docstrings name its functions.
"""

from __future__ import annotations

from fsdp_bench.replay.caching_allocator.heap import (
    ACTIVE,
    ALLOCATED,
    BLOCK_ROW,
    BLOCKS_OF,
    CAPACITY,
    DEVICE,
    FIRST_QUEUED,
    HOST,
    NEVER,
    NEXT_READY,
    NO_MEMORY,
    NUM_EVENTS,
    NUM_OOMS,
    NUM_POOLS,
    NUM_QUEUED,
    NUM_RETRIES,
    NUM_STREAMS,
    PEAK_ACTIVE,
    PEAK_ALLOCATED,
    POOL,
    READY_ROW,
    SIZE,
    USES,
    Heap,
    row,
)
from fsdp_bench.replay.caching_allocator.segments import alloc_block, release_blocks
from fsdp_bench.replay.caching_allocator.sizes import MIN_BLOCK_BYTES, SMALL_BYTES
from fsdp_bench.replay.caching_allocator.split_and_merge import free_block, get_free_block


def allocate(heap: Heap, tensor: int, num_bytes: int, stream: int) -> bool:
    """Allocate a tensor's block; return False where the GPU is out of memory. Follows malloc, round_size, get_pool."""
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
    """Return a block of new memory, if need be after the cache is flushed.

    Follows malloc's chain of alloc_block, release_cached_blocks, alloc_block.

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
    """Wait for outstanding events, and release cached memory to the driver; release_cached_blocks."""
    for stream in range(NUM_STREAMS):  # synchronize_and_free_events
        if heap[NUM_QUEUED + stream] > 0:
            last = (heap[FIRST_QUEUED + stream] + heap[NUM_QUEUED + stream] - 1) % heap[CAPACITY]
            heap[HOST] = max(heap[HOST], heap[row(heap, READY_ROW + stream) + last])
    process_events(heap)
    for pool in range(NUM_POOLS):
        release_blocks(heap, pool)


def free(heap: Heap, tensor: int) -> None:
    """Free a tensor's block. Follows DeviceCachingAllocator::free. Raises KeyError for a tensor that is not alive."""
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
    """Note that another stream uses a tensor; ignore the stream it was allocated on. Follows recordStream."""
    block = heap[heap[BLOCKS_OF] + tensor]
    if block != NO_MEMORY and stream != heap[block + POOL] // 2:
        heap[block + USES] |= 1 << stream


def insert_events(heap: Heap, block: int) -> None:
    """Record an event on each stream that uses a freed block. Follows insert_events."""
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
    """Return when an event that is recorded now completes: a nanosecond after the last one, to keep their order."""
    heap[DEVICE] += 1
    return heap[DEVICE]


def process_events(heap: Heap) -> None:
    """Free blocks whose events have all completed.

    Follows process_events: of each stream's queue up to the first event that has not completed.
    """
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
