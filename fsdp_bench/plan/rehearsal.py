"""Whether a rehearsed script fits a GPU, and the JSON form of the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from typing import Any

from fsdp_bench.plan.estimate import Verdict
from fsdp_bench.plan.headroom import Headroom, headroom_of
from fsdp_bench.plan.rehearsed_time.answer import RehearsedTime, rehearsed_time, rehearsed_time_document, why_no_time
from fsdp_bench.rates.communicators import Communicators, communicators_of
from fsdp_bench.spec.codec import to_builtins
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import Gpu, Hardware
from fsdp_bench.spec.setup import ShardingStrategy, TrainSetup
from fsdp_bench.spec.subprocesses.rehearsal import PhasePeaks, RehearsalOutcome, RehearsalReport, RehearsedGpu


def headroom_of_script(hardware: Hardware, world_size: int, stated_bytes: int | None) -> Headroom:
    """Return the GPU memory that is kept free for the CUDA context and NCCL, before anything of the script is known."""
    of_all_ranks = communicators_of(TrainSetup(world_size=world_size), hardware)
    return headroom_of(hardware.gpu, of_all_ranks, stated_bytes)


class WhyUnknown(Enum):
    """Why it is unknown whether a script fits; of several reasons the first."""

    UNSUPPORTED = auto()
    """It called a function that the stand-in does not have."""
    FAILED = auto()
    CUT = auto()
    """It was ended by --timeout or an interrupt."""
    NO_GPU = auto()
    """It never used the GPU."""
    NO_STEP = auto()
    """It never made an optimizer step."""
    VALUES = auto()
    """It read values from the GPU that may decide sizes."""
    ONE_STEP = auto()
    """It was ended after its first step. The later ones hold the optimizer's states too."""


def rehearsed_gpu(gpu: Gpu, kept_free_bytes: int) -> RehearsedGpu:
    """Return a GPU for the stand-in to pass for; its memory is known (``sized``).

    Raises:
        SpecError: for a GPU that is not NVIDIA's, or whose multiprocessors are not known.
    """
    assert gpu.usable_memory_bytes is not None, "sized() has it"
    if gpu.compute_capability is None or gpu.num_multiprocessors is None:
        raise SpecError(f"gpu: {gpu.name} cannot be rehearsed; only GPUs by NVIDIA whose multiprocessors are known")
    return RehearsedGpu(
        name=gpu.name,
        product_name=next(iter(gpu.product_names), gpu.name),
        usable_bytes=gpu.usable_memory_bytes,
        kept_free_bytes=kept_free_bytes,
        compute_capability=gpu.compute_capability,
        num_multiprocessors=gpu.num_multiprocessors,
    )


