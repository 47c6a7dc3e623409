"""Predicts the peak memory of one setup: how large it is, in which phase, what is alive there, and whether it fits.

``predict_memory`` adds up live bytes, in milliseconds. ``estimate`` also replays PyTorch's caching allocator, whose
reserved memory decides whether a setup fits.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from fsdp_bench.plan.headroom import Headroom, headroom_of
from fsdp_bench.rates.communicators import Communicators, communicators_of
from fsdp_bench.replay.caching_allocator.expandable_segments import UNLIMITED
from fsdp_bench.replay.caching_allocator.program import Program, program
from fsdp_bench.replay.caching_allocator.replay import AllocatorReading, Replay
from fsdp_bench.replay.host_memory import Build, HostMemory, host_memory
from fsdp_bench.replay.live_memory import Peak, breakdown, worst_rank
from fsdp_bench.simulate.compiled.choose import why_eager
from fsdp_bench.simulate.operators.kernels import CPU, CPU_GLOO, CUDA, CUDA_OBSERVED, Kernels
from fsdp_bench.simulate.repeat import Log
from fsdp_bench.simulate.simulation import BETWEEN_STEPS
from fsdp_bench.simulate.step import SimulatedSteps
from fsdp_bench.simulate.wrappers.units import num_resharded_units
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import FIRST_WITH_FLASH_ATTENTION, Gpu, Hardware
from fsdp_bench.spec.impossible import FLOAT8_CAPABILITY
from fsdp_bench.spec.recording.model import Model
from fsdp_bench.spec.setup import Checkpointing, Float8, TrainSetup
from fsdp_bench.spec.units import GIB

DEEPEST = 1000
"""The most layers that are predicted. The allocator is replayed over all of them, which takes seconds."""

MOST_MICRO_BATCHES = 1024
"""The most micro-batches that are predicted. The allocator is replayed over all of them, milliseconds each."""

LARGEST_PEAK = UNLIMITED // 8
"""The largest peak that is predicted, 32 PiB. A larger one would overflow the replay on a GPU of unlimited memory."""

KERNELS: dict[str, Kernels] = {"cuda": CUDA, "cpu": CPU, "cpu-gloo": CPU_GLOO, "cuda-observed": CUDA_OBSERVED}
"""Kernel sets by name."""


class Verdict(StrEnum):
    """Whether a setup fits a GPU. In an allocation retry, torch waits for the GPU and empties the allocator's cache."""

    FITS = "fits"
    RUNS_WITH_RETRIES = "runs_with_retries"
    """It does not fit but trains to the end: allocations fail and are retried. Where that goes on in later steps, it
    costs throughput."""
    DOES_NOT_FIT = "does_not_fit"

    @property
    def text(self) -> str:
        """The verdict as words of a sentence."""
        return self.value.replace("_", " ")


@dataclass(frozen=True)
class MemoryPrediction:
    """Peak allocated bytes of one training step in the steady state, on the rank with the highest peak."""

    peak_allocated_bytes: int
    peak_phase: str
    peak_block: int | None
    """The number of the block in which the peak is. None if it is outside of blocks."""
    peak_operator: str
    """The operator or function of torch whose allocation reaches the peak."""
    phases: dict[str, int]
    """Peak allocated bytes by phase: load, forward, loss, backward, optimizer."""
    breakdown_bytes: dict[str, int]
    """Bytes alive at the peak, by category. They add up to the peak."""
    peak_rank: int = 0
    """The rank with the highest peak; of several the lowest. Usually 0: see simulate/candidate_ranks.py."""


