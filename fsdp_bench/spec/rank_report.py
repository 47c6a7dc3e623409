"""RankReport: the measurements of one rank of a trial, and the reason if it failed.

Raw samples are stored. A value that could not be measured is None, and prints as ``unknown``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from fsdp_bench.spec.checked import CaseInsensitiveEnum

Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e10)]
"""A time in a record: up to three hundred years."""

if TYPE_CHECKING:
    LossValue = float
else:
    LossValue = float | Literal["nan", "inf", "-inf"]
    """A float that may be NaN or infinite, which stored records have as text. All other floats must be finite."""


class Outcome(CaseInsensitiveEnum):
    """The end of a trial. Running out of memory is a result; ``interrupted`` is not stored, so the trial runs again."""

    OK = "ok"
    OOM_GPU = "oom_gpu"
    OOM_HOST = "oom_host"
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    INTERRUPTED = "interrupted"
    SKIPPED = "skipped"

    @property
    def is_oom(self) -> bool:
        """Whether GPU or host memory ran out."""
        return self in (Outcome.OOM_GPU, Outcome.OOM_HOST)


class MemoryReading(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of one rank, in bytes. Peaks of different kinds are never compared with each other."""

    peak_allocated_bytes: int | None
    """``torch.cuda.max_memory_allocated`` over all steps; on a CPU the peak of live tensor storages, which is
    unknown for compiled code."""
    peak_phase: str
    """The phase in which ``peak_allocated_bytes`` was reached, or ``unknown``."""
    phases: dict[str, int]
    """Peak allocated by phase: load, forward, loss, backward, optimizer."""
    peak_reserved_bytes: int | None = None
    """``torch.cuda.max_memory_reserved``. None on a CPU, which has no caching allocator."""
    peak_device_bytes: int | None = None
    """The largest memory of this process in NVML: reserved memory, CUDA context, communicators."""
    peak_host_bytes: int | None = None
    """The peak resident set size of the rank (VmHWM)."""
    peak_host_cgroup_bytes: int | None = None
    """The cgroup's peak during the trial, of all its processes. None if an earlier peak was higher."""
    num_alloc_retries: int | None = None
    """``num_alloc_retries`` of torch.cuda.memory_stats: how often the allocator emptied its cache and tried again."""
    num_ooms: int | None = None
    parameters_bytes: int = 0
    """Bytes of this rank's stored parameters, on any device."""
    gradients_bytes: int = 0
    """Bytes of this rank's gradients, as the optimizer gets them."""
    optimizer_state_bytes: int = 0


