"""Segments: memory that the caching allocator gets from the GPU with cudaMalloc, and returns.

The rules are those of class DeviceCachingAllocator in torch's c10/cuda/CUDACachingAllocator.cpp, read in a copy of
pytorch/pytorch's main between 2.10 and 2.12; docstrings name its functions.
"""

from __future__ import annotations

from fsdp_bench.replay.caching_allocator.blocks import insert_free, position, remove_free_at, split_block
from fsdp_bench.replay.caching_allocator.expandable_segments import try_allocate_expandable_block, unmap_first
from fsdp_bench.replay.caching_allocator.heap import (
    AFTER,
    BEFORE,
    FREE_ROW,
    IS_EXPANDABLE,
    NUM_FREE,
    RESERVED,
    SIZE,
    Heap,
    drop_block,
    fresh_addresses,
    new_block,
    reserve,
    row,
)
from fsdp_bench.replay.caching_allocator.sizes import SMALL_SEGMENT_BYTES, segment_bytes


def alloc_block(heap: Heap, pool: int, size: int) -> int:
    """Return a block of a new segment, or 0 where the GPU has no memory for it; the last branch of alloc_block."""
    if heap[IS_EXPANDABLE]:
        return try_allocate_expandable_block(heap, pool, size)
    num_bytes = segment_bytes(size)
    if not reserve(heap, num_bytes):
        return 0
    block = new_block(heap, fresh_addresses(heap, num_bytes, SMALL_SEGMENT_BYTES), num_bytes, pool)
    insert_free(heap, block)
    return split_block(heap, pool, position(heap, block), size)


def release_blocks(heap: Heap, pool: int) -> None:
    """Release cached memory to the driver; release_blocks.

    These are segments that consist of one free block, and of expandable segments each page that lies in a free block.
    """
    if heap[IS_EXPANDABLE]:
        while unmap_first(heap, pool):
            pass
        return
    begin = row(heap, FREE_ROW + pool)
    for at in range(heap[NUM_FREE + pool] - 1, -1, -1):
        block = heap[begin + at]
        if heap[block + BEFORE] == 0 and heap[block + AFTER] == 0:
            remove_free_at(heap, pool, at)
            heap[RESERVED] -= heap[block + SIZE]
            drop_block(heap, block)