@dataclass(frozen=True)
class Estimate:
    """The predicted memory of one setup: GPU, host, communicators, and whether it fits."""

    simulated: SimulatedSteps
    """The setup's steps, with the kernels of the GPU."""
    hardware: Hardware | None
    memory: MemoryPrediction
    allocator: AllocatorReading
    """Statistics of the caching allocator on this GPU. If its memory is not known: on a GPU of unlimited memory."""
    host: HostMemory
    why_eager: str | None
    """Why the prediction is for eager mode although the setup compiles; None if it is not, or nothing compiles."""
    expandable_segments: bool = False
    stated_headroom_bytes: int | None = None
    """GPU memory that the user keeps free (--headroom), instead of what headroom.py derives and assumes."""

    @property
    def model(self) -> Model:
        """The model."""
        return self.simulated.model

    @property
    def setup(self) -> TrainSetup:
        """The training setup."""
        return self.simulated.setup

    @property
    def for_eager(self) -> bool:
        """Whether the setup uses torch.compile, and the prediction is for eager mode."""
        return self.why_eager is not None

    @property
    def gpu(self) -> Gpu | None:
        """The GPU. None if none is named."""
        return self.hardware.gpu if self.hardware else None

    @property
    def gpu_bytes(self) -> int | None:
        """Usable memory of the GPU. None if it is not documented."""
        return self.gpu.usable_memory_bytes if self.gpu else None

    @property
    def available_bytes(self) -> int | None:
        """GPU memory that torch's allocator can reserve: all but the headroom. None if that is not known."""
        return available_bytes(self.gpu, self.communicators, self.stated_headroom_bytes)

    @property
    def required_headroom(self) -> Headroom:
        """GPU memory kept free for the CUDA context and NCCL."""
        return headroom_of(self.gpu, self.communicators, self.stated_headroom_bytes)

    @property
    def knows_attention(self) -> bool:
        """Whether the GPU runs the kernels of attention that are predicted."""
        return self.model.knows_attention(self.gpu, self.setup.precision.compute)

    @property
    def least_bytes(self) -> int:
        """Bytes that are allocated at one time whichever kernel computes attention; at most the peak.

        Parameters, gradients and optimizer states do not depend on it. Where heads are a multiple of 8, which
        FlashAttention does not pad, memory-efficient and unfused attention save no less than FlashAttention: queries,
        keys, values, the output and a number for each row. Memory that a kernel allocates for itself does not count.
        """
        memory, model = self.memory, self.model
        certain = [memory.phases.get(phase, 0) for phase in ("load", "optimizer")]
        is_saved_by_name = self.setup.checkpointing is Checkpointing.SELECTIVE
        if model.head_dim % 8 == 0 and not is_saved_by_name and "attention" not in memory.peak_operator:
            certain.append(memory.peak_allocated_bytes)
        return max(certain)

    @property
    def host_memory_bytes(self) -> int | None:
        """Host memory that a node has. None if it is not known."""
        return self.hardware.server.host_memory_bytes if self.hardware else None

    @property
    def verdict(self) -> Verdict | None:
        """Whether the setup fits with the headroom kept free. None if a size is unknown.

        It runs with retries if allocations fail but succeed once the allocator has emptied its cache. Where a GPU runs
        other kernels of attention than are predicted, known is only what does not fit with any.
        """
        if self.gpu_bytes is None:
            return None
        if not self.knows_attention:
            return Verdict.DOES_NOT_FIT if self.least_bytes > (self.available_bytes or 0) else None
        if self.allocator.out_of_memory is not None:
            return Verdict.DOES_NOT_FIT
        on_gpu = Verdict.RUNS_WITH_RETRIES if self.allocator.num_alloc_retries else Verdict.FITS
        if self.host.peak_bytes == 0:
            return on_gpu
        if self.host_memory_bytes is None:  # it is known not to fit where the GPU is too small
            return None if on_gpu is Verdict.FITS else on_gpu
        return on_gpu if self.host.peak_bytes <= self.host_memory_bytes else Verdict.DOES_NOT_FIT

    @property
    def fits(self) -> bool | None:
        """Whether it runs without allocation retries and within host memory. None if a size is unknown."""
        return None if self.verdict is None else self.verdict is Verdict.FITS

    @cached_property
    def communicators(self) -> Communicators:
        """NCCL's communicators of one rank, and the GPU memory that they take outside of torch's allocator."""
        return communicators_for(self.model, self.setup, self.hardware)

    @property
    def context_bytes(self) -> int | None:
        """Memory of the CUDA context, if a calibration measured it; ``gpu_bytes`` then does not contain it."""
        return self.gpu.context_bytes if self.gpu else None

    @property
    def device_bytes(self) -> int | None:
        """The most GPU memory of the process: reserved, CUDA context, NCCL. None if one of them is not known."""
        taken = self.communicators.num_bytes
        if taken is None or self.context_bytes is None or self.allocator.out_of_memory is not None:
            return None
        return self.allocator.peak_reserved_bytes + self.context_bytes + taken.high

    @cached_property
    def needed_bytes(self) -> int:
        """Peak reserved memory without allocation retries. If the GPU is too small, predicted for unlimited memory."""
        reading = self.allocator
        if reading.out_of_memory is not None or reading.num_alloc_retries:
            reading = read_allocator(self.simulated, None, self.expandable_segments, self.memory.peak_rank)
            assert reading.out_of_memory is None, "a GPU without limit is never full"
        return reading.peak_reserved_bytes

    @property
    def headroom_bytes(self) -> int | None:
        """Usable GPU memory minus ``needed_bytes``. None if the GPU's memory is not known.

        A setup fits if this is at least the bytes of ``required_headroom``.
        """
        return None if self.gpu_bytes is None else self.gpu_bytes - self.needed_bytes


