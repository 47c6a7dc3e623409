"""Expandable segments: addresses for the whole GPU, and pages mapped to them as they are needed.

See Note [Expandable Segments] in torch's c10/cuda/CUDACachingAllocator.cpp; docstrings name its functions.
"""

from __future__ import annotations

from fsdp_bench.replay.caching_allocator.heap import (
    ADDRESS,
    AFTER,
    BEFORE,
    FREE,
    FREE_ROW,
    GPU_BYTES,
    IN_USE,
    NUM_FREE,
    NUM_UNMAPPED,
    POOL,
    RESERVED,
    SIZE,
    STATE,
    UNLIMITED,
    UNMAPPED,
    UNMAPPED_ROW,
    Heap,
    absorb_after,
    absorb_before,
    delete,
    drop_block,
    fresh_addresses,
    insert,
    link,
    new_block,
    reserve,
    row,
)
from fsdp_bench.replay.caching_allocator.sizes import page_bytes
from fsdp_bench.replay.caching_allocator.split_and_merge import (
    free_block,
    insert_free,
    position,
    remove_free,
    split_block,
)


def try_allocate_expandable_block(heap: Heap, pool: int, size: int) -> int:
    """Map pages until a sequence of free and unmapped blocks holds ``size``; try_allocate_expandable_block.

    Pages that were mapped before the GPU ran out of memory stay mapped, as in torch.
    """
    block = find_expandable_block(heap, pool, size)
    if heap[block + STATE] == UNMAPPED:
        block = map_block(heap, block, min(heap[block + SIZE], size))
    while block and heap[block + SIZE] < size:
        rest = heap[block + AFTER]
        block = map_block(heap, rest, min(size - heap[block + SIZE], heap[rest + SIZE]))
    if block == 0:
        return 0
    return split_block(heap, pool, position(heap, block), size)


def find_expandable_block(heap: Heap, pool: int, size: int) -> int:
    """Return the first block of the lowest sequence of free and unmapped blocks that hold ``size``, or a new segment.

    A segment has addresses for 1 1/8 of the GPU (ExpandableSegment's constructor).
    """
    begin = row(heap, UNMAPPED_ROW + pool)
    for index in range(heap[NUM_UNMAPPED + pool]):
        first = heap[begin + index]
        before = heap[first + BEFORE]
        if before and heap[before + STATE] == FREE:
            first = before
        available, block = 0, first
        while available < size and block and heap[block + STATE] != IN_USE:
            available += heap[block + SIZE]
            block = heap[block + AFTER]
        if available >= size:
            return first
    page, gpu = page_bytes(pool), heap[GPU_BYTES]
    wanted = gpu if gpu == UNLIMITED else gpu + gpu // 8
    num_bytes = -(-wanted // page) * page
    segment = new_block(heap, fresh_addresses(heap, num_bytes, page), num_bytes, pool)
    add_unmapped(heap, segment)
    return segment


def map_block(heap: Heap, block: int, size: int) -> int:
    """Map pages to the first ``size`` bytes of an unmapped block; map_block, ExpandableSegment::map.

    Returns the free block that holds them, or 0 where the GPU is out of memory.
    """
    pool = heap[block + POOL]
    page = page_bytes(pool)
    num_bytes = -(-size // page) * page
    if not reserve(heap, num_bytes):
        return 0
    remove_unmapped(heap, block)
    heap[block + STATE] = IN_USE
    if num_bytes < heap[block + SIZE]:
        rest = new_block(heap, heap[block + ADDRESS] + num_bytes, heap[block + SIZE] - num_bytes, pool)
        link(heap, rest, block, heap[block + AFTER])
        add_unmapped(heap, rest)
        heap[block + SIZE] = num_bytes
    return free_block(heap, block)


def unmap_first(heap: Heap, pool: int) -> bool:
    """Unmap the whole pages of the first free block that has any; unmap_block."""
    page, begin = page_bytes(pool), row(heap, FREE_ROW + pool)
    for index in range(heap[NUM_FREE + pool]):
        block = heap[begin + index]
        low = -(-heap[block + ADDRESS] // page) * page
        high = (heap[block + ADDRESS] + heap[block + SIZE]) // page * page
        if low < high:
            unmap_block(heap, block, low, high)
            return True
    return False


def unmap_block(heap: Heap, block: int, low: int, high: int) -> None:
    """Unmap the pages between two addresses of a free block; the rest on either side stays free."""
    remove_free(heap, block)
    pool, address = heap[block + POOL], heap[block + ADDRESS]
    tail_bytes = address + heap[block + SIZE] - high
    if address < low:
        front = new_block(heap, address, low - address, pool)
        link(heap, front, heap[block + BEFORE], block)
        insert_free(heap, front)
    if tail_bytes > 0:
        tail = new_block(heap, high, tail_bytes, pool)
        link(heap, tail, block, heap[block + AFTER])
        insert_free(heap, tail)
    heap[block + ADDRESS] = low
    heap[block + SIZE] = high - low
    heap[RESERVED] -= high - low
    before, after = heap[block + BEFORE], heap[block + AFTER]
    if before and heap[before + STATE] == UNMAPPED:
        remove_unmapped(heap, before)
        absorb_before(heap, block, before)
    if after and heap[after + STATE] == UNMAPPED:
        remove_unmapped(heap, after)
        absorb_after(heap, block, after)
    if heap[block + BEFORE] or heap[block + AFTER]:
        add_unmapped(heap, block)
    else:
        drop_block(heap, block)


def add_unmapped(heap: Heap, block: int) -> None:
    """Insert a block into its pool's list of unmapped blocks, which is ordered by address."""
    pool = heap[block + POOL]
    begin, count = row(heap, UNMAPPED_ROW + pool), heap[NUM_UNMAPPED + pool]
    at = count
    while at > 0 and heap[heap[begin + at - 1] + ADDRESS] > heap[block + ADDRESS]:
        at -= 1
    insert(heap, begin, count, at, block)
    heap[NUM_UNMAPPED + pool] += 1
    heap[block + STATE] = UNMAPPED


def remove_unmapped(heap: Heap, block: int) -> None:
    """Remove a block from its pool's list of unmapped blocks."""
    pool = heap[block + POOL]
    begin, at = row(heap, UNMAPPED_ROW + pool), 0
    while heap[begin + at] != block:
        at += 1
    delete(heap, begin, heap[NUM_UNMAPPED + pool], at)
    heap[NUM_UNMAPPED + pool] -= 1
