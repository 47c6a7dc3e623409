"""Free blocks of the caching allocator: which one is taken, when one is split, and how neighbours are merged.

Follows class DeviceCachingAllocator in torch's c10/cuda/CUDACachingAllocator.cpp; docstrings name its functions.

A pool here is what torch's BlockPool holds for one stream: BlockComparatorSize orders by stream first and
get_free_block never crosses to another one, so a set for each is the same thing.
"""

from __future__ import annotations

from fsdp_bench.replay.caching_allocator.heap import (
    ADDRESS,
    AFTER,
    BEFORE,
    FREE,
    FREE_ROW,
    IN_USE,
    IS_EXPANDABLE,
    NUM_FREE,
    POOL,
    SIZE,
    STATE,
    UNMAPPED,
    Heap,
    absorb_after,
    absorb_before,
    delete,
    insert,
    link,
    new_block,
    row,
)
from fsdp_bench.replay.caching_allocator.sizes import MIN_BLOCK_BYTES, SMALL_BYTES


def lower_bound(heap: Heap, pool: int, size: int, address: int, low: int, high: int) -> int:
    """Return the index, from ``low`` to ``high``, at which a block of this size and address belongs in its pool's set.

    std::set::lower_bound under BlockComparatorSize.
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
    """Return the index of a free block in its pool's set."""
    pool = heap[block + POOL]
    return lower_bound(heap, pool, heap[block + SIZE], heap[block + ADDRESS], 0, heap[NUM_FREE + pool])


def insert_free(heap: Heap, block: int) -> None:
    """Insert a free block into its pool's set."""
    pool = heap[block + POOL]
    insert(heap, row(heap, FREE_ROW + pool), heap[NUM_FREE + pool], position(heap, block), block)
    heap[NUM_FREE + pool] += 1
    heap[block + STATE] = FREE


def remove_free_at(heap: Heap, pool: int, at: int) -> int:
    """Remove the block at an index from a pool's set, and return it."""
    begin = row(heap, FREE_ROW + pool)
    block = heap[begin + at]
    delete(heap, begin, heap[NUM_FREE + pool], at)
    heap[NUM_FREE + pool] -= 1
    heap[block + STATE] = IN_USE
    return block


def remove_free(heap: Heap, block: int) -> None:
    """Remove a block from its pool's set."""
    remove_free_at(heap, heap[block + POOL], position(heap, block))


def reorder_smaller(heap: Heap, pool: int, at: int) -> None:
    """Restore the order of a set whose block at index ``at`` became smaller."""
    begin = row(heap, FREE_ROW + pool)
    block = heap[begin + at]
    new = lower_bound(heap, pool, heap[block + SIZE], heap[block + ADDRESS], 0, at)
    insert(heap, begin, at, new, block)


def reorder_larger(heap: Heap, pool: int, at: int) -> None:
    """Restore the order of a set whose block at index ``at`` became larger."""
    begin = row(heap, FREE_ROW + pool)
    block = heap[begin + at]
    new = lower_bound(heap, pool, heap[block + SIZE], heap[block + ADDRESS], at + 1, heap[NUM_FREE + pool])
    delete(heap, begin, new, at)
    heap[begin + new - 1] = block


def get_free_block(heap: Heap, pool: int, size: int) -> int:
    """Return a free block for ``size`` bytes, split where it is larger, or 0; get_free_block, alloc_found_block.

    Best fit: the smallest block that is large enough; of equal ones that with the lowest address. With expandable
    segments, from there on the one that can expand to the smallest size, as get_free_block chooses it.
    """
    count = heap[NUM_FREE + pool]
    at = lower_bound(heap, pool, size, 0, 0, count)
    if at == count:
        return 0
    if heap[IS_EXPANDABLE]:
        at = least_expandable(heap, pool, at)
    return split_block(heap, pool, at, size)


def expandable_bytes(heap: Heap, block: int) -> int:
    """Return the size of a free block plus the unmapped block after it: to what it can expand."""
    after = heap[block + AFTER]
    if after == 0 or heap[after + STATE] != UNMAPPED:
        return heap[block + SIZE]
    return heap[block + SIZE] + heap[after + SIZE]


def least_expandable(heap: Heap, pool: int, at: int) -> int:
    """Return the last index, from ``at`` on, before the size to which blocks can expand stops decreasing."""
    begin, count = row(heap, FREE_ROW + pool), heap[NUM_FREE + pool]
    size = expandable_bytes(heap, heap[begin + at])
    while at + 1 < count:
        next_size = expandable_bytes(heap, heap[begin + at + 1])
        if next_size >= size:
            break
        at, size = at + 1, next_size
    return at


def split_block(heap: Heap, pool: int, at: int, size: int) -> int:
    """Return the first ``size`` bytes of the free block at an index as a block; the rest stays free if should_split."""
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
    """Free a block, merge it with its free neighbours, and return the result; free_block, try_merge_blocks."""
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