def predict_memory(simulated: SimulatedSteps, rank: int | None = None) -> MemoryPrediction:
    """Return the peak allocated bytes of ``rank``, by default of the rank with the highest peak."""
    log, live = worst_rank(simulated.for_memory if rank is None else [simulated.step(rank)])
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
    """Return the number in the whole model of the block in which the peak is. None if it is outside of blocks."""
    part = next(part for part in log.parts if part.begin <= peak.event < part.end)
    block = part.block
    if block < 0:
        return None
    if block != log.repeated_block:
        return block + (log.extra_blocks if block > log.repeated_block else 0)
    # Backward comes from the last block.
    return block + (log.extra_blocks - peak.runs if part.phase == "backward" else peak.runs)


def refuse_too_slow(model: Model, setup: TrainSetup) -> None:
    """Refuse models whose replay would take minutes.

    Raises:
        SpecError: with the most layers or micro-batches that are allowed.
    """
    if model.num_hidden_layers > DEEPEST:
        raise SpecError(f"num_hidden_layers: {model.num_hidden_layers} is not allowed here; up to {DEEPEST}")
    if (count := setup.gradient_accumulation_steps) > MOST_MICRO_BATCHES:
        raise SpecError(
            f"gradient_accumulation_steps: {count} is not allowed here; up to {MOST_MICRO_BATCHES}, because each"
            " micro-batch is replayed"
        )


def refuse_without_float8(setup: TrainSetup, hardware: Hardware | None) -> None:
    """Refuse float8 on a GPU without matrix products in it.

    Raises:
        SpecError: with what is needed. A GPU that is not named is taken to have them.
    """
    gpu = hardware.gpu if hardware else None
    if setup.float8 is Float8.NONE or gpu is None or (gpu.compute_capability or 0.0) >= FLOAT8_CAPABILITY:
        return
    has = "is not NVIDIA's" if gpu.compute_capability is None else f"has {gpu.compute_capability}"
    raise SpecError(f"float8: {gpu.name} {has}; torch._scaled_mm needs compute capability {FLOAT8_CAPABILITY} or more")


def refuse_flash_attn_package(hardware: Hardware | None) -> None:
    """Refuse the flash-attn package on a GPU that is too old for it.

    Raises:
        SpecError: with what is needed. A GPU that is not named is taken to be new enough.
    """
    gpu = hardware.gpu if hardware else None
    if gpu is not None and gpu.is_before_sm80:
        raise SpecError(
            f"attention: {gpu.name} has {gpu.compute_capability}; the flash-attn package needs compute capability"
            f" {FIRST_WITH_FLASH_ATTENTION} or more; use sdpa or eager"
        )


def communicators_for(model: Model | None, setup: TrainSetup, hardware: Hardware | None) -> Communicators:
    """Return the communicators of one rank; without a model, those that do not depend on it."""
    return communicators_of(setup, hardware, 0 if model is None else num_resharded_units(model, setup))


