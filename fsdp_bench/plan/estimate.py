"""Predicts the peak memory of one setup on one kind of GPU: where the peak is and what it consists of.

``predict_memory`` adds up live bytes, in milliseconds. ``estimate`` also replays PyTorch's caching allocator, whose
reserved memory decides whether a setup fits.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache

from fsdp_bench.plan.headroom import Headroom, headroom_of
from fsdp_bench.rates.communicators import Communicators, communicators_of
from fsdp_bench.rates.hardware import RatesWithDefaults, rates_of
from fsdp_bench.replay.caching_allocator.compiled import compile_allocator
from fsdp_bench.replay.caching_allocator.heap import UNLIMITED
from fsdp_bench.replay.caching_allocator.program import Program, program
from fsdp_bench.replay.caching_allocator.replay import AllocatorReading, Replay
from fsdp_bench.replay.host_memory import Build, HostMemory, host_memory
from fsdp_bench.replay.live_memory import Peak, breakdown, live_memory, worst_rank
from fsdp_bench.simulate.operators.kernels import CPU, CPU_GLOO, CUDA, CUDA_OBSERVED, Kernels, kernels_on
from fsdp_bench.simulate.repeat import Log
from fsdp_bench.simulate.simulation import BETWEEN_STEPS
from fsdp_bench.simulate.step import first_steps, for_any_depth, steady_step
from fsdp_bench.simulate.worst_rank import candidate_ranks
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import Cluster, Gpu
from fsdp_bench.spec.model import ModelShape
from fsdp_bench.spec.setup import TrainSetup
from fsdp_bench.spec.units import GIB

COMPILE_FROM = 200_000
"""Instructions from which on it is faster to import numba and compile the allocator's replay."""

DEEPEST = 1000
"""The most layers that are predicted: the allocator is replayed on each, in seconds for all."""

MOST_MICRO_BATCHES = 1024
"""The most micro-batches that are predicted: the allocator is replayed on each, in milliseconds."""

LARGEST_PEAK = UNLIMITED // 8
"""The largest peak that is predicted, 32 PiB: more would overflow the replay of a GPU without limit."""

KERNELS: dict[str, Kernels] = {"cuda": CUDA, "cpu": CPU, "cpu-gloo": CPU_GLOO, "cuda-observed": CUDA_OBSERVED}
"""Kernel sets by name."""


class Verdict(StrEnum):
    """Whether a setup fits a GPU; an allocation retry is a wait for the GPU and a flush of the allocator's cache."""

    FITS = "fits"
    RUNS_WITH_RETRIES = "runs_with_retries"
    """It trains to the end, but does not fit: allocations fail first, and each retry costs throughput."""
    DOES_NOT_FIT = "does_not_fit"

    @property
    def text(self) -> str:
        """As a sentence says it."""
        return self.value.replace("_", " ")


@dataclass(frozen=True)
class MemoryPrediction:
    """Peak allocated bytes in one training step in the steady state, of the rank that needs the most."""

    peak_allocated_bytes: int
    peak_phase: str
    peak_block: int | None
    """The block whose part of the phase has the peak; None outside of blocks."""
    peak_operator: str
    """The operator or function of torch whose allocation makes the peak."""
    phases: dict[str, int]
    """Peak by phase: load, forward, loss, backward, optimizer."""
    breakdown_bytes: dict[str, int]
    """What is alive at the peak; adds up to it."""
    peak_rank: int = 0
    """The rank, the lowest of equals: mostly 0; see worst_rank.py."""


