"""The state of CUDA's caching allocator, and what allocating and freeing do to it.

The rules are those of class DeviceCachingAllocator in torch's c10/cuda/CUDACachingAllocator.cpp, read in a copy of
pytorch/pytorch's main between 2.10 and 2.12; docstrings name its functions.

Each stream has a pool for large blocks and one for small blocks: torch's BlockPool orders blocks by stream first, and
get_free_block never crosses to another stream. A free block is one integer in its pool's sorted list, the size above
the address, so that bisection finds the best fit. Two dictionaries find the free neighbours of a block. Segments have a
gap between them, so that blocks of two segments are never neighbours.

The constants are those of c10/core/AllocatorConfig.h as installed with torch 2.13.0. Every setting of
PYTORCH_CUDA_ALLOC_CONF but ``expandable_segments`` has its default: unlimited max_split_size_mb, no
roundup_power2_divisions, no garbage_collection_threshold, large_segment_size of 20 MiB.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator

from fsdp_bench.simulate.events import Queue, Stream

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


NUM_STREAMS = len(Stream)
NUM_POOLS = 2 * NUM_STREAMS
"""Each stream has a pool for large blocks, ``2 * stream``, and one for small blocks, ``2 * stream + 1``."""

SIZE_SHIFT = 64
"""A free block in its pool's list: ``size << SIZE_SHIFT | address``. Equal sizes are ordered by address."""
ADDRESS_MASK = (1 << SIZE_SHIFT) - 1

NEVER = 1 << 62

SEGMENT, FREE, DEFERRED, UNMAPPED = -1, -2, -3, -4
"""Owners of pieces of memory that are no tensor's block."""


Block = tuple[int, int, int]
"""Memory of a tensor: its address, size and pool."""


class Deferred:
    """A block that was freed while other streams used it."""

    __slots__ = ("block", "num_events")

    def __init__(self, block: Block, num_events: int) -> None:
        self.block, self.num_events = block, num_events


QUEUED = 1024
"""The most launches the host is ahead of a stream: measured (forums.developer.nvidia.com/t/68937), undocumented."""


