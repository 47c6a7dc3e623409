"""What a step of a dial is held against: a card with its caching allocator and its host, or a budget of live bytes."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_bench.plan.estimate import Estimate, allocator_room, estimate, refuse_endless
from fsdp_bench.plan.search.dials import Step
from fsdp_bench.rates.communicators import communicators_of
from fsdp_bench.replay.allocator import AllocatorReading, Replay
from fsdp_bench.replay.compiled import compiled_run
from fsdp_bench.replay.host_memory import Build, HostMemory, host_memory
from fsdp_bench.simulate.operators.kernels import CUDA, Kernels, kernels_on
from fsdp_bench.simulate.repeat import Program
from fsdp_bench.simulate.step import first_steps, simulate
from fsdp_bench.simulate.wrappers.units import why_impossible
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import Cluster, Gpu
from fsdp_bench.spec.setup import Offload

NO_FLASH_ATTENTION = (
    "torch has no flash attention for this card, and what 16-bit attention needs without it is not predicted; fp32 is"
)


@dataclass(frozen=True)
class Limit:
    """What a step that does not fit is short of."""

    place: str
    """``card`` or ``host``."""
    phase: str
    """Where the card is full first; for the host ``load`` or ``training``."""
    category: str
    """What most of the peak of that phase is: a category of the breakdown; of the host one of HostMemory's parts."""


@dataclass(frozen=True)
class Judge:
    """Assumptions under which steps are judged.

    On a card: the caching allocator's peak within ``usable_memory_bytes`` less the headroom for the CUDA context and
    NCCL (headroom.py; ``headroom_bytes`` where that is stated), and the host's memory where it is known.
    With ``budget_bytes``: live bytes within a budget, as on a CPU, where a measured trial has the same limit.
    """

    kernels: Kernels = CUDA
    build: Build = Build.META
    expandable_segments: bool = False
    budget_bytes: int | None = None
    headroom_bytes: int | None = None

    def size_bytes(self, step: Step) -> int:
        """Return what there is: the budget, or what torch's allocator can have of the card.

        Raises:
            SpecError: when nobody documents that.
        """
        if self.budget_bytes is not None:
            return self.budget_bytes
        gpu = _gpu(step)
        if gpu is None:
            raise SpecError("no GPU is named; --server NAME or --gpu NAME")
        if gpu.usable_memory_bytes is None:
            raise SpecError(
                f"gpu: nobody documents how much of a {gpu.name} a process can use; --gpu-memory 24GiB,"
                " in Python usable_memory_bytes of the Gpu"
            )
        room = allocator_room(gpu, communicators_of(step.setup, _cluster(step)), self.headroom_bytes)
        return room or 1  # a search divides by it; nothing is as small

    def live_bytes(self, step: Step) -> int:
        """Return the peak of live bytes, in a millisecond or two. What is reserved is never less."""
        return simulate(step.model, step.setup, self._kernels(step), others_follow=True).replay().peak_bytes

    def refuse(self, step: Step) -> None:
        """Refuse what ``predict`` has no answer to either.

        Raises:
            SpecError: for setups that cannot run, for 16 bits on a card without flash attention, and for a world size
                that is not the cluster's.
        """
        setup, gpu = step.setup, _gpu(step)
        refuse_endless(step.model, setup)
        if self.budget_bytes is None and (reason := why_impossible(step.model, setup, "cuda")) is not None:
            raise SpecError(reason)
        if gpu is not None and not gpu.native_bf16 and setup.precision.compute != "fp32":
            raise SpecError(f"{gpu.name}: {NO_FLASH_ATTENTION}")
        if isinstance(step.hardware, Cluster) and step.hardware.world_size != setup.world_size:
            raise SpecError(f"world_size: {setup.world_size} is not the cluster's {step.hardware.world_size} GPUs")

    def host_share(self, step: Step) -> float:
        """Return how much of a node's memory its ranks need: more than 1 does not fit; 0 where that is not known."""
        cluster = _cluster(step)
        if cluster is None or cluster.server.host_memory_bytes is None:
            return 0.0
        if step.setup.offload is Offload.NONE and self.build is Build.META:
            return 0.0
        needed = host_memory(step.model, step.setup, cluster.gpus_per_node, self.build).peak_bytes
        return needed / cluster.server.host_memory_bytes

    def program(self, step: Step) -> Program:
        """Return what the caching allocator goes through in the first steps."""
        return first_steps(step.model, step.setup, self._kernels(step), others_follow=True)

    def replay(self, program: Program, card_bytes: int | None = None) -> Replay:
        """Return an allocator that it can go through: on a card with retries, or on one without limit.

        A step fits where no more is reserved without limit than there is.
        """
        return Replay(program, card_bytes, self.expandable_segments, streams_keep_pace=True, run=compiled_run())

    def estimate(self, step: Step, reading: AllocatorReading | None = None) -> Estimate:
        """Return everything that is predicted of a step, with the allocator's reading where it is known already."""
        return estimate(
            step.model,
            step.setup,
            step.hardware,
            self.kernels,
            self.build,
            self.expandable_segments,
            reading,
            self.headroom_bytes,
        )

    def limit(self, step: Step, found: Estimate) -> Limit:
        """Return what a step that does not fit is short of."""
        if self.budget_bytes is None and self.host_share(step) > 1:
            return _host_limit(found.host, found.host_bytes or 0)
        first = None if self.budget_bytes is not None else found.allocator.full_in_phase
        phase, held = first or found.memory.peak_phase, found.memory.breakdown_bytes
        if phase != found.memory.peak_phase:
            held = self._held_in(phase, step)
        return Limit("card", phase, max(held, key=lambda name: held[name]))

    def _held_in(self, phase: str, step: Step) -> dict[str, int]:
        """Return what is alive at the peak of one phase, by category."""
        simulated = simulate(step.model, step.setup, self._kernels(step))
        return simulated.breakdown(simulated.replay().phases[phase])

    def _kernels(self, step: Step) -> Kernels:
        gpu = _gpu(step)
        return kernels_on(self.kernels, gpu)


def _cluster(step: Step) -> Cluster | None:
    return step.hardware if isinstance(step.hardware, Cluster) else None


def _gpu(step: Step) -> Gpu | None:
    return step.hardware.gpu if isinstance(step.hardware, Cluster) else step.hardware


def _host_limit(host: HostMemory, available: int) -> Limit:
    if host.load_bytes > available:
        return Limit("host", "load", "parameters")
    parts = {
        "pinned parameters": host.pinned_parameters_bytes,
        "pinned gradients": host.pinned_gradients_bytes,
        "optimizer state": host.optimizer_state_bytes,
        "temporary": host.temporary_bytes,
    }
    return Limit("host", "training", max(parts, key=lambda name: parts[name]))