@dataclass(frozen=True)
class Estimate:
    """Everything that is predicted of one setup."""

    model: ModelShape
    setup: TrainSetup
    cluster: Cluster | None
    gpu: Gpu | None
    memory: MemoryPrediction
    allocator: AllocatorReading
    """The caching allocator on this GPU; on a GPU without limit when its size is not known."""
    host: HostMemory
    for_eager: bool
    """The setup compiles, and this is the prediction for eager."""
    stated_headroom_bytes: int | None = None
    """What the user keeps free of the GPU, instead of what is known and assumed."""

    @property
    def gpu_bytes(self) -> int | None:
        """What a process can use of the GPU; None where that is not documented."""
        return self.gpu.usable_memory_bytes if self.gpu else None

    @property
    def available_bytes(self) -> int | None:
        """GPU memory that torch's allocator can reserve: all but the headroom; None where it is not known."""
        return available_bytes(self.gpu, self.communicators, self.stated_headroom_bytes)

    @property
    def required_headroom(self) -> Headroom:
        """What is kept free of the GPU for the CUDA context and NCCL."""
        return headroom_of(self.gpu, self.communicators, self.stated_headroom_bytes)

    @property
    def has_flash_attention(self) -> bool:
        """Whether the GPU runs the kernel that 16-bit attention is predicted with: from sm80 on, as native bf16."""
        return self.gpu is None or self.gpu.native_bf16 or self.setup.precision.compute == "fp32"

    @property
    def host_bytes(self) -> int | None:
        """A node's memory, or None when it is not known."""
        return self.cluster.server.host_memory_bytes if self.cluster else None

    @property
    def verdict(self) -> Verdict | None:
        """Whether it fits, with the headroom kept free; None when a size is unknown.

        It runs with retries where an allocation fails, the allocator frees its cache, and then all goes on to the end.
        """
        if self.gpu_bytes is None or not self.has_flash_attention:
            return None
        if self.allocator.out_of_memory is not None:
            return Verdict.DOES_NOT_FIT
        on_gpu = Verdict.RUNS_WITH_RETRIES if self.allocator.num_alloc_retries else Verdict.FITS
        if self.host.peak_bytes == 0:
            return on_gpu
        if self.host_bytes is None:  # it is known not to fit where the GPU is too small
            return None if on_gpu is Verdict.FITS else on_gpu
        return on_gpu if self.host.peak_bytes <= self.host_bytes else Verdict.DOES_NOT_FIT

    @property
    def fits(self) -> bool | None:
        """Whether it ends without allocation retries and within the host's memory; None when a size is unknown."""
        return None if self.verdict is None else self.verdict is Verdict.FITS

    @cached_property
    def communicators(self) -> Communicators:
        """NCCL's communicators of one rank, and what they take of the GPU outside of torch's allocator."""
        return communicators_of(self.setup, self.cluster)

    @property
    def context_bytes(self) -> int | None:
        """What the CUDA context takes, where a calibration measured it; the GPU's bytes are then without it."""
        return self.gpu.context_bytes if self.gpu else None

    @property
    def device_bytes(self) -> int | None:
        """The most that the process takes of the GPU: reserved, CUDA context, NCCL; None where one is not known."""
        taken = self.communicators.num_bytes
        if taken is None or self.context_bytes is None or self.allocator.out_of_memory is not None:
            return None
        return self.allocator.peak_reserved_bytes + self.context_bytes + taken.high

    @property
    def headroom_bytes(self) -> int | None:
        """What a process can use of the GPU beyond the reserved peak; negative where memory runs out.

        None where the GPU's memory is not known.
        """
        return None if self.gpu_bytes is None else self.gpu_bytes - self.memory_needed_bytes

    @property
    def memory_needed_bytes(self) -> int:
        """Peak reserved; peak allocated where that is more, as memory ran out before the peak."""
        return max(self.allocator.peak_reserved_bytes, self.memory.peak_allocated_bytes)


def predict_memory(
    shape: ModelShape, setup: TrainSetup, kernels: Kernels = CUDA, rank: int | None = None
) -> MemoryPrediction:
    """Return the peak allocated bytes of a rank, by default of the one that needs the most."""
    if rank is None:
        log, live = worst_rank(shape, setup, kernels)
    else:
        log = steady_step(shape, setup, kernels, rank)
        live = live_memory(log)
    phase = live.peak_phase
    peak = live.phases[phase]
    return MemoryPrediction(
        peak_allocated_bytes=peak.num_bytes,
        peak_phase=phase,
        peak_block=_block_at(log, peak),
        peak_operator=log.events[peak.event].label,
        phases={name: found.num_bytes for name, found in live.phases.items() if name != BETWEEN_STEPS},
        breakdown_bytes=breakdown(log, peak),
        peak_rank=log.rank,
    )


def _block_at(log: Log, peak: Peak) -> int | None:
    """Return the block, by its number in the whole model, in which the peak is; None outside of blocks."""
    part = next(part for part in log.parts if part.begin <= peak.event < part.end)
    block = part.block
    if block < 0:
        return None
    if block != log.repeated_block:
        return block + (log.extra_blocks if block > log.repeated_block else 0)
    # Backward comes from the last block.
    return block + (log.extra_blocks - peak.runs if part.phase == "backward" else peak.runs)


def refuse_too_slow(shape: ModelShape, setup: TrainSetup) -> None:
    """Refuse what would be replayed for minutes.

    Raises:
        SpecError: saying how much is allowed.
    """
    if shape.num_hidden_layers > DEEPEST:
        raise SpecError(f"num_hidden_layers: {shape.num_hidden_layers} is not allowed here; up to {DEEPEST}")
    if (count := setup.gradient_accumulation_steps) > MOST_MICRO_BATCHES:
        raise SpecError(
            f"gradient_accumulation_steps: {count} is not allowed here; up to {MOST_MICRO_BATCHES}, because each"
            " micro-batch is replayed"
        )


