"""The allocator's replay call by call, under torch's names."""

from __future__ import annotations

from types import FunctionType
from typing import NamedTuple

from fsdp_bench.replay.caching_allocator import execution, malloc
from fsdp_bench.replay.caching_allocator import heap as places
from fsdp_bench.replay.caching_allocator.heap import fresh_heap
from fsdp_bench.simulate.events import Kind

CAPACITY = 5000


class Block(NamedTuple):
    """A piece of a segment."""

    place: int
    address: int
    size: int
    is_free: bool
    is_mapped: bool


class CachingAllocator:
    """One device's allocator. Tensors are numbers that the caller chooses, below CAPACITY; events are by queue."""

    def __init__(
        self,
        gpu_bytes: int | None = None,
        *,
        expandable_segments: bool = False,
    ) -> None:
        fresh = fresh_heap(gpu_bytes, expandable_segments, 0, CAPACITY, CAPACITY)
        is_python = isinstance(execution.execute, FunctionType)  # else another test of this process compiled it
        self.heap = fresh.tolist() if is_python else fresh
        self.live: set[int] = set()

    allocated_bytes = property(lambda self: self.heap[places.ALLOCATED])
    peak_allocated_bytes = property(lambda self: self.heap[places.PEAK_ALLOCATED])
    active_bytes = property(lambda self: self.heap[places.ACTIVE])
    peak_active_bytes = property(lambda self: self.heap[places.PEAK_ACTIVE])
    reserved_bytes = property(lambda self: self.heap[places.RESERVED])
    peak_reserved_bytes = property(lambda self: self.heap[places.PEAK_RESERVED])
    num_alloc_retries = property(lambda self: self.heap[places.NUM_RETRIES])
    num_ooms = property(lambda self: self.heap[places.NUM_OOMS])

    def allocate(self, tensor: int, num_bytes: int, stream: int = 0) -> bool:
        fitted = malloc.allocate(self.heap, tensor, num_bytes, stream)
        if fitted:
            self.live.add(tensor)
        return fitted

    def free(self, tensor: int) -> None:
        malloc.free(self.heap, tensor)
        self.live.remove(tensor)

    def record_stream(self, tensor: int, stream: int) -> None:
        malloc.record_stream(self.heap, tensor, stream)

    def work(self, nanoseconds: int = 1000) -> None:
        self.heap[places.DEVICE] += nanoseconds

    def record_event(self, queue: int) -> None:
        execution.wait(self.heap, Kind.RECORD_EVENT, queue, 0)

    def host_wait(self, queue: int) -> None:
        execution.wait(self.heap, Kind.HOST_WAIT, queue, 0)

    def synchronize(self) -> None:
        execution.wait(self.heap, Kind.SYNCHRONIZE, 0, 0)

    def empty_cache(self) -> None:
        malloc.release_cached_blocks(self.heap)

    def block_of(self, tensor: int) -> Block | None:
        """None for a tensor without bytes."""
        place = self.heap[self.heap[places.BLOCKS_OF] + tensor]
        return None if place == places.NO_MEMORY else self._block(place)

    def chain(self, block: Block) -> list[Block]:
        """Every block of a block's segment, from the lowest to the highest."""
        place, found = block.place, []
        while self.heap[place + places.BEFORE]:
            place = self.heap[place + places.BEFORE]
        while place:
            after = self.heap[place + places.AFTER]
            assert not after or self.heap[after + places.BEFORE] == place
            found.append(self._block(place))
            place = after
        return found

    def _block(self, place: int) -> Block:
        state = self.heap[place + places.STATE]
        return Block(
            place,
            self.heap[place + places.ADDRESS],
            self.heap[place + places.SIZE],
            state == places.FREE,
            state != places.UNMAPPED,
        )
