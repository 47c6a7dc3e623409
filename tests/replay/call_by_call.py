"""The allocator's replay call by call, under torch's names."""

from __future__ import annotations

from typing import NamedTuple

from fsdp_bench.replay.caching_allocator import allocator, expandable_segments
from fsdp_bench.replay.caching_allocator.allocator import pool_of, rounded
from fsdp_bench.replay.caching_allocator.program import Op
from fsdp_bench.replay.caching_allocator.replay import wait


class Block(NamedTuple):
    """A piece of a segment."""

    address: int
    size: int
    is_free: bool
    is_mapped: bool


class CachingAllocator:
    """One device's allocator. Tensors are numbers that the caller chooses; events are by queue."""

    def __init__(
        self,
        gpu_bytes: int | None = None,
        *,
        expandable_segments: bool = False,
    ) -> None:
        self.state = (_EXPANDABLE if expandable_segments else allocator.CachingAllocator)(gpu_bytes)
        self.live: set[int] = set()

    allocated_bytes = property(lambda self: self.state.allocated)
    peak_allocated_bytes = property(lambda self: self.state.peak_allocated)
    active_bytes = property(lambda self: self.state.allocated + self.state.deferred_bytes)
    peak_active_bytes = property(lambda self: self.state.peak_active)
    reserved_bytes = property(lambda self: self.state.reserved)
    peak_reserved_bytes = property(lambda self: self.state.peak_reserved)
    num_alloc_retries = property(lambda self: self.state.num_retries)

    def allocate(self, tensor: int, num_bytes: int, stream: int = 0) -> bool:
        size = rounded(num_bytes)
        fitted = self.state.allocate(tensor, size, pool_of(size, stream))
        if fitted:
            self.live.add(tensor)
        return fitted

    def free(self, tensor: int) -> None:
        self.state.free(tensor)
        self.live.remove(tensor)

    def record_stream(self, tensor: int, stream: int) -> None:
        self.state.record_stream(tensor, stream)

    def record_event(self, queue: int) -> None:
        wait(self.state, Op.RECORD_EVENT, queue)

    def host_wait(self, queue: int) -> None:
        wait(self.state, Op.HOST_WAIT, queue)

    def synchronize(self) -> None:
        wait(self.state, Op.SYNCHRONIZE, 0)

    def empty_cache(self) -> None:
        self.state.release_cached_blocks()

    def block_of(self, tensor: int) -> Block | None:
        """None for a tensor without bytes."""
        address, size, _ = self.state.blocks[tensor]
        return Block(address, size, is_free=False, is_mapped=True) if size else None

    def segment_of(self, block: Block) -> list[Block]:
        """Every block of a block's segment, from the lowest to the highest."""
        low = max(address for address in self.state.segments if address <= block.address)
        high = low + self.state.segments[low]
        return [
            Block(address, size, what == allocator.FREE, what != allocator.UNMAPPED)
            for address, what, size, _ in sorted(set(self.state.pieces()))
            if what != allocator.SEGMENT and low <= address < high
        ]


_EXPANDABLE = expandable_segments.ExpandableAllocator
