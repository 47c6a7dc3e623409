"""The CUDA caching allocator, replayed on the events of a step: peak reserved, and retries on a card of a given size.

Follows torch's DeviceCachingAllocator (c10/cuda/CUDACachingAllocator.cpp; versions and settings in segments.py). Not
covered: CUDA graphs and private pools, other settings than ``expandable_segments``, several threads, and memory that
does not go through the allocator (context, NCCL's buffers, cuBLAS workspaces that are not events).

**When a deferred free happens.** A block that another stream uses (Tensor.record_stream) is free again once an event,
recorded on that stream when the tensor was freed, has happened; malloc asks (process_events). There is no time in a
replay, so the caller chooses what is assumed:

- ``host_runs_ahead=True``: the host issues work long before the GPU does it, as in a step that the GPU bounds. An
  event has happened only if the host waited for something that is ordered after it: an event recorded later on that
  stream, or on a stream that waited for it (``stream_wait``). Where nothing is waited for, nothing is freed before the
  retry path does (synchronize_and_free_events). The most memory.
- ``streams_keep_pace=True`` in addition: what the host waited for shows how far the GPU is, and every stream is as far.
- ``host_runs_ahead=False``: an event has happened by the next allocation. The least memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fsdp_bench.predict.events import Event, Kind
from fsdp_bench.predict.program import BLOCK_STRIDE, Instruction, Program, plain
from fsdp_bench.predict.segments import MIN_BLOCK_BYTES, SMALL_BYTES, Block, Card, ExpandablePool, SegmentPool


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """Where a replay ended because the card was full."""

    phase: str
    """Label of the last MARK before it."""
    unit: int
    """Number of that MARK: the block that ran."""
    label: str
    """Label of the allocation that failed."""
    num_bytes: int
    """What it asked for, before rounding."""


@dataclass(frozen=True, slots=True)
class AllocatorReading:
    """What torch.cuda.memory_stats() would say after the events, or when they ran out of memory."""

    peak_allocated_bytes: int
    """allocated_bytes.all.peak: blocks in use, with what rounding adds."""
    peak_active_bytes: int
    """active_bytes.all.peak: and blocks whose release is deferred."""
    peak_reserved_bytes: int
    """reserved_bytes.all.peak: the segments."""
    num_alloc_retries: int
    """Failed allocations on the card that flushed the cache; each one stalls the step."""
    out_of_memory: OutOfMemory | None
    full_in_phase: str | None
    """Label of the MARK before the first retry."""


class CachingAllocator:
    """One device's caching allocator. Tensors, streams and events are numbers that the caller chooses.

    Args:
        card_bytes: what cudaMalloc may hand out to this process in all, or None for no limit.
        expandable_segments: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.
        host_runs_ahead: see the module.
        streams_keep_pace: see the module.
    """

    def __init__(
        self,
        card_bytes: int | None = None,
        *,
        expandable_segments: bool = False,
        host_runs_ahead: bool = True,
        streams_keep_pace: bool = False,
    ) -> None:
        self.allocated_bytes = 0
        self.peak_allocated_bytes = 0
        self.active_bytes = 0
        """Allocated, and freed while another stream still uses it."""
        self.peak_active_bytes = 0
        self.num_alloc_retries = 0
        self.num_ooms = 0
        self.full_in_phase: str | None = None
        """The phase of a program in which the first retry came."""
        self._card = Card(card_bytes)
        self._make_pool: type[SegmentPool] = ExpandablePool if expandable_segments else SegmentPool
        self._small: dict[int, SegmentPool] = {}
        self._large: dict[int, SegmentPool] = {}
        self._live: dict[int, Block | None] = {}
        self._deferred = _DeferredFrees(host_runs_ahead, streams_keep_pace)

    @property
    def reserved_bytes(self) -> int:
        """Bytes in segments."""
        return self._card.reserved_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        """The most bytes that were in segments at once."""
        return self._card.peak_reserved_bytes

    def allocate(self, tensor: int, num_bytes: int, stream: int = 0) -> bool:
        """Gives a tensor its memory, allocated on ``stream``; DeviceCachingAllocator::malloc, round_size, get_pool.

        Returns:
            False where the card has no room after the retry: torch's OutOfMemoryError. The tensor then has no memory.
        """
        if num_bytes == 0:  # NativeCachingAllocator::allocate
            self._live[tensor] = None
            return True
        if self._deferred.has_finished:
            self._free_all(self._deferred.pop_finished())
        size = -(-num_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
        is_small = size <= SMALL_BYTES
        pools = self._small if is_small else self._large
        pool = pools.get(stream)
        if pool is None:
            pool = pools[stream] = self._make_pool(self._card, stream, is_small)
        block = pool.take(size) or self._grow(pool, size)
        if block is None:
            return False
        self._live[tensor] = block
        size = block.size
        allocated = self.allocated_bytes = self.allocated_bytes + size
        if allocated > self.peak_allocated_bytes:
            self.peak_allocated_bytes = allocated
        active = self.active_bytes = self.active_bytes + size
        if active > self.peak_active_bytes:
            self.peak_active_bytes = active
        return True

    def free(self, tensor: int) -> None:
        """The last reference is gone; DeviceCachingAllocator::free. Raises KeyError for a tensor that is not alive."""
        block = self._live.pop(tensor)
        if block is None:
            return
        self.allocated_bytes -= block.size
        if block.uses:
            self._deferred.add(block)
        else:
            self.active_bytes -= block.size
            block.pool.put(block)

    def record_stream(self, tensor: int, stream: int) -> None:
        """Notes that another stream uses the tensor; its own allocation stream is ignored; recordStream."""
        block = self._live[tensor]
        if block is None or stream == block.pool.stream:
            return
        if block.uses is None:
            block.uses = set()
        block.uses.add(stream)

    def record_event(self, event: int, stream: int) -> None:
        """Event.record on a stream."""
        self._deferred.record_event(event, stream)

    def stream_wait(self, stream: int, event: int) -> None:
        """Stream.wait_event: what ``stream`` does from now on happens after ``event``."""
        self._deferred.stream_wait(stream, event)

    def host_wait(self, event: int) -> None:
        """Event.synchronize: the host goes on when ``event``, recorded before, has happened."""
        self._deferred.host_wait(event)

    def empty_cache(self) -> None:
        """Waits for outstanding events and returns what is free to the card; release_cached_blocks."""
        self._free_all(self._deferred.pop_all())
        for pools in (self._large, self._small):
            for pool in pools.values():
                pool.trim()

    def reading(self, out_of_memory: OutOfMemory | None = None) -> AllocatorReading:
        """The peaks and counters so far."""
        return AllocatorReading(
            peak_allocated_bytes=self.peak_allocated_bytes,
            peak_active_bytes=self.peak_active_bytes,
            peak_reserved_bytes=self.peak_reserved_bytes,
            num_alloc_retries=self.num_alloc_retries,
            out_of_memory=out_of_memory,
            full_in_phase=self.full_in_phase,
        )

    def _grow(self, pool: SegmentPool, size: int) -> Block | None:
        """New memory, after a flush if need be: malloc's chain of alloc_block, release_cached_blocks, alloc_block.

        release_available_cached_blocks, between the two, does nothing while max_split_size is unlimited. The retry is
        counted also when it fails, and does not search the pool again.
        """
        block = pool.grow(size)
        if block is None:
            self.empty_cache()
            self.num_alloc_retries += 1
            block = pool.grow(size)
            if block is None:
                self.num_ooms += 1
        return block

    def _free_all(self, blocks: list[Block]) -> None:
        for block in blocks:
            self.active_bytes -= block.size
            block.pool.put(block)


class _DeferredFrees:
    """Freed blocks that other streams may still use, and what is known of those streams' progress.

    A ticket counts the events that insert_events recorded. ``_passed[stream]`` is the last ticket that has happened
    there as far as the host knows; ``_ordered[stream][other]`` the last one on ``other`` that ``stream`` comes after.
    """

    def __init__(self, host_runs_ahead: bool, streams_keep_pace: bool) -> None:
        self.has_finished = False
        """Something may have happened since the last look; malloc has to look again."""
        self._host_runs_ahead = host_runs_ahead
        self._streams_keep_pace = streams_keep_pace
        self._ticket = 0
        self._queues: dict[int, deque[tuple[int, Block]]] = {}
        self._passed: dict[int, int] = {}
        self._ordered: dict[int, dict[int, int]] = {}
        self._recorded: dict[int, tuple[int, dict[int, int]]] = {}

    def add(self, block: Block) -> None:
        """One event on every stream that uses the block; insert_events."""
        assert block.uses
        for stream in block.uses:
            self._ticket += 1
            self._queues.setdefault(stream, deque()).append((self._ticket, block))
            block.num_events += 1
        block.uses = None
        self.has_finished |= not self._host_runs_ahead

    def record_event(self, event: int, stream: int) -> None:
        self._recorded[event] = (self._ticket, {**self._ordered.get(stream, {}), stream: self._ticket})

    def stream_wait(self, stream: int, event: int) -> None:
        _advance(self._ordered.setdefault(stream, {}), self._recorded[event][1])

    def host_wait(self, event: int) -> None:
        ticket, ordered = self._recorded[event]
        if self._streams_keep_pace:
            ordered = dict.fromkeys(self._queues, ticket)
        _advance(self._passed, ordered)
        self.has_finished = True

    def pop_finished(self) -> list[Block]:
        """Blocks whose events have all happened; process_events: each stream's queue up to the first that has not."""
        self.has_finished = False
        finished = []
        for stream, queue in self._queues.items():
            passed = self._passed.get(stream, 0) if self._host_runs_ahead else self._ticket
            while queue and queue[0][0] <= passed:
                block = queue.popleft()[1]
                block.num_events -= 1
                if block.num_events == 0:
                    finished.append(block)
        return finished

    def pop_all(self) -> list[Block]:
        """Waits for every outstanding event; synchronize_and_free_events."""
        for stream in self._queues:
            self._passed[stream] = self._ticket
        return self.pop_finished()


