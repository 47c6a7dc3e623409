"""Segments and the pools that hold their free blocks: the memory side of the CUDA caching allocator.

The rules are those of class DeviceCachingAllocator in torch's c10/cuda/CUDACachingAllocator.cpp, read in a copy of
pytorch/pytorch's main between 2.10 and 2.12; docstrings name its functions. The constants are those of
c10/core/AllocatorConfig.h as installed with torch 2.13.0. Every setting of PYTORCH_CUDA_ALLOC_CONF but
``expandable_segments`` has its default: unlimited max_split_size_mb, no roundup_power2_divisions, no
garbage_collection_threshold, large_segment_size of 20 MiB.

A pool here is what torch's BlockPool holds for one stream: BlockComparatorSize orders by stream first and
get_free_block never crosses to another one, so a set for each is the same thing.
"""

from __future__ import annotations

from fsdp_bench.replay.heap import (
    ADDRESS,
    AFTER,
    BEFORE,
    FREE,
    FREE_ROW,
    GPU_BYTES,
    IN_USE,
    IS_EXPANDABLE,
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

MIN_BLOCK_BYTES = 512
"""kMinBlockSize: every size is rounded up to a multiple of it."""
SMALL_BYTES = 1 << 20
"""kSmallSize: the largest block of the small pool."""
SMALL_SEGMENT_BYTES = 2 << 20
"""kSmallBuffer: the small pool's segments, and the pages of its expandable segments."""
LARGE_SEGMENT_BYTES = 20 << 20
"""large_segment_size: segments for requests below MIN_LARGE_BYTES, and the pages of large expandable segments."""
MIN_LARGE_BYTES = 10 << 20
"""kMinLargeAlloc: from here on a request has a segment of its own size."""
LARGE_ROUND_BYTES = 2 << 20
"""kRoundLarge: such a segment is a multiple of it."""


def segment_bytes(size: int) -> int:
    """Return what cudaMalloc is asked for when no free block holds ``size`` bytes; get_allocation_size."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < MIN_LARGE_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size // LARGE_ROUND_BYTES) * LARGE_ROUND_BYTES


def lower_bound(heap: Heap, pool: int, size: int, address: int, low: int, high: int) -> int:
    """Return where between two places of the set a block of this size and address belongs.

    lower_bound under BlockComparatorSize.
    """
    begin = row(heap, FREE_ROW + pool)
    while low < high:
        middle = (low + high) // 2
        block = heap[begin + middle]
        other = heap[block + SIZE]
        if other < size or (other == size and heap[block + ADDRESS] < address):
            low = middle + 1
        else:
            high = middle
    return low


def position(heap: Heap, block: int) -> int:
    """Return where a free block is in its pool's set."""
    pool = heap[block + POOL]
    return lower_bound(heap, pool, heap[block + SIZE], heap[block + ADDRESS], 0, heap[NUM_FREE + pool])


def insert_free(heap: Heap, block: int) -> None:
    """Put a block into its pool's set."""
    pool = heap[block + POOL]
    insert(heap, row(heap, FREE_ROW + pool), heap[NUM_FREE + pool], position(heap, block), block)
    heap[NUM_FREE + pool] += 1
    heap[block + STATE] = FREE


def remove_free_at(heap: Heap, pool: int, at: int) -> int:
    """Take the block at a place out of a pool's set."""
    begin = row(heap, FREE_ROW + pool)
    block = heap[begin + at]
    delete(heap, begin, heap[NUM_FREE + pool], at)
    heap[NUM_FREE + pool] -= 1
    heap[block + STATE] = IN_USE
    return block


def remove_free(heap: Heap, block: int) -> None:
    """Take a block out of its pool's set."""
    remove_free_at(heap, heap[block + POOL], position(heap, block))


def reorder_smaller(heap: Heap, pool: int, at: int) -> None:
    """Move the block at a place of the set, which became smaller, to where it belongs."""
    begin = row(heap, FREE_ROW + pool)
    block = heap[begin + at]
    new = lower_bound(heap, pool, heap[block + SIZE], heap[block + ADDRESS], 0, at)
    insert(heap, begin, at, new, block)


def reorder_larger(heap: Heap, pool: int, at: int) -> None:
    """Move the block at a place of the set, which became larger, to where it belongs."""
    begin = row(heap, FREE_ROW + pool)
    block = heap[begin + at]
    new = lower_bound(heap, pool, heap[block + SIZE], heap[block + ADDRESS], at + 1, heap[NUM_FREE + pool])
    delete(heap, begin, new, at)
    heap[begin + new - 1] = block


def get_free_block(heap: Heap, pool: int, size: int) -> int:
    """Return a free block for ``size`` bytes, the rest split off, or 0; get_free_block, alloc_found_block.

    Best fit: the smallest that holds them, of equal ones the lowest. In expandable segments what a block can expand to
    decides, in get_free_block's walk behind the lower bound.
    """
    count = heap[NUM_FREE + pool]
    at = lower_bound(heap, pool, size, 0, 0, count)
    if at == count:
        return 0
    if heap[IS_EXPANDABLE]:
        at = least_expandable(heap, pool, at)
    return split_block(heap, pool, at, size)


def split_block(heap: Heap, pool: int, at: int, size: int) -> int:
    """Return the front of the free block at a place of the set; the rest stays free; should_split."""
    block = heap[row(heap, FREE_ROW + pool) + at]
    rest = heap[block + SIZE] - size
    if rest < (MIN_BLOCK_BYTES if pool % 2 == 1 or heap[IS_EXPANDABLE] else SMALL_BYTES + 1):
        return remove_free_at(heap, pool, at)
    front = new_block(heap, heap[block + ADDRESS], size, pool)
    link(heap, front, heap[block + BEFORE], block)
    heap[block + ADDRESS] += size
    heap[block + SIZE] = rest
    reorder_smaller(heap, pool, at)
    return front


def free_block(heap: Heap, block: int) -> int:
    """Take a block back and return what it is with its free neighbours; free_block, try_merge_blocks."""
    pool = heap[block + POOL]
    before, after = heap[block + BEFORE], heap[block + AFTER]
    is_free_before = before != 0 and heap[before + STATE] == FREE
    if after and heap[after + STATE] == FREE:
        if is_free_before:
            remove_free(heap, before)
            absorb_before(heap, block, before)
        at = position(heap, after)
        absorb_before(heap, after, block)
        reorder_larger(heap, pool, at)
        return after
    if is_free_before:
        at = position(heap, before)
        absorb_after(heap, before, block)
        reorder_larger(heap, pool, at)
        return before
    insert_free(heap, block)
    return block


def alloc_block(heap: Heap, pool: int, size: int) -> int:
    """Return a block of new memory from cudaMalloc, or 0 where the GPU has none; the last branch of alloc_block."""
    if heap[IS_EXPANDABLE]:
        return try_allocate_expandable_block(heap, pool, size)
    num_bytes = segment_bytes(size)
    if not reserve(heap, num_bytes):
        return 0
    block = new_block(heap, fresh_addresses(heap, num_bytes, SMALL_SEGMENT_BYTES), num_bytes, pool)
    insert_free(heap, block)
    return split_block(heap, pool, position(heap, block), size)


def release_blocks(heap: Heap, pool: int) -> None:
    """Return what is free to the GPU; release_blocks.

    Segments that are one free block (release_block); of expandable ones every page that lies wholly in one.
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


# -- expandable segments: addresses for the whole GPU, and pages mapped behind them (Note [Expandable Segments]) ----


def page_bytes(pool: int) -> int:
    """Return the page of a pool's segments: 2 MiB in a small one, 20 MiB in a large one."""
    return SMALL_SEGMENT_BYTES if pool % 2 == 1 else LARGE_SEGMENT_BYTES


def expandable_bytes(heap: Heap, block: int) -> int:
    """Return what a free block has with the unmapped one above it."""
    after = heap[block + AFTER]
    if after == 0 or heap[after + STATE] != UNMAPPED:
        return heap[block + SIZE]
    return heap[block + SIZE] + heap[after + SIZE]


def least_expandable(heap: Heap, pool: int, at: int) -> int:
    """Return the place behind ``at`` up to which what blocks can expand to becomes less."""
    begin, count = row(heap, FREE_ROW + pool), heap[NUM_FREE + pool]
    room = expandable_bytes(heap, heap[begin + at])
    while at + 1 < count:
        next_room = expandable_bytes(heap, heap[begin + at + 1])
        if next_room >= room:
            break
        at, room = at + 1, next_room
    return at


def try_allocate_expandable_block(heap: Heap, pool: int, size: int) -> int:
    """Map pages until a run of free and unmapped blocks holds ``size``; try_allocate_expandable_block.

    Pages that were mapped before the GPU ran out stay mapped, as in torch.
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
    """Return the lowest block from which free and unmapped ones hold ``size``, or a new segment; find_expandable_block.

    A segment has addresses for 1 1/8 of the GPU (ExpandableSegment's constructor).
    """
    begin = row(heap, UNMAPPED_ROW + pool)
    for index in range(heap[NUM_UNMAPPED + pool]):
        first = heap[begin + index]
        before = heap[first + BEFORE]
        if before and heap[before + STATE] == FREE:
            first = before
        room, block = 0, first
        while room < size and block and heap[block + STATE] != IN_USE:
            room += heap[block + SIZE]
            block = heap[block + AFTER]
        if room >= size:
            return first
    page, gpu = page_bytes(pool), heap[GPU_BYTES]
    wanted = gpu if gpu == UNLIMITED else gpu + gpu // 8
    num_bytes = -(-wanted // page) * page
    segment = new_block(heap, fresh_addresses(heap, num_bytes, page), num_bytes, pool)
    add_unmapped(heap, segment)
    return segment


def map_block(heap: Heap, block: int, size: int) -> int:
    """Put pages behind the first ``size`` bytes of an unmapped block; map_block, ExpandableSegment::map.

    Returns the free block that they are in, or 0 where the GPU has no more.
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
    """Take the whole pages out of the first free block that has any; unmap_block."""
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
    """Take the pages between two addresses out of a free block; what is left on either side stays free."""
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
    """Note an unmapped block, in the order of addresses."""
    pool = heap[block + POOL]
    begin, count = row(heap, UNMAPPED_ROW + pool), heap[NUM_UNMAPPED + pool]
    at = count
    while at > 0 and heap[heap[begin + at - 1] + ADDRESS] > heap[block + ADDRESS]:
        at -= 1
    insert(heap, begin, count, at, block)
    heap[NUM_UNMAPPED + pool] += 1
    heap[block + STATE] = UNMAPPED


def remove_unmapped(heap: Heap, block: int) -> None:
    """Forget that a block is unmapped."""
    pool = heap[block + POOL]
    begin, at = row(heap, UNMAPPED_ROW + pool), 0
    while heap[begin + at] != block:
        at += 1
    delete(heap, begin, heap[NUM_UNMAPPED + pool], at)
    heap[NUM_UNMAPPED + pool] -= 1
