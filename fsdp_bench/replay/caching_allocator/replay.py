"""The CUDA caching allocator, replayed on the events of the first steps: peak reserved memory, and allocation retries.

The rules themselves are in malloc.py (allocate, free), split_and_merge.py, segments.py and sizes.py. Not covered: CUDA
graphs and private pools, other settings than ``expandable_segments``, several threads, and memory that does not go
through the allocator (context, NCCL's buffers, cuBLAS workspaces that are not events).

**When a deferred free completes.** A block that another stream uses (Tensor.record_stream) is free again once an event,
recorded on that stream when the tensor was freed, has completed; malloc looks for such events (process_events). The
replay has two clocks for that: the host's, which issues work and waits where PyTorch makes it wait, and the device's,
which does the work of all streams in the order in which it was issued. In a real job streams overlap, but a collective
ends only when the slowest rank has joined it, and a peak is that of the worst of many steps. One device clock matches
torchtitan's published active peaks of FSDP1 within 0.1 %; clocks for each stream and communicator, with rates whose
step times are within 3 % of the published ones, predict 0.2 to 0.5 % less. Reserved memory is the same in all published
rows (validate/published/peaks.py).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from types import FunctionType

from fsdp_bench.rates.datasheet import Rates
from fsdp_bench.replay.caching_allocator import execution
from fsdp_bench.replay.caching_allocator.execution import (
    ENDED,
    FIRST_FULL_PART,
    INSTRUCTION,
    LAYERS_SKIPPED,
    OUT_OF_MEMORY,
    PART,
    STATUS,
    TOO_MANY_BLOCKS,
)
from fsdp_bench.replay.caching_allocator.heap import (
    NUM_RETRIES,
    PEAK_ACTIVE,
    PEAK_RESERVED,
    Heap,
    fresh_heap,
)
from fsdp_bench.replay.caching_allocator.program import Program
from fsdp_bench.replay.durations import Durations

LATER_STEPS = 8
"""Steps after the first ones, where these retry allocations: in the last four, what goes on is seen."""

CAPACITY = 2048
"""The blocks for which a replay begins with space; where they are too few, it begins again with twice as many."""


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """The allocation that failed: where a replay ended."""

    phase: str
    """The phase of the step."""
    block: int
    """The number of the transformer block, or -1 outside of blocks."""
    label: str
    """The operator or symbol of torch that allocates."""
    num_bytes: int
    """Requested bytes, before rounding."""


@dataclass(frozen=True, slots=True)
class AllocatorReading:
    """The values of torch.cuda.memory_stats() after the steps, or when memory ran out."""

    peak_allocated_bytes: int
    """allocated_bytes.all.peak: blocks in use, including rounding and remainders that were not split off."""
    phases: dict[str, int]
    """peak_allocated_bytes of each phase of the step."""
    peak_active_bytes: int
    """active_bytes.all.peak: allocated blocks, and those whose free is deferred."""
    peak_reserved_bytes: int
    """reserved_bytes.all.peak: the segments."""
    num_alloc_retries: int
    """Failed allocations on the GPU that flushed the cache; each one stalls the step."""
    out_of_memory: OutOfMemory | None
    full_in_phase: str | None
    """The phase in which the first allocation retry came."""
    num_retries_later: int | None = 0
    """The most allocation retries in one of the steps 9 to 12, where the first steps have any. 0: none go on. None: not
    known, because no step was like the one before."""


class Replay:
    """A program, executed on a new allocator step by step; the first step fills its cache.

    Args:
        program: what happens.
        rates: how long work takes; what they do not know takes no time.
        gpu_bytes: what cudaMalloc may hand out to this process in all, or None for no limit.
        expandable_segments: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.
    """

    def __init__(
        self,
        program: Program,
        rates: Rates,
        gpu_bytes: int | None = None,
        expandable_segments: bool = False,
    ) -> None:
        self._program = program
        launch = round(1e9 * rates.launch_seconds)
        self._settings = gpu_bytes, expandable_segments, launch
        self._code, self._replaced_tensors = program.code(Durations(rates).seconds), program.replaced_tensors()
        self._begin(CAPACITY)

    def until(self, step: int | None = None) -> AllocatorReading:
        """Replay up to the end of a step, counted from 1, by default of the last; stop where memory runs out."""
        end = len(self._program.steps) if step is None else step
        self._go_on(end)
        while self._progress[STATUS] == TOO_MANY_BLOCKS:
            self._begin(2 * self._capacity)
            self._go_on(end)
        reading = self._reading()
        if step is not None or not reading.num_alloc_retries or reading.out_of_memory is not None:
            return reading
        return self._with_later_steps(reading)

    def _with_later_steps(self, reading: AllocatorReading) -> AllocatorReading:
        """Replay the last step again and again: do retries go on, or does memory run out after all?"""
        if not self._program.log.further_steps:
            return replace(reading, num_retries_later=None)
        parts, counts = self._program.steps[-1], []
        for _ in range(LATER_STEPS):
            before = self._heap[NUM_RETRIES]
            execution.rename_tensors(self._heap, self._replaced_tensors)
            execution.execute(self._heap, self._code, parts.start, parts.stop, self._progress)
            if self._progress[STATUS] == TOO_MANY_BLOCKS:
                self._begin(2 * self._capacity)
                return self.until()
            if self._progress[STATUS] == OUT_OF_MEMORY:
                return self._reading()
            counts.append(self._heap[NUM_RETRIES] - before)
        return replace(reading, num_retries_later=max(counts[-LATER_STEPS // 2 :]))

    def _begin(self, capacity: int) -> None:
        program = self._program
        fresh = fresh_heap(*self._settings, capacity, program.num_tensors)
        is_python = isinstance(execution.execute, FunctionType)  # else compiled.py replaced it
        self._heap: Heap = fresh.tolist() if is_python else fresh  # Python reads a list faster
        self._progress = array("q", [0] * (execution.NUM_FIELDS + len(program.sections)))
        self._progress[FIRST_FULL_PART], self._progress[STATUS] = -1, ENDED
        self._capacity, self._done = capacity, 0

    def _go_on(self, end: int) -> None:
        steps = self._program.steps[:end]
        first_further = len(self._program.steps) - self._program.log.further_steps
        while self._done < len(steps) and self._progress[STATUS] == ENDED:
            if self._done >= first_further:
                execution.rename_tensors(self._heap, self._replaced_tensors)
            parts = steps[self._done]
            execution.execute(self._heap, self._code, parts.start, parts.stop, self._progress)
            self._done += 1

    def _reading(self) -> AllocatorReading:
        program, heap, progress = self._program, self._heap, self._progress
        full = progress[FIRST_FULL_PART]
        phases: dict[str, int] = {}
        for part, peak in zip(program.sections, progress[execution.NUM_FIELDS :], strict=True):
            phases[part.phase] = max(peak, phases.get(part.phase, 0))
        return AllocatorReading(
            peak_allocated_bytes=max(phases.values()),
            phases=phases,
            peak_active_bytes=heap[PEAK_ACTIVE],
            peak_reserved_bytes=heap[PEAK_RESERVED],
            num_alloc_retries=heap[NUM_RETRIES],
            out_of_memory=_failed(program, progress) if progress[STATUS] == OUT_OF_MEMORY else None,
            full_in_phase=program.sections[full].phase if full >= 0 else None,
        )


def _failed(program: Program, progress: array[int]) -> OutOfMemory:
    section, index = program.sections[progress[PART]], progress[INSTRUCTION]
    block = section.block + progress[LAYERS_SKIPPED] if section.block >= 0 else -1
    return OutOfMemory(section.phase, block, program.events[index].label, program.events[index].num_bytes)