def _advance(known: dict[int, int], more: dict[int, int]) -> None:
    for stream, ticket in more.items():
        if ticket > known.get(stream, 0):
            known[stream] = ticket


def replay(
    events: Program | Iterable[Event],
    card_bytes: int | None = None,
    expandable_segments: bool = False,
    *,
    host_runs_ahead: bool = True,
    streams_keep_pace: bool = False,
) -> AllocatorReading:
    """Runs events, or a program of them, through a fresh allocator, until they end or the card is full.

    The first step fills the cache; for a steady state pass the events of two. Arguments as for CachingAllocator.
    """
    allocator = CachingAllocator(
        card_bytes,
        expandable_segments=expandable_segments,
        host_runs_ahead=host_runs_ahead,
        streams_keep_pace=streams_keep_pace,
    )
    return allocator.reading(run(allocator, events if isinstance(events, Program) else plain(events)))


def run(allocator: CachingAllocator, program: Program) -> OutOfMemory | None:
    """Runs a program through an allocator; where the card gets full it ends, and the place is returned."""
    waits = _WaitsInOrder(allocator)
    for part in program.parts:
        for turn in part.turns:
            failed = _turn(allocator, waits, part.instructions, turn * BLOCK_STRIDE)
            if allocator.num_alloc_retries and allocator.full_in_phase is None:
                allocator.full_in_phase = part.phase
            if failed is not None:
                unit = part.block + turn if part.block >= 0 else -1
                return OutOfMemory(part.phase, unit, failed.label, failed.num_bytes)
    return None


def _turn(
    allocator: CachingAllocator, waits: _WaitsInOrder, instructions: Sequence[Instruction], shift: int
) -> Event | None:
    """Runs one turn of a part; returns the allocation that failed."""
    allocate, free = allocator.allocate, allocator.free
    for kind, number, num_bytes, stream, event in instructions:
        tensor = number + shift if number > 0 else number
        if kind == 0:
            if not allocate(tensor, num_bytes, stream):
                return event
        elif kind == 1:
            free(tensor)
        elif kind == Kind.RECORD_STREAM:
            allocator.record_stream(tensor, stream)
        elif kind == Kind.RECORD_EVENT:
            waits.record(stream)
        else:
            waits.wait()
    return None


class _WaitsInOrder:
    """Numbers the events of a program, which are waited for in the order in which they are recorded."""

    def __init__(self, allocator: CachingAllocator) -> None:
        self._allocator = allocator
        self._recorded = 0
        self._waited = 0

    def record(self, stream: int) -> None:
        self._allocator.record_event(self._recorded, stream)
        self._recorded += 1

    def wait(self) -> None:
        self._allocator.host_wait(self._waited)
        self._waited += 1
