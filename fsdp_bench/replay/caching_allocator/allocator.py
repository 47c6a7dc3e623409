"""The state of CUDA's caching allocator, and what allocating and freeing do to it.

The rules are those of class DeviceCachingAllocator in torch's c10/cuda/CUDACachingAllocator.cpp, read in a copy of
pytorch/pytorch's main between 2.10 and 2.12; docstrings name its functions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from fsdp_bench.replay.caching_allocator.blocks import (
    NUM_POOLS,
    NUM_STREAMS,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    Block,
    BlockPool,
    segment_bytes,
)
from fsdp_bench.simulate.events import Kind, Queue

Instruction = tuple[Kind, int, int, int, int, int]
"""The kind of an event, four numbers, and the index of the event:

    ALLOCATE         tensor, stride, rounded bytes, pool
    FREE             tensor, stride
    RECORD_STREAM    tensor, stride, 0, stream
    KERNEL           how many were launched
    (others)         queue

A stride is added to the tensor's number for each block that was not simulated.
"""

# Members of an enum are looked up at each use.
_ALLOCATE, _FREE, _RECORD_STREAM = Kind.ALLOCATE, Kind.FREE, Kind.RECORD_STREAM

FREE, DEFERRED, UNMAPPED = -1, -2, -3
"""Owners of blocks that are no tensor's. Deferred: freed while other streams used it."""