@dataclass(frozen=True)
class Rehearsal:
    """One rehearsal and the GPU that its stand-in has passed for."""

    report: RehearsalReport
    hardware: Hardware
    kept_free: Headroom
    max_gpu_bytes: int | None = None
    """A limit of the user's own (--max-gpu-memory), for reserved memory and what is kept free together."""
    asks_time: bool = False
    """Whether the time of a step is asked for (--time)."""
    tokens_per_step: int | None = None
    """The tokens that the rank trains on in a step, by the user (--tokens-per-step)."""

    @property
    def gpu(self) -> Gpu:
        """The GPU."""
        return self.hardware.gpu

    @property
    def usable_bytes(self) -> int:
        """The GPU memory that a process can use."""
        assert self.gpu.usable_memory_bytes is not None
        return self.gpu.usable_memory_bytes

    @property
    def available_bytes(self) -> int:
        """GPU memory that torch's allocator can reserve: all but what is kept free."""
        return self.usable_bytes - self.kept_free.num_bytes

    @property
    def exceeds_limit(self) -> bool:
        """Whether it needs more than the user's own limit."""
        if self.max_gpu_bytes is None or self.report.peak is None:
            return False
        return self.report.peak_reserved_bytes + self.kept_free.num_bytes > self.max_gpu_bytes

    @property
    def why_unknown(self) -> WhyUnknown | None:
        """Why a script that has not run out of memory may fit or not. None if that is known."""
        report = self.report
        reasons = {
            WhyUnknown.UNSUPPORTED: bool(report.unsupported) and report.stops_at_unsupported,
            WhyUnknown.FAILED: report.outcome is RehearsalOutcome.FAILED,
            WhyUnknown.CUT: report.outcome in (RehearsalOutcome.TIMED_OUT, RehearsalOutcome.INTERRUPTED),
            WhyUnknown.NO_GPU: report.peak is None,
            WhyUnknown.NO_STEP: report.num_steps == 0,
            WhyUnknown.VALUES: bool(report.sizes_from_values),
            WhyUnknown.ONE_STEP: report.outcome is RehearsalOutcome.STOPPED and report.num_steps == 1,
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    @property
    def verdict(self) -> Verdict | None:
        """Whether the script fits. None if that is unknown; ``why_unknown`` then says why."""
        if self.report.outcome is RehearsalOutcome.OUT_OF_MEMORY or self.exceeds_limit:
            return Verdict.DOES_NOT_FIT
        if self.why_unknown is not None:
            return None
        return Verdict.RUNS_WITH_RETRIES if self.report.num_alloc_retries else Verdict.FITS

    @property
    def fits(self) -> bool | None:
        """Whether it fits without allocation retries. None if that is not known."""
        return None if self.verdict is None else self.verdict is Verdict.FITS

    @cached_property
    def first_step(self) -> PhasePeaks | None:
        """The span of the first step with its peak; the step includes loading."""
        return _highest([span for step, spans in self.report.steps() if step == 1 for span in spans])

    @cached_property
    def steady_state(self) -> PhasePeaks | None:
        """The span with the peak of the steps after the first. None if there was only one."""
        return _highest([span for step, spans in self.report.steps() if step > 1 for span in spans])

    @cached_property
    def time(self) -> RehearsedTime | None:
        """The time that the last whole step would take. None if nobody asked, or if there was none: ``why_no_time``."""
        return rehearsed_time(self.report, self.hardware, self.tokens_per_step) if self.asks_time else None

    @property
    def why_no_time(self) -> str | None:
        """Why a time that was asked for is unknown altogether."""
        return why_no_time(self.report) if self.asks_time and self.time is None else None

    @property
    def communicators(self) -> Communicators | None:
        """NCCL's communicators of this rank.

        None if its process groups are neither all of the whole world nor those of hybrid sharding.
        """
        report = self.report
        sizes = sorted(size for size in report.process_groups.values() if size > 1)
        world, hardware = report.world_size, self.hardware
        if not sizes:
            return Communicators(())
        if set(sizes) == {world}:
            is_sharded = any("reduce_scatter" in name for _group, name, _count in report.collectives)
            strategy = ShardingStrategy.FULL_SHARD if is_sharded else ShardingStrategy.NO_SHARD
            return communicators_of(TrainSetup(world_size=world, strategy=strategy), hardware)
        # Two sizes whose product is the world: hybrid sharding. The groups that all-gather are those of the shards.
        gathering = {group for group, name, _count in report.collectives if "allgather" in name}
        shards = {report.process_groups[group] for group in gathering} - {1, world}
        others = [size for size in sizes if size != world]
        if len(others) == 2 and others[0] * others[1] == world and len(shards) == 1:
            setup = TrainSetup(world_size=world, shard_size=shards.pop(), strategy=ShardingStrategy.HYBRID_SHARD)
            return communicators_of(setup, hardware)
        return None


def worst_of(found: Sequence[Rehearsal]) -> Rehearsal:
    """Return the rank that decides: one that does not fit, else one of which that is unknown, else the largest."""
    return max(found, key=lambda one: (one.fits is False, one.fits is None, one.report.peak_reserved_bytes))


def _highest(spans: list[PhasePeaks]) -> PhasePeaks | None:
    return max(spans, key=lambda span: span.allocated_bytes, default=None)


def rehearsal_document(found: Rehearsal) -> dict[str, Any]:
    """Return the JSON form, with the keys of ``predict --json`` where they mean the same. Unknown values are null."""
    report, peak = found.report, found.report.peak
    out_of_memory = report.outcome is RehearsalOutcome.OUT_OF_MEMORY
    gpu, communicators = found.gpu, found.communicators
    phases: dict[str, int] = {}
    for span in report.spans:
        phases[span.phase] = max(span.allocated_bytes, phases.get(span.phase, 0))
    is_known = peak is not None and not out_of_memory and not report.num_alloc_retries
    nccl = communicators.num_bytes if communicators is not None else None
    return {
        "source": "rehearsed",
        "torch": report.torch,
        "cuda": report.cuda,
        "command": report.sentence,
        "world_size": report.world_size,
        "rank": report.rank,
        "outcome": report.outcome.value,
        "num_steps": report.num_steps,
        "server": {
            "name": found.hardware.server.name or None,
            "gpu": gpu.name,
            "gpu_memory_bytes": found.usable_bytes,
        },
        "memory": {
            "peak_allocated_bytes": peak.allocated_bytes if peak else None,
            "peak_reserved_bytes": report.peak_reserved_bytes if peak else None,
            "peak_phase": peak.phase if peak else None,
            "peak_step": peak.step if peak else None,
            "phases": phases,
            "first_step": to_builtins(found.first_step),
            "steady_state": to_builtins(found.steady_state),
            "num_alloc_retries": report.num_alloc_retries,
            "communicators_bytes": [nccl.low, nccl.high] if nccl is not None else None,
            "lines_at_peak": to_builtins(report.lines_at_peak),
        },
        "time": rehearsed_time_document(found.time),
        "why_no_time": found.why_no_time,
        "host": {
            "peak_bytes": report.peak_host_bytes,
            "peak_bytes_of_real_run": report.peak_host_bytes + report.peak_unwritten_host_bytes,
        },
        "reads": to_builtins(report.reads),
        "num_known_reads": report.num_known_reads,
        "unsupported": report.unsupported,
        "notes": list(report.notes),
        "allocator_settings": report.allocator_settings,
        "failure": to_builtins(report.failure),
        "fits": found.fits,
        "verdict": found.verdict,
        "headroom_bytes": found.usable_bytes - report.peak_reserved_bytes if is_known else None,
        "required_headroom_bytes": found.kept_free.num_bytes,
        "spans": to_builtins(report.spans),
    }