class CollectiveReading(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of collective in one step of one rank."""

    kind: str
    """all_gather, reduce_scatter, all_reduce, broadcast or other. Also copy_to_device and copy_to_host, which are not
    collectives and not in the totals."""
    calls: int
    message_bytes: int
    """Message bytes over all calls. A message is an all-gather's output, a reduce-scatter's input, else the tensor."""
    seconds: Seconds | None = None
    """Time in which collectives of this kind ran. None if the profiler did not show them."""
    group_size: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Number of ranks of the group. None if it differs between calls, and for copies."""

    @property
    def algorithm_bandwidth(self) -> float | None:
        """Message bytes per second: algbw of nccl-tests (doc/PERFORMANCE.md)."""
        return self.message_bytes / self.seconds if self.seconds else None

    @property
    def bus_bandwidth(self) -> float | None:
        """Bytes per second on the link of each rank: busbw of nccl-tests (doc/PERFORMANCE.md).

        The algorithm bandwidth times (n - 1) / n for all-gather and reduce-scatter, twice that for all-reduce, 1 for
        broadcast and copies. A reduce-scatter that gloo runs as an all-reduce counts as a reduce-scatter.
        """
        rate, size = self.algorithm_bandwidth, self.group_size
        if rate is None or self.kind == "other":
            return None
        if self.kind in ("broadcast", "copy_to_device", "copy_to_host"):
            return rate
        if size is None:
            return None
        return rate * (size - 1) / size * (2 if self.kind == "all_reduce" else 1)


class CommunicationReading(msgspec.Struct, frozen=True, kw_only=True):
    """Communication in one profiled step of one rank."""

    step_seconds: Annotated[float, msgspec.Meta(gt=0, le=1e10)]
    """Duration of the profiled step. The profiler slows it down."""
    total_seconds: Seconds
    """Time during which any collective ran."""
    exposed_seconds: Seconds
    """Time during which a collective ran and no compute kernel or operator did."""
    collectives: tuple[CollectiveReading, ...] = ()


class EffectiveSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Strategy, wrapper and dtypes, read back from the wrapped model after the first step."""

    strategy: str
    """The strategy that the wrapper runs, or ``unknown`` if it cannot be read."""
    wrapper: str
    """FullyShardedDataParallel, fully_shard, DistributedDataParallel or none."""
    num_units: int
    shard_group_size: int
    shard_ranks: tuple[int, ...] = ()
    """With a hybrid strategy: the ranks of this rank's process group that share one copy of the parameters."""
    replicate_ranks: tuple[int, ...] = ()
    """With a hybrid strategy: the ranks of this rank's process group that hold the same shard."""
    parameter_dtypes: tuple[str, ...]
    gradient_dtypes: tuple[str, ...]
    optimizer_state_dtypes: tuple[str, ...]
    selective_saved_ops: tuple[str, ...] = ()
    """The operators whose outputs selective checkpointing saved."""


class Telemetry(msgspec.Struct, frozen=True, kw_only=True):
    """NVML samples taken during the measured steps, in order."""

    power_watts: tuple[float, ...] = ()
    utilization_percent: tuple[float, ...] = ()


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a rank did not finish."""

    message: str
    phase: str
    at: float
    """Time of the failure in seconds since the epoch, to find the first cause among the ranks."""
    limit: str | None = None
    """If memory ran out, which: ``device``, ``budget`` (memory_limit on a CPU) or ``host``."""
    allocator_summary: str | None = None


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements of one rank until it ended."""

    rank: int
    outcome: Outcome
    device_name: str = "unknown"
    memory: MemoryReading | None = None
    warmup_seconds: tuple[Seconds, ...] = ()
    step_seconds: tuple[Seconds, ...] = ()
    communication: tuple[CommunicationReading, ...] = ()
    seconds_without_communication: tuple[Seconds, ...] = ()
    """Seconds of each step with collectives that end at once."""
    without_communication_failure: str | None = None
    """Why these steps failed, if they did."""
    losses: tuple[LossValue, ...] = ()
    """This rank's mean loss of each step in order, including warm-up."""
    effective: EffectiveSetup | None = None
    telemetry: Telemetry | None = None
    failure: Failure | None = None
    environment: dict[str, str] = {}
    """Versions and devices that this rank used."""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "losses", tuple(map(float, self.losses)))

    def without_times(self) -> RankReport:
        """Return what a rehearsal can say: what torch's allocator counted. No times, no losses, no host memory."""
        memory = self.memory and msgspec.structs.replace(
            self.memory, peak_device_bytes=None, peak_host_bytes=None, peak_host_cgroup_bytes=None
        )
        return msgspec.structs.replace(
            self, memory=memory, warmup_seconds=(), step_seconds=(), losses=(), telemetry=None
        )


def divergence(ranks: Sequence[RankReport]) -> str | None:
    """Return the first step with a NaN or infinite loss as text. Steps count from 1, including warm-up."""
    lost = [
        (step, rank.rank, loss) for rank in ranks for step, loss in enumerate(rank.losses, 1) if not math.isfinite(loss)
    ]
    if not lost:
        return None
    step, rank_number, loss = min(lost, key=lambda found: found[:2])
    return f"loss became {loss} at step {step} on rank {rank_number}"
