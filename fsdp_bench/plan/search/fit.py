"""Decides whether a candidate fits; if not, names the memory that it exceeds."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from fsdp_bench.plan.estimate import (
    Estimate,
    available_bytes,
    communicators_for,
    estimate,
    refuse_too_slow,
    start_replay,
)
from fsdp_bench.plan.search.quantity import Candidate
from fsdp_bench.replay.caching_allocator.replay import AllocatorReading, Replay
from fsdp_bench.replay.host_memory import Build, HostMemory, host_memory
from fsdp_bench.replay.live_memory import breakdown, worst_rank
from fsdp_bench.simulate.operators.kernels import CUDA, Kernels, kernels_on
from fsdp_bench.simulate.wrappers.impossible import why_impossible
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import Cluster, Gpu

NO_FLASH_ATTENTION = (
    "torch has no FlashAttention for this GPU, and the model's code was not recorded without it; --precision fp32 is"
    " predicted"
)


@dataclass(frozen=True)
class Limit:
    """The memory that a candidate exceeds."""

    place: str
    """``card`` (GPU memory) or ``host`` (host memory)."""
    phase: str
    """The phase in which GPU memory runs out first; for host memory, ``load`` or ``training``."""
    category: str
    """The largest category in that phase: of the breakdown for GPU memory, of HostMemory for host memory."""


@dataclass(frozen=True)
class FitCheck:
    """The limits that a candidate is checked against.

    On a GPU: peak reserved memory must be within ``usable_memory_bytes`` less the headroom (``headroom_bytes``, by
    default that of headroom.py), and host memory within the node's memory, if that is known.
    With ``budget_bytes``: peak live bytes must be within the budget, as in measured trials on a CPU.
    """

    kernels: Kernels = CUDA
    build: Build = Build.META
    expandable_segments: bool = False
    budget_bytes: int | None = None
    headroom_bytes: int | None = None

    def refuse(self, candidate: Candidate) -> None:
        """Refuse a candidate that ``predict`` refuses.

        Raises:
            SpecError: for setups that cannot run, for a GPU whose kernels of attention are not those predicted, for a
                world size that is not the cluster's, and for a GPU whose usable memory is not documented.
        """
        setup, gpu = candidate.setup, _gpu(candidate)
        refuse_too_slow(candidate.model, setup)
        if self.budget_bytes is None and (reason := why_impossible(candidate.model, setup, "cuda")) is not None:
            raise SpecError(reason)
        if gpu is not None and not candidate.model.knows_attention(gpu, setup.precision.compute):
            raise SpecError(f"{gpu.name}: {NO_FLASH_ATTENTION}")
        if isinstance(candidate.hardware, Cluster) and candidate.hardware.world_size != setup.world_size:
            raise SpecError(f"world_size: {setup.world_size} is not the cluster's {candidate.hardware.world_size} GPUs")
        if self.budget_bytes is None and gpu is None:
            raise SpecError("no GPU is named; --server NAME or --gpu NAME")
        if self.budget_bytes is None and gpu is not None and gpu.usable_memory_bytes is None:
            raise SpecError(
                f"gpu: nobody documents how much of a {gpu.name} a process can use; --gpu-memory 24GiB,"
                " in Python usable_memory_bytes of the Gpu"
            )

    def memory_limit_bytes(self, candidate: Candidate) -> int:
        """Return the budget, or the GPU memory that torch's allocator can reserve."""
        if self.budget_bytes is not None:
            return self.budget_bytes
        communicators = communicators_for(candidate.model, candidate.setup, _cluster(candidate))
        return available_bytes(_gpu(candidate), communicators, self.headroom_bytes) or 0

    def fullness(self, candidate: Candidate) -> float:
        """Return live bytes or host memory as a fraction of its limit, whichever fraction is larger.

        Takes milliseconds. A candidate may fit only if this is at most 1.
        """
        fraction = self.host_memory_fraction(candidate)
        if fraction > 1:
            return fraction
        _, live = worst_rank(candidate.model, candidate.setup, self._kernels(candidate))
        limit = self.memory_limit_bytes(candidate)
        return max(fraction, live.peak_bytes / limit) if limit else inf

    def replay(self, candidate: Candidate, is_limited: bool = True) -> Replay:
        """Return a replay of the caching allocator on this GPU, or on a GPU of unlimited memory, at its beginning."""
        limit = self.memory_limit_bytes(candidate) if is_limited else None
        kernels = self._kernels(candidate)
        return start_replay(candidate.model, candidate.setup, kernels, limit, self.expandable_segments)

    def host_memory_fraction(self, candidate: Candidate) -> float:
        """Return the fraction of a node's host memory that its ranks need. 0 if the host memory is not known."""
        cluster = _cluster(candidate)
        if cluster is None or cluster.server.host_memory_bytes is None:
            return 0.0
        if not candidate.setup.uses_host_memory and self.build is Build.META:
            return 0.0
        needed = host_memory(candidate.model, candidate.setup, cluster.gpus_per_node, self.build).peak_bytes
        return needed / cluster.server.host_memory_bytes

    def estimate(self, candidate: Candidate, reading: AllocatorReading | None = None) -> Estimate:
        """Predict the memory of a candidate. ``reading`` is the result of a ``replay``, if there was one."""
        return estimate(
            candidate.model,
            candidate.setup,
            candidate.hardware,
            self.kernels,
            self.build,
            self.expandable_segments,
            reading,
            self.headroom_bytes,
        )

    def needed_bytes(self, candidate: Candidate, found: Estimate) -> int:
        """Return peak reserved memory on a GPU of unlimited memory. With a budget, return peak live bytes."""
        if self.budget_bytes is not None:
            return found.memory.peak_allocated_bytes
        return self.replay(candidate, is_limited=False).until().peak_reserved_bytes

    def limit(self, candidate: Candidate, found: Estimate) -> Limit:
        """Return the memory that a candidate exceeds."""
        if self.budget_bytes is None and self.host_memory_fraction(candidate) > 1:
            return _host_limit(found.host, found.host_memory_bytes or 0)
        first = None if self.budget_bytes is not None else found.allocator.full_in_phase
        phase, held = first or found.memory.peak_phase, found.memory.breakdown_bytes
        if phase != found.memory.peak_phase:
            log, live = worst_rank(candidate.model, candidate.setup, self._kernels(candidate))
            held = breakdown(log, live.phases[phase])
        return Limit("card", phase, max(held, key=lambda name: held[name]))

    def _kernels(self, candidate: Candidate) -> Kernels:
        return kernels_on(self.kernels, _gpu(candidate), moves_model=self.build is not Build.META)


def _cluster(candidate: Candidate) -> Cluster | None:
    return candidate.hardware if isinstance(candidate.hardware, Cluster) else None


def _gpu(candidate: Candidate) -> Gpu | None:
    return candidate.hardware.gpu if isinstance(candidate.hardware, Cluster) else candidate.hardware


def _host_limit(host: HostMemory, available: int) -> Limit:
    if host.load_bytes > available:
        return Limit("host", "load", "parameters")
    parts = {
        "pinned parameters": host.pinned_parameters_bytes,
        "pinned gradients": host.pinned_gradients_bytes,
        "pinned activations": host.pinned_activations_bytes,
        "optimizer state": host.optimizer_state_bytes,
        "temporary": host.temporary_bytes,
    }
    return Limit("host", "training", max(parts, key=lambda name: parts[name]))
