"""The CUDA caching allocator, replayed on the events of the first steps: peak reserved memory, and allocation retries.

The rules themselves are in allocator.py and expandable_segments.py. Not covered: CUDA
graphs and private pools, other settings than ``expandable_segments``, several threads, and memory that does not go
through the allocator (context, NCCL's buffers, cuBLAS workspaces that are not events).

**When a deferred free completes.** A block that another stream uses (Tensor.record_stream) is free again once an event,
recorded on that stream when the tensor was freed, has completed; malloc looks for such events (process_events). Here
the GPU is behind the host, as in a rehearsal: an event has completed when the host has waited for it, or for one that
was recorded later, on whichever stream; or when 1,024 operators were launched after it, because so many the stream's
queue holds. That matches torchtitan's published active peaks of FSDP1 within 0.1 %. So did
times from datasheets with one clock for all streams; a clock for each stream and communicator predicted 0.2 to 0.5 %
less. In a real job streams overlap, but a collective ends only when the slowest rank has joined it, and a peak is that
of the worst of many steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import cycle

from fsdp_bench.replay.caching_allocator.allocator import CachingAllocator, execute
from fsdp_bench.replay.caching_allocator.expandable_segments import ExpandableAllocator
from fsdp_bench.replay.caching_allocator.program import Program
from fsdp_bench.simulate.repeat import Part
from fsdp_bench.simulate.step import without_collections

LATER_STEPS = 8
"""Steps after the first ones, where these retry allocations: in the last four, what goes on is seen."""


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
    retried_bytes_later: int = 0
    """The bytes of the cache that the retries of such a step free, and that it reserves anew."""


class Replay:
    """A program, executed on a new allocator step by step; the first step fills its cache.

    Args:
        program: what happens.
        gpu_bytes: what cudaMalloc may hand out to this process in all, or None for no limit.
        expandable_segments: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.
    """

    def __init__(self, program: Program, gpu_bytes: int | None = None, expandable_segments: bool = False) -> None:
        self._program = program
        self._allocator = (ExpandableAllocator if expandable_segments else CachingAllocator)(gpu_bytes)
        self._peaks = [0] * len(program.sections)
        """The most that was allocated in each section."""
        self._full_in_phase: str | None = None
        self._out_of_memory: OutOfMemory | None = None
        self._num_steps = 0
        """Steps that have ended."""
        self._progress = self._run()
        self._read: AllocatorReading | None = None

    def until(self, step: int | None = None) -> AllocatorReading:
        """Replay up to the end of a step, counted from 1, by default of the last; stop where memory runs out."""
        if step is None and self._read is not None:
            return self._read
        self._go_on(len(self._program.steps) if step is None else step)
        reading = self._reading()
        if step is None:
            goes_on = reading.num_alloc_retries > 0 and reading.out_of_memory is None
            self._read = reading = self._with_later_steps(reading) if goes_on else reading
        return reading

    def is_full(self) -> bool:
        """Whether there are allocation retries; replay no further than to the first one, and not what shows without."""
        gpu_bytes = self._allocator.gpu_bytes
        is_sure = gpu_bytes is not None and self._program.least_bytes > gpu_bytes
        return is_sure or self.full_in_phase is not None

    @property
    def full_in_phase(self) -> str | None:
        """The phase of the first allocation retry, up to which it replays; None if there is none."""
        self._go_on(len(self._program.steps), to_first_retry=True)
        return self._full_in_phase

    def _go_on(self, end: int, to_first_retry: bool = False) -> None:
        """Replay up to the end of a step; stop where memory runs out."""
        with without_collections():
            while self._num_steps < end and self._out_of_memory is None:
                if to_first_retry and self._allocator.num_retries:
                    return
                next(self._progress)

    def _with_later_steps(self, reading: AllocatorReading) -> AllocatorReading:
        """Replay the last step again and again: do retries go on, or does memory run out after all?"""
        if not self._program.log.further_steps:
            return replace(reading, num_retries_later=None)
        counts, freed, allocator = list[int](), list[int](), self._allocator
        for _ in range(LATER_STEPS):
            before = allocator.num_retries, allocator.retried_bytes
            self._go_on(self._num_steps + 1)
            if self._out_of_memory is not None:
                return self._reading()
            counts.append(allocator.num_retries - before[0])
            freed.append(allocator.retried_bytes - before[1])
        later = slice(-LATER_STEPS // 2, None)
        return replace(reading, num_retries_later=max(counts[later]), retried_bytes_later=max(freed[later]))

    def _run(self) -> Iterator[None]:
        """Run step after step, the last one for ever.

        Yields after each step, where the first allocation retry came, and where memory runs out.
        """
        program = self._program
        *first_steps, last = program.steps[: len(program.steps) - program.log.further_steps]
        for step in first_steps:
            yield from self._run_step(step)
        allocator, replaced_tensors = self._allocator, program.replaced_tensors()
        states, retries = [allocator.state()], list[tuple[int, int]]()
        while states[-1] not in states[:-1]:
            before = allocator.num_retries, allocator.retried_bytes
            yield from self._run_step(last)
            retries.append((allocator.num_retries - before[0], allocator.retried_bytes - before[1]))
            allocator.rename_tensors(replaced_tensors)
            states.append(allocator.state())
        for again, freed in cycle(retries[states.index(states[-1]) :]):  # all that follows is like the steps since then
            allocator.num_retries += again
            allocator.retried_bytes += freed
            self._num_steps += 1
            yield

    def _run_step(self, step: range) -> Iterator[None]:
        allocator, sections = self._allocator, self._program.sections
        for number in step:
            section, allocator.peak_allocated = sections[number], allocator.allocated
            instructions = self._program.instructions[number]
            for skipped in self._program.runs(section.block)[:: -1 if section.goes_down else 1]:
                failed = execute(allocator, instructions, skipped)
                if failed is not None:
                    self._out_of_memory = _failed(self._program, section, skipped, failed)
                if failed is not None or (allocator.num_retries and self._full_in_phase is None):
                    self._full_in_phase = self._full_in_phase or section.phase
                    self._peaks[number] = max(allocator.peak_allocated, self._peaks[number])
                    yield
            self._peaks[number] = max(allocator.peak_allocated, self._peaks[number])
        self._num_steps += 1
        yield

    def _reading(self) -> AllocatorReading:
        allocator = self._allocator
        phases: dict[str, int] = {}
        for section, peak in zip(self._program.sections, self._peaks, strict=True):
            phases[section.phase] = max(peak, phases.get(section.phase, 0))
        return AllocatorReading(
            peak_allocated_bytes=max(phases.values()),
            phases=phases,
            peak_active_bytes=allocator.peak_active,
            peak_reserved_bytes=allocator.peak_reserved,
            num_alloc_retries=allocator.num_retries,
            out_of_memory=self._out_of_memory,
            full_in_phase=self._full_in_phase,
        )


def _failed(program: Program, section: Part, layers_skipped: int, index: int) -> OutOfMemory:
    block = section.block + layers_skipped if section.block >= 0 else -1
    return OutOfMemory(section.phase, block, program.events[index].label, program.events[index].num_bytes)