class CachingAllocator:
    """One device's allocator. CUDA events are numbered in the order in which they are recorded.

    Args:
        gpu_bytes: what cudaMalloc may hand out to this process in all, or None for no limit.
    """

    def __init__(self, gpu_bytes: int | None = None) -> None:
        self.gpu_bytes = gpu_bytes
        self.blocks: dict[int, Block] = {}
        """By tensor."""
        self.free_blocks: list[list[int]] = [[] for _ in range(NUM_POOLS)]
        self.edges: dict[int, int] = {}
        """Each free block by the address at which it begins, and by the one at which it ends. These are different ones,
        because free neighbours are merged."""
        self.segments: dict[int, int] = {}
        """The size of each segment, by its first address."""
        self.next_address = SMALL_SEGMENT_BYTES
        self.allocated = self.peak_allocated = 0
        self.deferred_bytes = self.peak_active = 0
        self.reserved = self.peak_reserved = 0
        self.num_retries = 0
        self.smallest_rest = [SMALL_BYTES + 1, MIN_BLOCK_BYTES] * NUM_STREAMS
        """The size, in each pool, from which on the rest of a block stays free (should_split)."""
        self.num_recorded = 0
        """The number of the last event."""
        self.num_completed = 0
        """The last event of which the host knows that the device has done all before it."""
        self.num_launched = 0
        """Operators launched so far."""
        self.launched: deque[tuple[int, int]] = deque()
        """Numbers of launches, each with the last event recorded by then, while the next launch may be queued."""
        self.used_by: dict[int, set[int]] = {}
        """Other streams that use a block (stream_uses), by its address."""
        self.deferred: list[deque[tuple[int, Deferred]]] = [deque() for _ in range(NUM_STREAMS)]
        """Freed blocks of each stream, each with the number of its event."""
        self.next_deferred = NEVER
        """The event that the next deferred free waits for."""
        self.events: list[deque[int]] = [deque() for _ in range(len(Queue))]
        """Events for which nobody has waited yet."""

    def allocate(self, tensor: int, size: int, pool: int) -> bool:
        """Allocate a block of a rounded size; return False where the GPU is out of memory. Follows malloc."""
        if size == 0:  # NativeCachingAllocator::allocate
            self.blocks[tensor] = (0, 0, pool)
            return True
        if self.next_deferred <= self.num_completed:
            self.process_events()
        free = self.free_blocks[pool]
        at = bisect_left(free, size << SIZE_SHIFT)
        if at < len(free):
            block = self._take_best(pool, at, size)
        else:
            found = self._new_block_or_flush(pool, size)
            if found is None:
                return False
            block = found
        self.blocks[tensor] = block
        size = block[1]
        self.allocated = allocated = self.allocated + size
        if allocated > self.peak_allocated:
            self.peak_allocated = allocated
        if allocated + self.deferred_bytes > self.peak_active:
            self.peak_active = allocated + self.deferred_bytes
        return True

    def free(self, tensor: int) -> None:
        """Free a tensor's block. Follows DeviceCachingAllocator::free. Raises KeyError for one that is not alive."""
        block = self.blocks.pop(tensor)
        address, size, pool = block
        self.allocated -= size
        if self.used_by and address in self.used_by:
            self._insert_events(block)
        elif size:
            self.insert_free(address, size, pool)

    def record_stream(self, tensor: int, stream: int) -> None:
        """Note that another stream uses a tensor; ignore the stream it was allocated on. Follows recordStream."""
        address, size, pool = self.blocks[tensor]
        if size and stream != pool // 2:
            self.used_by.setdefault(address, set()).add(stream)

    def launch(self, count: int) -> None:
        """Issue operators. Where the stream's queue is full, the host waits until the oldest of them begin."""
        self.launched.append((self.num_launched, self.num_recorded))
        self.num_launched += count
        while self.launched[0][0] <= self.num_launched - QUEUED:
            self.num_completed = max(self.num_completed, self.launched.popleft()[1])

    def record_event(self) -> int:
        """Return the number of an event that is recorded now."""
        self.num_recorded += 1
        return self.num_recorded

    def process_events(self) -> None:
        """Free blocks whose events have all completed.

        Follows process_events: of each stream's queue up to the first event that has not completed.
        """
        self.next_deferred = NEVER
        for queue in self.deferred:
            while queue:
                event, freed = queue[0]
                if event > self.num_completed:
                    self.next_deferred = min(self.next_deferred, event)
                    break
                queue.popleft()
                freed.num_events -= 1
                if freed.num_events == 0:
                    address, size, pool = freed.block
                    self.deferred_bytes -= size
                    self.insert_free(address, size, pool)

    def release_cached_blocks(self) -> None:
        """Wait for outstanding events, and release cached memory to the driver; release_cached_blocks."""
        for queue in self.deferred:  # synchronize_and_free_events
            if queue:
                self.num_completed = max(self.num_completed, queue[-1][0])
        self.process_events()
        for pool in range(NUM_POOLS):
            self._release_blocks(pool)

    def insert_free(self, address: int, size: int, pool: int) -> int:
        """Free a block, merge it with its free neighbours, and return the result; free_block, try_merge_blocks."""
        free, edges = self.free_blocks[pool], self.edges
        end, key = address + size, size << SIZE_SHIFT | address
        after = edges.pop(end, 0)
        if after:
            del free[bisect_left(free, after)]
            key += after - end  # its size
            end += after >> SIZE_SHIFT
        before = edges.pop(address, 0)
        if before:
            del free[bisect_left(free, before)]
            key += before - address
            address = before & ADDRESS_MASK
        edges[address] = edges[end] = key
        insort(free, key)
        return key

    def rename_tensors(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Give what a step leaves the numbers of the tensors that it replaces, so that the step can run again."""
        for old, new in pairs:
            self.blocks[old] = self.blocks.pop(new)

    def state(self) -> tuple[object, ...]:
        """Return what decides all that follows: two equal states have the same future, but for peaks and counts.

        Addresses decide by their order alone, so that a block is named by its place in that order.
        """
        pieces = sorted(self.pieces())
        places, done = {address: place for place, (address, *_) in enumerate(pieces)}, self.num_completed
        return (
            [piece[1:] for piece in pieces],
            [(places[address], streams) for address, streams in sorted(self.used_by.items())],
            [[(event - done, places[freed.block[0]]) for event, freed in queue] for queue in self.deferred],
            [[max(event - done, 0) for event in queue] for queue in self.events],
            self.num_recorded - done,
            [(before - self.num_launched, max(event - done, 0)) for before, event in self.launched],
        )

    def pieces(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield segments and blocks: each one's address, what it is or whose, its size and its pool."""
        for address, size in self.segments.items():
            yield address, SEGMENT, size, 0
        for tensor, (address, size, pool) in self.blocks.items():
            yield address, tensor, size, pool
        for pool, free in enumerate(self.free_blocks):
            for key in free:
                yield key & ADDRESS_MASK, FREE, key >> SIZE_SHIFT, pool
        for queue in self.deferred:
            for _, freed in queue:
                address, size, pool = freed.block
                yield address, DEFERRED, size, pool

    def reserve(self, num_bytes: int) -> bool:
        """Reserve physical memory; return False where the GPU has none left (cudaErrorMemoryAllocation)."""
        reserved = self.reserved + num_bytes
        if self.gpu_bytes is not None and reserved > self.gpu_bytes:
            return False
        self.reserved = reserved
        self.peak_reserved = max(self.peak_reserved, reserved)
        return True

    def new_segment(self, num_bytes: int, alignment: int) -> int:
        """Add a segment, and return its address."""
        address = -(-self.next_address // alignment) * alignment
        self.next_address = address + num_bytes + MIN_BLOCK_BYTES
        self.segments[address] = num_bytes
        return address

    def remove_free(self, key: int, pool: int) -> None:
        """Remove a free block from its pool's list."""
        free, address = self.free_blocks[pool], key & ADDRESS_MASK
        del free[bisect_left(free, key)], self.edges[address], self.edges[address + (key >> SIZE_SHIFT)]

    def _take(self, pool: int, at: int, size: int) -> Block:
        """Take ``size`` bytes of the free block at an index; the rest stays free if should_split."""
        free, edges = self.free_blocks[pool], self.edges
        key = free.pop(at)
        address, available = key & ADDRESS_MASK, key >> SIZE_SHIFT
        del edges[address]
        end = address + available
        if available - size < self.smallest_rest[pool]:
            del edges[end]
            return address, available, pool
        rest = key - (size << SIZE_SHIFT) + size
        edges[address + size] = edges[end] = rest
        insort(free, rest, 0, at)
        return address, size, pool

    _take_best = _take
    """Take from the free blocks, of which the smallest that is large enough is at an index; get_free_block.

    It is the best fit; of equal ones their order gives the one with the lowest address.
    """

    def _new_block_or_flush(self, pool: int, size: int) -> Block | None:
        """Return a block of new memory, if need be after the cache is flushed.

        Follows malloc's chain of alloc_block, release_cached_blocks, alloc_block. Between the two,
        release_available_cached_blocks does nothing while max_split_size is unlimited. The retry is counted also when
        it fails, and does not search the pool again.
        """
        block = self._new_block(pool, size)
        if block is None:
            self.release_cached_blocks()
            self.num_retries += 1
            block = self._new_block(pool, size)
        return block

    def _new_block(self, pool: int, size: int) -> Block | None:
        """Return a block of a new segment, or None where the GPU has no memory for it; the end of alloc_block."""
        num_bytes = segment_bytes(size)
        if not self.reserve(num_bytes):
            return None
        key = self.insert_free(self.new_segment(num_bytes, SMALL_SEGMENT_BYTES), num_bytes, pool)
        return self._take(pool, bisect_left(self.free_blocks[pool], key), size)

    def _release_blocks(self, pool: int) -> None:
        """Release segments that consist of one free block to the driver; release_blocks."""
        for key in list(self.free_blocks[pool]):
            address, size = key & ADDRESS_MASK, key >> SIZE_SHIFT
            if self.segments.get(address) == size:
                self.remove_free(key, pool)
                del self.segments[address]
                self.reserved -= size

    def _insert_events(self, block: Block) -> None:
        """Record an event on each stream that uses a freed block. Follows insert_events."""
        self.deferred_bytes += block[1]
        streams = self.used_by.pop(block[0])
        freed = Deferred(block, len(streams))
        for stream in sorted(streams):
            event = self.record_event()
            self.deferred[stream].append((event, freed))
            self.next_deferred = min(self.next_deferred, event)
