"""Decides whether a candidate fits; if not, names the memory that it exceeds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from fsdp_bench.plan.document import host_document
from fsdp_bench.plan.estimate import refuse_too_slow, start_replay
from fsdp_bench.plan.prediction import Prediction, answer
from fsdp_bench.plan.question import Question
from fsdp_bench.replay.caching_allocator.replay import Replay
from fsdp_bench.replay.host_memory import Build, HostMemory
from fsdp_bench.replay.live_memory import breakdown, worst_rank
from fsdp_bench.simulate.operators.kernels import CUDA, Kernels, kernels_on
from fsdp_bench.simulate.step import SimulatedSteps
from fsdp_bench.simulate.wrappers.impossible import why_impossible
from fsdp_bench.spec.calibration_profile import Calibration
from fsdp_bench.spec.errors import SpecError

NO_FLASH_ATTENTION = (
    "torch has no FlashAttention for this GPU, and the model's code was not recorded without it; --precision fp32 is"
    " predicted"
)


@dataclass(frozen=True)
class Limit:
    """The memory that a candidate exceeds."""

    place: str
    """``gpu`` (GPU memory) or ``host`` (host memory)."""
    phase: str
    """The phase in which GPU memory runs out first; for host memory, ``load`` or ``training``."""
    category: str
    """The largest category in that phase: of the breakdown for GPU memory, of HostMemory for host memory."""


@dataclass(frozen=True)
class FitCheck:
    """The assumptions that are the same for all candidates, and the limits that they are checked against.

    On a GPU: peak reserved memory must be within ``usable_memory_bytes`` less the headroom (``headroom_bytes``, by
    default that of headroom.py), and host memory within the node's memory, if that is known.
    With ``budget_bytes``: peak live bytes must be within the budget, as in measured trials on a CPU.
    """

    kernels: Kernels = CUDA
    build: Build = Build.META
    expandable_segments: bool = False
    budget_bytes: int | None = None
    headroom_bytes: int | None = None
    """Memory kept free on each GPU for the CUDA context and NCCL. None: what headroom.py derives and assumes."""
    profile: Calibration | None = None
    """A calibration that predicts time instead of the datasheet."""

    def question(self, candidate: Question) -> Question:
        """Return a candidate with these assumptions, as ``predict`` answers it."""
        return replace(
            candidate,
            kernels="cuda" if self.kernels.is_cuda else "cpu",
            build=self.build,
            expandable_segments=self.expandable_segments,
            profile=self.profile,
            headroom_bytes=self.headroom_bytes,
        )

    def refuse(self, candidate: Question) -> None:
        """Refuse a candidate that ``predict`` refuses.

        Raises:
            SpecError: for setups that cannot run, for a GPU whose kernels of attention are not those predicted, for a
                world size that is not the cluster's, and for a GPU whose usable memory is not documented.
        """
        setup, gpu, hardware = candidate.setup, candidate.gpu, candidate.hardware
        refuse_too_slow(candidate.model, setup)
        if self.budget_bytes is None and (reason := why_impossible(candidate.model, setup, "cuda")) is not None:
            raise SpecError(reason)
        if gpu is not None and not candidate.model.knows_attention(gpu, setup.precision.compute):
            raise SpecError(f"{gpu.name}: {NO_FLASH_ATTENTION}")
        if hardware is not None and not hardware.holds(setup.world_size):
            raise SpecError(f"world_size: {setup.world_size} is not the cluster's {hardware.world_size} GPUs")
        if self.budget_bytes is None and gpu is None:
            raise SpecError("no GPU is named; --server NAME or --gpu NAME")
        if self.budget_bytes is None and gpu is not None and gpu.usable_memory_bytes is None:
            raise SpecError(
                f"gpu: nobody documents how much of a {gpu.name} a process can use; --gpu-memory 24GiB,"
                " in Python usable_memory_bytes of the Gpu"
            )

    def on(self, candidate: Question, any_depth: SimulatedSteps | None = None) -> CheckedCandidate:
        """Return a candidate with these limits. ``any_depth``: steps that ``SimulatedSteps`` may share."""
        return CheckedCandidate(self, candidate, any_depth)


class CheckedCandidate:
    """One candidate with the limits that it is checked against; keeps its predictions."""

    def __init__(self, check: FitCheck, candidate: Question, any_depth: SimulatedSteps | None = None) -> None:
        self.check = check
        kernels = kernels_on(check.kernels, candidate.gpu, moves_model=check.build is not Build.META)
        self.simulated = SimulatedSteps(candidate.model, candidate.setup, kernels, any_depth)
        self.question = check.question(candidate).with_steps(self.simulated)

    @cached_property
    def limit_bytes(self) -> int:
        """The budget, or the GPU memory that torch's allocator can reserve."""
        if self.check.budget_bytes is not None:
            return self.check.budget_bytes
        return self.question.available_bytes or 0

    @cached_property
    def fullness(self) -> float:
        """Live bytes or host memory as a fraction of its limit, the larger one; what fits has at most 1."""
        if self.question.host_memory_fraction > 1:
            return self.question.host_memory_fraction
        _, live = worst_rank(self.simulated.for_memory)
        return max(self.question.host_memory_fraction, live.peak_bytes / self.limit_bytes) if self.limit_bytes else inf

    @cached_property
    def replay(self) -> Replay | None:
        """The allocator's replay on this GPU, no further than the answer; None where host memory is too small."""
        if self.question.host_memory_fraction > 1:
            return None
        return start_replay(self.simulated, self.limit_bytes, self.check.expandable_segments)

    def fits(self) -> bool:
        """Return whether it runs without allocation retries."""
        return self.replay is not None and not self.replay.is_full()

    def runs(self) -> bool:
        """Return whether it runs without running out of memory, retries allowed."""
        return self.replay is not None and self.replay.until().out_of_memory is None

    @cached_property
    def prediction(self) -> Prediction:
        """The prediction of its memory. Reserved memory is predicted when it is asked for."""
        return answer(self.question)

    def replayed(self) -> Prediction:
        """Return the prediction with its reserved memory. A replay that has begun is finished, and not repeated."""
        return answer(self.question, self.replay.until() if self.replay else None)

    @property
    def limit(self) -> Limit:
        """The memory that it exceeds."""
        found, has_budget = self.prediction, self.check.budget_bytes is not None
        if not has_budget and self.question.host_memory_fraction > 1:
            return _host_limit(found.host, found.host_memory_bytes or 0)
        first = None if has_budget or self.replay is None else self.replay.full_in_phase
        phase, held = first or found.memory.peak_phase, found.memory.breakdown_bytes
        if phase != found.memory.peak_phase:
            log, live = worst_rank(self.simulated.for_memory)
            held = breakdown(log, live.phases[phase])
        return Limit("gpu", phase, max(held, key=lambda name: held[name]))


def _host_limit(host: HostMemory, available: int) -> Limit:
    if host.load_bytes > available:
        return Limit("host", "load", "parameters")
    parts = {name: size for name, size in host_document(host).items() if name != "load"}
    return Limit("host", "training", max(parts, key=lambda name: parts[name]).replace("_", " "))
