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

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from fsdp_bench.replay import malloc
from fsdp_bench.replay.heap import (
    NUM_RETRIES,
    PEAK_ACTIVE,
    PEAK_RESERVED,
    Heap,
    fresh_heap,
)
from fsdp_bench.replay.malloc import (
    ENDED,
    FIRST_FULL_PART,
    INSTRUCTION,
    OUT_OF_MEMORY,
    PART,
    STATUS,
    TOO_MANY_BLOCKS,
    TURN,
)
from fsdp_bench.simulate.events import Event
from fsdp_bench.simulate.repeat import Program, plain

CAPACITY = 2048
"""Blocks that a replay begins with room for; where they are too few it begins again with twice as many."""


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
    """allocated_bytes.all.peak: blocks in use, with what rounding adds, and what was not worth to be split off."""
    phases: dict[str, int]
    """The same by phase: label of the last MARK."""
    peak_active_bytes: int
    """active_bytes.all.peak: and blocks whose release is deferred."""
    peak_reserved_bytes: int
    """reserved_bytes.all.peak: the segments."""
    num_alloc_retries: int
    """Failed allocations on the card that flushed the cache; each one stalls the step."""
    out_of_memory: OutOfMemory | None
    full_in_phase: str | None
    """Label of the MARK before the first retry."""


Run = Callable[..., None]
"""malloc.run, or what compiled.py makes of it."""


class Replay:
    """Events, or a program of them, that run through a fresh allocator, step by step.

    The first step fills the cache; for a steady state pass the events of several.

    Args:
        events: what happens.
        card_bytes: what cudaMalloc may hand out to this process in all, or None for no limit.
        expandable_segments: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.
        host_runs_ahead: see the module.
        streams_keep_pace: see the module.
        run: malloc.run, compiled or not.
    """

    def __init__(
        self,
        events: Program | Iterable[Event],
        card_bytes: int | None = None,
        expandable_segments: bool = False,
        *,
        host_runs_ahead: bool = True,
        streams_keep_pace: bool = False,
        run: Run = malloc.run,
    ) -> None:
        self._program = events if isinstance(events, Program) else plain(events)
        self._card = card_bytes, expandable_segments, host_runs_ahead, streams_keep_pace
        self._run = run
        self._code, self._handed_over = self._program.code(), self._program.handed_over()
        self._begin(CAPACITY)

    def until(self, step: int | None = None) -> AllocatorReading:
        """Go on to the end of a step, counted from 1, or of the last one; to where the card is full at most."""
        end = len(self._program.steps) if step is None else step
        self._go_on(end)
        while self._at[STATUS] == TOO_MANY_BLOCKS:
            self._begin(2 * self._capacity)
            self._go_on(end)
        return self._reading()

    def _begin(self, capacity: int) -> None:
        program = self._program
        fresh = fresh_heap(*self._card, capacity, program.num_tensors, program.num_events)
        self._heap: Heap = fresh.tolist() if self._run is malloc.run else fresh  # Python reads a list faster
        self._at = array("q", [0] * (malloc.PLACES + len(program.parts)))
        self._at[FIRST_FULL_PART], self._at[STATUS] = -1, ENDED
        self._capacity, self._done = capacity, 0

    def _go_on(self, end: int) -> None:
        steps = self._program.steps[:end]
        first_further = len(self._program.steps) - self._program.further_steps
        while self._done < len(steps) and self._at[STATUS] == ENDED:
            if self._done >= first_further:
                malloc.hand_over(self._heap, self._handed_over)
            parts = steps[self._done]
            self._run(self._heap, self._code, parts.start, parts.stop, self._at)
            self._done += 1

    def _reading(self) -> AllocatorReading:
        program, heap, at = self._program, self._heap, self._at
        full = at[FIRST_FULL_PART]
        phases: dict[str, int] = {}
        for part, peak in zip(program.parts, at[malloc.PLACES :], strict=True):
            phases[part.phase] = max(peak, phases.get(part.phase, 0))
        return AllocatorReading(
            peak_allocated_bytes=max(phases.values()),
            phases=phases,
            peak_active_bytes=heap[PEAK_ACTIVE],
            peak_reserved_bytes=heap[PEAK_RESERVED],
            num_alloc_retries=heap[NUM_RETRIES],
            out_of_memory=_failed(program, at) if at[STATUS] == OUT_OF_MEMORY else None,
            full_in_phase=program.parts[full].phase if full >= 0 else None,
        )


def replay(events: Program | Iterable[Event], *card: Any, **assumed: Any) -> AllocatorReading:
    """Run events, or a program of them, through a fresh allocator, until they end or the card is full.

    Arguments are those of Replay.
    """
    return Replay(events, *card, **assumed).until()


def _failed(program: Program, at: array[int]) -> OutOfMemory:
    part, done, index = program.parts[at[PART]], program.instructions, at[INSTRUCTION]
    unit = part.block + at[TURN] if part.block >= 0 else -1
    return OutOfMemory(part.phase, unit, done.events[index].label, done.num_bytes[index])