def available_bytes(gpu: Gpu | None, communicators: Communicators, headroom_bytes: int | None = None) -> int | None:
    """Return the GPU memory that torch's allocator can reserve: all but the headroom. None if it is unknown."""
    if gpu is None or gpu.usable_memory_bytes is None:
        return None
    return max(gpu.usable_memory_bytes - headroom_of(gpu, communicators, headroom_bytes).num_bytes, 0)


def read_allocator(
    simulated: SimulatedSteps, gpu_bytes: int | None, expandable_segments: bool = False, rank: int | None = None
) -> AllocatorReading:
    """Return the caching allocator's statistics after the first steps; the arguments are those of start_replay."""
    return start_replay(simulated, gpu_bytes, expandable_segments, rank).until()


def start_replay(
    simulated: SimulatedSteps, gpu_bytes: int | None, expandable_segments: bool = False, rank: int | None = None
) -> Replay:
    """Return a replay of the first steps in the caching allocator, at its beginning.

    The GPU is behind the host, as in a rehearsal: a free that another stream defers happens when the host waits.

    ``gpu_bytes`` is the GPU's memory; None for unlimited memory. ``rank`` is by default the rank with the highest peak.
    """
    if rank is None:
        ranks = simulated.candidate_ranks
        rank = ranks[0] if len(ranks) == 1 else worst_rank(simulated.for_memory)[0].rank
    return Replay(program_of(simulated, rank), gpu_bytes, expandable_segments)


def program_of(simulated: SimulatedSteps, rank: int) -> Program:
    """Return the first steps of a rank as a program for the allocator's replay."""
    found = program(simulated.first_steps(rank))
    if found is None:  # a block uses what was made several blocks before: simulate them all
        found = program(simulated.first_steps(rank, every_block=True))
        assert found is not None
    return found


def estimate(
    simulated: SimulatedSteps,
    hardware: Hardware | None = None,
    build: Build = Build.META,
    expandable_segments: bool = False,
    reading: AllocatorReading | None = None,
    headroom_bytes: int | None = None,
) -> Estimate:
    """Predict the memory of one setup.

    Args:
        simulated: its steps, on the kernels of the hardware.
        hardware: the servers, or a GPU. None if none is named.
        build: which ranks build the whole model in host memory before it is sharded.
        expandable_segments: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.
        reading: the result of an earlier replay of the allocator, if there was one.
        headroom_bytes: GPU memory that is kept free, instead of what headroom_of derives and assumes.

    Raises:
        SpecError: for more layers or micro-batches than are predicted, for a peak above LARGEST_PEAK, for attention
            heads that no fused kernel takes, and for float8 or the flash-attn package on a GPU without it.
    """
    model, setup = simulated.model, simulated.setup
    refuse_too_slow(model, setup)
    refuse_without_float8(setup, hardware)
    if model.has_flash_attn:
        refuse_flash_attn_package(hardware)
    memory = predict_memory(simulated)
    if memory.peak_allocated_bytes > LARGEST_PEAK:
        raise SpecError(
            f"{model.name}: a peak of {memory.peak_allocated_bytes / GIB:.2g} GiB on one GPU is not predicted;"
            f" up to {LARGEST_PEAK / GIB:.2g} GiB: fewer dimensions, layers or tokens"
        )
    gpu = hardware.gpu if hardware else None
    limit = available_bytes(gpu, communicators_for(model, setup, hardware), headroom_bytes)
    reading = reading or read_allocator(simulated, limit, expandable_segments, memory.peak_rank)
    ranks = hardware.ranks_per_node(setup.world_size) if hardware else setup.world_size
    return Estimate(
        simulated=simulated,
        hardware=hardware,
        memory=memory,
        allocator=reading,
        host=host_memory(simulated if simulated.kernels.is_cuda else simulated.on(CUDA), ranks, build),
        why_eager=why_eager(model, setup, simulated.kernels),
        expandable_segments=expandable_segments,
        stated_headroom_bytes=headroom_bytes,
    )
