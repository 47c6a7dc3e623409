"""Whether a rehearsed script fits a GPU."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from fsdp_bench.plan.estimate import Verdict
from fsdp_bench.plan.headroom import Headroom, headroom_of
from fsdp_bench.plan.rehearsed_time.answer import RehearsedTime, rehearsed_times, why_no_time
from fsdp_bench.rates.communicators import Communicators, Purpose, communicators_of, communicators_of_groups
from fsdp_bench.spec.calibration_profile import Scaling
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import Gpu, Hardware
from fsdp_bench.spec.setup import ShardingStrategy, TrainSetup
from fsdp_bench.spec.subprocesses.rehearsal import PhasePeaks, RehearsalOutcome, RehearsalReport, RehearsedGpu


def headroom_of_script(hardware: Hardware, world_size: int, stated_bytes: int | None) -> Headroom:
    """Return the GPU memory that is kept free for the CUDA context and NCCL, before anything of the script is known."""
    of_all_ranks = communicators_of(TrainSetup(world_size=world_size), hardware)
    return headroom_of(hardware.gpu, of_all_ranks, stated_bytes)


class WhyUnknown(StrEnum):
    """Why it is unknown whether a script fits; of several reasons the first."""

    UNSUPPORTED = "it called a function that the stand-in for NVIDIA's libraries does not have"
    FAILED = "it failed"
    CUT = "it was ended by --timeout or an interrupt"
    NO_GPU = "it never used the GPU"
    NO_STEP = "it never made an optimizer step"
    VALUES = "it read values from the GPU that may decide sizes"
    ONE_STEP = "it was ended after its first step, and the later ones hold the optimizer's states too"


def rehearsed_gpu(gpu: Gpu, kept_free_bytes: int) -> RehearsedGpu:
    """Return what the stand-in passes for. Raises SpecError unless it is NVIDIA's, with known multiprocessors."""
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
class RanksTogether:
    """Ranks of one command, whose steps take as long as they wait for each other."""

    reports: tuple[RehearsalReport, ...]
    hardware: Hardware
    tokens_per_step: int | None
    scaling: Scaling | None = None

    @cached_property
    def times(self) -> dict[int, RehearsedTime]:
        """The time of each rank that has a whole step."""
        return rehearsed_times(self.reports, self.hardware, self.tokens_per_step, self.scaling)


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
    scaling: Scaling | None = None
    """Changes of the datasheet's rates by a run or a host (--calibration)."""
    together: RanksTogether | None = None
    """The ranks of the same command that were rehearsed, this one among them. None: this one alone."""

    @property
    def gpu(self) -> Gpu:
        """The GPU."""
        return self.hardware.gpu

    @property
    def reserved_bytes(self) -> int | None:
        """The peak of reserved memory; None if the script never used the GPU."""
        return self.report.peak_reserved_bytes if self.report.peak is not None else None

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
    def most_reserved_bytes(self) -> int:
        """The most reserved memory with which it fits: what is available, or less by the user's own limit."""
        own = self.usable_bytes if self.max_gpu_bytes is None else self.max_gpu_bytes
        return min(self.usable_bytes, own) - self.kept_free.num_bytes

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
        if not self.asks_time:
            return None
        together = self.together or RanksTogether((self.report,), self.hardware, self.tokens_per_step, self.scaling)
        return together.times.get(self.report.rank)

    @property
    def why_no_time(self) -> str | None:
        """Why a time that was asked for is unknown altogether."""
        return why_no_time(self.report) if self.asks_time and self.time is None else None

    @property
    def why_no_speed(self) -> str | None:
        """Why the tokens per second that were asked for are unknown. None if they are known."""
        time = self.time
        if time is None or time.tokens_per_second_per_gpu is not None:
            return self.why_no_time
        if time.unknown:
            return f"nobody documents how long these take there: {', '.join(time.unknown)}"
        return "the tokens of a step are unknown (--tokens-per-step)"

    @property
    def communicators(self) -> Communicators | None:
        """NCCL's communicators of this rank.

        None where ranks exchange messages, for which NCCL has further buffers, and for smaller groups than the world
        where the links are not known.
        """
        report = self.report
        if report.peers or any("alltoall" in name for _group, name, _count in report.collectives):
            return None
        sizes = sorted(size for size in report.process_groups.values() if size > 1)
        world, hardware = report.world_size, self.hardware
        if not sizes:
            return Communicators(())
        if set(sizes) == {world}:
            is_sharded = any("reduce_scatter" in name for _group, name, _count in report.collectives)
            strategy = ShardingStrategy.FULL_SHARD if is_sharded else ShardingStrategy.NO_SHARD
            return communicators_of(TrainSetup(world_size=world, strategy=strategy), hardware)
        ranks = {group: of for group, of in report.group_ranks.items() if len(of) > 1}
        if len(ranks) < len(sizes) or hardware.world_size != world:
            return None
        groups = [(self._purpose(group), of) for group, of in ranks.items()]
        if world not in sizes:  # init_process_group with a device_id has made one
            groups.append((Purpose.BARRIERS, tuple(range(world))))
        return communicators_of_groups(sorted(groups, key=lambda group: [*Purpose].index(group[0])), hardware)

    def _purpose(self, group: str) -> Purpose:
        """Return what a process group does. An all-reduce may need NVLink SHARP's buffers, too."""
        names = {name for of, name, _count in self.report.collectives if of == group}
        if any("reduce_scatter" not in name and "reduce" in name for name in names):
            return Purpose.REPLICATE
        gathers = any("allgather" in name or "reduce_scatter" in name for name in names)
        return Purpose.SHARD if gathers else Purpose.BARRIERS


def together(found: Sequence[Rehearsal]) -> list[Rehearsal]:
    """Return the rehearsals of a command's ranks in their order, each with the others, which decide its time."""
    if len(found) < 2:
        return list(found)
    first, ordered = found[0], sorted(found, key=lambda one: one.report.rank)
    reports = tuple(one.report for one in ordered)
    ranks = RanksTogether(reports, first.hardware, first.tokens_per_step, first.scaling)
    return [replace(one, together=ranks) for one in ordered]


def worst_of(found: Sequence[Rehearsal]) -> Rehearsal:
    """Return the rank that decides: one that does not fit, else one of which that is unknown, else the largest."""
    return max(found, key=lambda one: (one.fits is False, one.fits is None, one.report.peak_reserved_bytes))


def _highest(spans: list[PhasePeaks]) -> PhasePeaks | None:
    return max(spans, key=lambda span: span.allocated_bytes, default=None)
