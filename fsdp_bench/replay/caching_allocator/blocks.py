"""Blocks of the caching allocator, pools of free ones, and the sizes that decide where a request goes.

Each stream has a pool for large blocks and one for small blocks: torch's BlockPool orders blocks by stream first, and
get_free_block never crosses to another stream.

The constants are those of c10/core/AllocatorConfig.h as installed with torch 2.13.0. Every setting of
PYTORCH_CUDA_ALLOC_CONF but ``expandable_segments`` has its default: unlimited max_split_size_mb, no
roundup_power2_divisions, no garbage_collection_threshold, large_segment_size of 20 MiB.
"""

from __future__ import annotations

from bisect import bisect_left

from fsdp_bench.simulate.events import Stream

COMPILED = not __file__.endswith(".py")
"""Whether Cython has compiled this module (setup.py)."""

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

NUM_STREAMS = len(Stream)
NUM_POOLS = 2 * NUM_STREAMS
"""Each stream has a pool for large blocks, ``2 * stream``, and one for small blocks, ``2 * stream + 1``."""


def rounded(num_bytes: int) -> int:
    """Return the size of the block for a request; round_size."""
    return -(-num_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES


def pool_of(size: int, stream: int) -> int:
    """Return the pool of a block of this size on a stream; get_pool."""
    return 2 * stream + (size <= SMALL_BYTES)


def segment_bytes(size: int) -> int:
    """Return what cudaMalloc is asked for when no free block holds ``size`` bytes; get_allocation_size."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < MIN_LARGE_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size // LARGE_ROUND_BYTES) * LARGE_ROUND_BYTES


def page_bytes(pool: int) -> int:
    """Return the page of a pool's segments: 2 MiB in a small one, 20 MiB in a large one."""
    return SMALL_SEGMENT_BYTES if pool % 2 == 1 else LARGE_SEGMENT_BYTES


class Block:
    """A piece of a segment; torch's struct Block."""

    __slots__ = ("address", "after", "before", "is_free", "is_unmapped", "num_events", "pool", "size", "used_by")

    def __init__(self, address: int, size: int, pool: int) -> None:
        self.address, self.size, self.pool = address, size, pool
        self.is_free = False
        """Whether it is in its pool."""
        self.is_unmapped = False
        """Whether it is addresses of an expandable segment without memory."""
        self.before: Block | None = None
        """The neighbour at lower addresses. None at the beginning of the segment."""
        self.after: Block | None = None
        self.used_by: set[int] | None = None
        """Other streams that use it; stream_uses."""
        self.num_events = 0
        """Events that its free waits for; event_count."""

    def cut(self, size: int) -> Block:
        """Keep the first ``size`` bytes, and return the rest, which is as free or unmapped as they are."""
        rest = Block(self.address + size, self.size - size, self.pool)
        rest.is_free, rest.is_unmapped, self.size = self.is_free, self.is_unmapped, size
        rest.before, rest.after, self.after = self, self.after, rest
        if rest.after is not None:
            rest.after.before = rest
        return rest

    def absorb(self, after: Block) -> None:
        """Take over the neighbour behind."""
        self.size += after.size
        self.after = after.after
        if self.after is not None:
            self.after.before = self


SIZE_STEP = 1 << 64
"""More than any address."""


class BlockPool:
    """The free blocks of a pool by size, equal ones by address; BlockComparatorSize."""

    __slots__ = ("blocks", "orders")

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.orders: list[int] = []
        """The size above the address of each block, for Python's bisect, which is faster than a loop in Python."""

    def first(self, size: int, address: int = 0) -> int:
        """Return the index of the first block that is as large, and of equal ones the first from an address on."""
        if not COMPILED:
            return bisect_left(self.orders, size * SIZE_STEP + address)
        low, high = 0, len(self.blocks)
        while low < high:
            middle = (low + high) >> 1
            block = self.blocks[middle]
            if block.size < size or (block.size == size and block.address < address):
                low = middle + 1
            else:
                high = middle
        return low

    def insert(self, block: Block) -> None:
        """Add a block."""
        at = self.first(block.size, block.address)
        self.blocks.insert(at, block)
        if not COMPILED:
            self.orders.insert(at, block.size * SIZE_STEP + block.address)

    def take(self, at: int) -> Block:
        """Remove the block at an index, and return it."""
        if not COMPILED:
            del self.orders[at]
        return self.blocks.pop(at)

    def remove(self, block: Block) -> None:
        """Remove a block."""
        self.take(self.first(block.size, block.address))
