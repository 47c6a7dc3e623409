"""Predicts the peak memory of one setup: how large it is, in which phase, what is alive there.

``predict_memory`` adds up live bytes, in milliseconds. ``read_allocator`` replays PyTorch's caching allocator, whose
reserved memory decides whether a setup fits. Whatever would take minutes or cannot run on a GPU is refused.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache

from fsdp_bench.plan.headroom import headroom_of
from fsdp_bench.rates.communicators import Communicators, communicators_of
from fsdp_bench.replay.caching_allocator.expandable_segments import UNLIMITED
from fsdp_bench.replay.caching_allocator.program import Program, program
from fsdp_bench.replay.caching_allocator.replay import AllocatorReading, Replay
from fsdp_bench.replay.live_memory import Peak, breakdown, worst_rank
from fsdp_bench.simulate.operators.kernels import CPU, CPU_GLOO, CUDA, Kernels
from fsdp_bench.simulate.repeat import Log
from fsdp_bench.simulate.simulation import BETWEEN_STEPS
from fsdp_bench.simulate.step import SimulatedSteps
from fsdp_bench.simulate.wrappers.units import num_resharded_units
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import FIRST_WITH_FLASH_ATTENTION, Gpu, Hardware
from fsdp_bench.spec.impossible import FLOAT8_CAPABILITY
from fsdp_bench.spec.recording.model import Model
from fsdp_bench.spec.setup import Float8, TrainSetup

DEEPEST = 1000
"""The most layers that are predicted. The allocator is replayed over all of them, which takes seconds."""

MOST_MICRO_BATCHES = 1024
"""The most micro-batches that are predicted. The allocator is replayed over all of them, milliseconds each."""

LARGEST_PEAK = UNLIMITED // 8
"""The largest peak that is predicted, 32 PiB. A larger one would overflow the replay on a GPU of unlimited memory."""

KERNELS: dict[str, Kernels] = {"cuda": CUDA, "cpu": CPU, "cpu-gloo": CPU_GLOO}


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
    breakdown_bytes: dict[str, int]
    """Bytes alive at the peak, by category. They add up to the peak."""
    peak_rank: int = 0
    """The rank with the highest peak; of several the lowest. Usually 0: see simulate/candidate_ranks.py."""


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
    """Raise SpecError for models whose replay would take minutes: the most layers or micro-batches that are allowed."""
    if model.num_hidden_layers > DEEPEST:
        raise SpecError(f"num_hidden_layers: {model.num_hidden_layers} is not allowed here; up to {DEEPEST}")
    if (count := setup.gradient_accumulation_steps) > MOST_MICRO_BATCHES:
        raise SpecError(
            f"gradient_accumulation_steps: {count} is not allowed here; up to {MOST_MICRO_BATCHES}, because each"
            " micro-batch is replayed"
        )


def refuse_without_float8(setup: TrainSetup, hardware: Hardware | None) -> None:
    """Raise SpecError for float8 on a GPU without matrix products in it. A GPU that is not named has them."""
    gpu = hardware.gpu if hardware else None
    if setup.float8 is Float8.NONE or gpu is None or (gpu.compute_capability or 0.0) >= FLOAT8_CAPABILITY:
        return
    has = "is not NVIDIA's" if gpu.compute_capability is None else f"has {gpu.compute_capability}"
    raise SpecError(f"float8: {gpu.name} {has}; torch._scaled_mm needs compute capability {FLOAT8_CAPABILITY} or more")


def refuse_flash_attn_package(hardware: Hardware | None) -> None:
    """Raise SpecError for a GPU that is too old for the flash-attn package. One that is not named is new enough."""
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
    ``gpu_bytes``: None is unlimited memory. ``rank`` is by default the one with the highest peak.
    """
    if rank is None:
        ranks = simulated.candidate_ranks
        rank = ranks[0] if len(ranks) == 1 else worst_rank(simulated.for_memory)[0].rank
    return Replay(program_of(simulated, rank), gpu_bytes, expandable_segments)


@lru_cache(maxsize=2)
def program_of(simulated: SimulatedSteps, rank: int) -> Program:
    """Return the first steps of a rank as a program for the allocator's replay, which may run on two allocators."""
    log, shared = simulated.first_steps(rank), simulated.any_depth
    if shared and log.events is shared.first_steps(rank).events:  # the instructions are the same at every depth
        known = _program_of_any_depth(shared, rank)
        found = known and replace(known, log=log)
    else:
        found = program(log)
    if found is None:  # a block uses what was made several blocks before: simulate them all
        found = program(simulated.first_steps(rank, every_block=True))
        assert found is not None
    return found


@lru_cache(maxsize=8)
def _program_of_any_depth(simulated: SimulatedSteps, rank: int) -> Program | None:
    return program(simulated.first_steps(rank))