NEVER = 1 << 62

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
        self.pools = [BlockPool() for _ in range(NUM_POOLS)]
        """The free blocks."""
        self.next_address = SMALL_SEGMENT_BYTES
        self.allocated = self.peak_allocated = 0
        self.deferred_bytes = self.peak_active = 0
        self.reserved = self.peak_reserved = 0
        self.num_retries = self.retried_bytes = 0
        self.largest_kept_rest = SMALL_BYTES
        """The largest rest that is not split off a large block (should_split)."""
        self.num_recorded = 0
        """The number of the last event."""
        self.num_completed = 0
        """The last event of which the host knows that the device has done all before it."""
        self.num_launched = 0
        """Operators launched so far."""
        self.launched: deque[tuple[int, int]] = deque()
        """Numbers of launches, each with the last event recorded by then, while the next launch may be queued."""
        self.deferred: list[deque[tuple[int, Block]]] = [deque() for _ in range(NUM_STREAMS)]
        """Freed blocks that each stream uses, each with the number of its event."""
        self.next_deferred = NEVER
        """The event that the next deferred free waits for."""
        self.events: list[deque[int]] = [deque() for _ in range(len(Queue))]
        """Events for which nobody has waited yet."""

    def allocate(self, tensor: int, size: int, pool: int) -> bool:
        """Allocate a block of a rounded size; return False where the GPU is out of memory. Follows malloc."""
        if size == 0:  # NativeCachingAllocator::allocate
            self.blocks[tensor] = Block(0, 0, pool)
            return True
        if self.next_deferred <= self.num_completed:
            self.process_events()
        free = self.pools[pool]
        at = free.first(size)
        found = self.take(free, self.best(free, at), size) if at < len(free.blocks) else self._flush_if_full(pool, size)
        if found is None:
            return False
        self.blocks[tensor] = found
        self.allocated = allocated = self.allocated + found.size
        if allocated > self.peak_allocated:
            self.peak_allocated = allocated
        if allocated + self.deferred_bytes > self.peak_active:
            self.peak_active = allocated + self.deferred_bytes
        return True

    def free(self, tensor: int) -> None:
        """Free a tensor's block. Follows DeviceCachingAllocator::free. Raises KeyError for one that is not alive."""
        block = self.blocks.pop(tensor)
        self.allocated -= block.size
        if block.used_by is not None:
            self._insert_events(block)
        elif block.size:
            self.insert_free(block)

    def record_stream(self, tensor: int, stream: int) -> None:
        """Note that another stream uses a tensor; ignore the stream it was allocated on. Follows recordStream."""
        block = self.blocks[tensor]
        if block.size and stream != block.pool // 2:
            if block.used_by is None:
                block.used_by = set()
            block.used_by.add(stream)

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
                event, block = queue[0]
                if event > self.num_completed:
                    self.next_deferred = min(self.next_deferred, event)
                    break
                queue.popleft()
                block.num_events -= 1
                if block.num_events == 0:
                    self.deferred_bytes -= block.size
                    self.insert_free(block)

    def release_cached_blocks(self) -> None:
        """Wait for outstanding events, and release cached memory to the driver; release_cached_blocks."""
        for queue in self.deferred:  # synchronize_and_free_events
            if queue:
                self.num_completed = max(self.num_completed, queue[-1][0])
        self.process_events()
        for pool in self.pools:
            self.release_blocks(pool)

    def insert_free(self, block: Block) -> Block:
        """Free a block, merge it with its free neighbours, and return the result; free_block, try_merge_blocks."""
        free = self.pools[block.pool]
        block.is_free = True
        after, before = block.after, block.before
        if after is not None and after.is_free:
            free.remove(after)
            block.absorb(after)
        if before is not None and before.is_free:
            free.remove(before)
            before.absorb(block)
            block = before
        free.insert(block)
        return block

    def rename_tensors(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Give what a step leaves the numbers of the tensors that it replaces, so that the step can run again."""
        for old, new in pairs:
            self.blocks[old] = self.blocks.pop(new)

    def state(self) -> tuple[object, ...]:
        """Return what decides all that follows: two equal states have the same future, but for peaks and counts.

        Addresses decide by their order alone, so that a block is named by its place in that order.
        """
        pieces, done = sorted(self.pieces(), key=lambda piece: (piece[0].address, piece[1])), self.num_completed
        places = {id(block): place for place, (block, _) in enumerate(pieces)}
        return (
            [(owner, block.size, block.pool, block.before is None, block.used_by) for block, owner in pieces],
            [[(event - done, places[id(block)]) for event, block in queue] for queue in self.deferred],
            [[max(event - done, 0) for event in queue] for queue in self.events],
            self.num_recorded - done,
            [(before - self.num_launched, max(event - done, 0)) for before, event in self.launched],
        )

    def pieces(self) -> list[tuple[Block, int]]:
        """Return all blocks and their owners. A block whose free is deferred is there once for each event."""
        return [
            *((block, tensor) for tensor, block in self.blocks.items()),
            *((block, FREE) for pool in self.pools for block in pool.blocks),
            *((block, DEFERRED) for queue in self.deferred for _, block in queue),
        ]

    def reserve(self, num_bytes: int) -> bool:
        """Reserve physical memory; return False where the GPU has none left (cudaErrorMemoryAllocation)."""
        reserved = self.reserved + num_bytes
        if self.gpu_bytes is not None and reserved > self.gpu_bytes:
            return False
        self.reserved = reserved
        self.peak_reserved = max(self.peak_reserved, reserved)
        return True

    def new_segment(self, num_bytes: int, alignment: int, pool: int) -> Block:
        """Return the addresses of a new segment as one block."""
        address = -(-self.next_address // alignment) * alignment
        self.next_address = address + num_bytes
        return Block(address, num_bytes, pool)

    def take(self, free: BlockPool, at: int, size: int) -> Block:
        """Take ``size`` bytes of the free block at an index; the rest stays free if should_split."""
        block = free.take(at)
        rest = block.size - size
        if rest > (0 if block.pool % 2 == 1 else self.largest_kept_rest):
            free.insert(block.cut(size))
        block.is_free = False
        return block

    def best(self, free: BlockPool, at: int) -> int:
        """Return which free block is taken, of which the smallest that is large enough is at an index; get_free_block.

        It is the best fit; of equal ones their order gives the one with the lowest address.
        """
        return at

    def _flush_if_full(self, pool: int, size: int) -> Block | None:
        """Return a block of new memory, if need be after the cache is flushed.

        Follows malloc's chain of alloc_block, release_cached_blocks, alloc_block. Between the two,
        release_available_cached_blocks does nothing while max_split_size is unlimited. The retry is counted also when
        it fails, and does not search the pool again.
        """
        block = self.new_block(pool, size)
        if block is None:
            before = self.reserved
            self.release_cached_blocks()
            self.num_retries += 1
            self.retried_bytes += before - self.reserved
            block = self.new_block(pool, size)
        return block

    def new_block(self, pool: int, size: int) -> Block | None:
        """Return a block of a new segment, or None where the GPU has no memory for it; the end of alloc_block."""
        num_bytes = segment_bytes(size)
        if not self.reserve(num_bytes):
            return None
        block = self.insert_free(self.new_segment(num_bytes, SMALL_SEGMENT_BYTES, pool))
        free = self.pools[pool]
        return self.take(free, free.first(block.size, block.address), size)

    def release_blocks(self, free: BlockPool) -> None:
        """Release segments that consist of one free block to the driver; release_blocks."""
        for block in free.blocks.copy():
            if block.before is None and block.after is None:
                free.remove(block)
                self.reserved -= block.size

    def _insert_events(self, block: Block) -> None:
        """Record an event on each stream that uses a freed block. Follows insert_events."""
        assert block.used_by is not None
        self.deferred_bytes += block.size
        block.num_events = len(block.used_by)
        for stream in sorted(block.used_by):
            event = self.record_event()
            self.deferred[stream].append((event, block))
            self.next_deferred = min(self.next_deferred, event)
        block.used_by = None


def execute(allocator: CachingAllocator, instructions: list[Instruction], layers_skipped: int) -> int | None:
    """Execute a section once: for one of the layers that the repeated block represents.

    Returns the index of the event that runs out of memory, where one does.
    """
    for kind, number, second, third, fourth, index in instructions:
        if kind is _FREE:
            allocator.free(number + layers_skipped * second)
        elif kind is _ALLOCATE:
            if not allocator.allocate(number + layers_skipped * second, third, fourth):
                return index
        elif kind is _RECORD_STREAM:
            allocator.record_stream(number + layers_skipped * second, fourth)
        else:
            wait(allocator, kind, number)
    return None


def wait(allocator: CachingAllocator, kind: Kind, queue: int) -> None:
    """Execute an instruction about events: launch operators, record an event, wait for one, or synchronize."""
    if kind is Kind.KERNEL:
        allocator.launch(queue)
    elif kind is Kind.RECORD_EVENT:
        allocator.events[queue].append(allocator.record_event())
    elif kind is Kind.SYNCHRONIZE:
        allocator.num_completed = allocator.num_recorded
    else:
        number = allocator.events[queue].popleft()
        if kind is Kind.HOST_WAIT:
            allocator.num_completed = max(allocator.num_completed, number)