def available_bytes(gpu: Gpu | None, communicators: Communicators, headroom_bytes: int | None = None) -> int | None:
    """Return what torch's allocator can reserve of a GPU: all but the headroom; None where its memory is unknown."""
    if gpu is None or gpu.usable_memory_bytes is None:
        return None
    return max(gpu.usable_memory_bytes - headroom_of(gpu, communicators, headroom_bytes).num_bytes, 0)


def read_allocator(
    shape: ModelShape,
    setup: TrainSetup,
    kernels: Kernels,
    gpu_bytes: int | None,
    expandable_segments: bool = False,
    rank: int | None = None,
    hardware: Cluster | Gpu | None = None,
) -> AllocatorReading:
    """Return the caching allocator's statistics after the first steps, on a GPU of ``gpu_bytes`` or without limit.

    ``rank``: by default the one with the highest peak. ``hardware``: how long work takes, which decides when a deferred
    free is done.
    """
    if rank is None:
        ranks = candidate_ranks(shape, setup, kernels)
        rank = ranks[0] if len(ranks) == 1 else worst_rank(shape, setup, kernels)[0].rank
    found = program_of(shape, setup, kernels, rank)
    return replay(found, setup, gpu_bytes, expandable_segments, hardware)


def program_of(shape: ModelShape, setup: TrainSetup, kernels: Kernels, rank: int) -> Program:
    """Return the first steps as a program for the allocator's replay; models that differ only in depth share it."""
    shallow = for_any_depth(shape, setup)
    if shallow is not None and (found := _program(shallow, setup, kernels, rank)) and found.log.extra_blocks:
        return dataclasses.replace(found, log=found.log.of_depth(shape.num_hidden_layers))
    found = program(first_steps(shape, setup, kernels, rank))
    if found is None:  # a block uses what was made several blocks before: simulate them all
        found = program(first_steps(shape, setup, kernels, rank, shape.num_hidden_layers))
        assert found is not None
    return found


@lru_cache(maxsize=16)
def _program(shape: ModelShape, setup: TrainSetup, kernels: Kernels, rank: int) -> Program | None:
    return program(first_steps(shape, setup, kernels, rank))


def replay(
    steps: Program,
    setup: TrainSetup,
    gpu_bytes: int | None,
    expandable_segments: bool = False,
    hardware: Cluster | Gpu | None = None,
) -> AllocatorReading:
    """Return the caching allocator's statistics after some steps."""
    if steps.num_instructions > COMPILE_FROM:
        compile_allocator()
    rates = RatesWithDefaults(rates_of(setup, hardware, "cuda", None), setup)
    return Replay(steps, rates, gpu_bytes, expandable_segments).until()


def estimate(
    shape: ModelShape,
    setup: TrainSetup,
    hardware: Cluster | Gpu | None = None,
    kernels: Kernels = CUDA,
    build: Build = Build.META,
    expandable_segments: bool = False,
    reading: AllocatorReading | None = None,
    headroom_bytes: int | None = None,
) -> Estimate:
    """Return everything that is predicted of one setup; ``reading`` where the allocator was replayed before.

    ``headroom_bytes`` are kept free of the GPU, instead of what headroom_of knows and assumes.

    Raises:
        SpecError: for more layers or micro-batches than are predicted, for a peak above LARGEST_PEAK, and for attention
            heads that no fused kernel takes.
    """
    refuse_too_slow(shape, setup)
    cluster = hardware if isinstance(hardware, Cluster) else None
    gpu = hardware.gpu if isinstance(hardware, Cluster) else hardware
    kernels = kernels_on(kernels, gpu)
    memory = predict_memory(shape, setup, kernels)
    if memory.peak_allocated_bytes > LARGEST_PEAK:
        raise SpecError(
            f"{shape.name}: a peak of {memory.peak_allocated_bytes / GIB:.2g} GiB on one GPU is not predicted;"
            f" up to {LARGEST_PEAK / GIB:.2g} GiB: fewer dimensions, layers or tokens"
        )
    limit = available_bytes(gpu, communicators_of(setup, cluster), headroom_bytes)
    reading = reading or read_allocator(shape, setup, kernels, limit, expandable_segments, memory.peak_rank, hardware)
    ranks = cluster.gpus_per_node if cluster else setup.world_size
    return Estimate(
        model=shape,
        setup=setup,
        cluster=cluster,
        gpu=gpu,
        memory=memory,
        allocator=reading,
        host=host_memory(shape, setup, ranks, build),
        for_eager=setup.compiles,
        stated_headroom_bytes=headroom_bytes,
    )
