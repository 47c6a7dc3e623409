"""RankReport: what one rank of a trial measured, and why it failed if it did.

Raw samples are stored. A value that could not be had is None, and prints as ``unknown``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

import msgspec

from fsdp_bench.spec.errors import SpecError, not_allowed

AnyFloat = Annotated[float, msgspec.Meta(extra={"may_be_infinite": True})]
"""A float that is stored even where it is NaN or infinite; every other one is finite."""

MOST_SECONDS = 1e10
"""No time that is stored is longer: three hundred years."""


class Outcome(StrEnum):
    """How a trial ended. Running out of memory is a result; ``interrupted`` is not stored, so the trial runs again."""

    OK = "ok"
    OOM_GPU = "oom_gpu"
    OOM_HOST = "oom_host"
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    INTERRUPTED = "interrupted"
    SKIPPED = "skipped"

    @classmethod
    def _missing_(cls, value: object) -> Outcome:
        raise not_allowed("outcome", value, [member.value for member in cls])

    @property
    def is_oom(self) -> bool:
        """Whether some memory ran out."""
        return self in (Outcome.OOM_GPU, Outcome.OOM_HOST)


class MemoryReading(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's memory, in bytes. Peaks of different kinds are never compared with each other."""

    peak_allocated_bytes: int | None
    """``torch.cuda.max_memory_allocated`` over all steps; on a CPU the peak of live tensor storages, which is
    unknown for compiled code."""
    peak_phase: str
    """The phase in which ``peak_allocated_bytes`` was reached; ``unknown`` where it is not known."""
    phases: dict[str, int]
    """Peak allocated by phase: load, forward, loss, backward, optimizer."""
    peak_reserved_bytes: int | None = None
    """``torch.cuda.max_memory_reserved``; a CPU has no caching allocator."""
    peak_device_bytes: int | None = None
    """NVML's figure for this process, the largest seen: reserved, the context, the communicators."""
    peak_host_bytes: int | None = None
    """The rank's largest resident set (VmHWM)."""
    peak_host_cgroup_bytes: int | None = None
    """The cgroup's peak during the trial, all processes; None where an earlier peak was higher."""
    num_alloc_retries: int | None = None
    """``num_alloc_retries`` of torch.cuda.memory_stats: times the allocator freed its whole cache and tried again."""
    num_ooms: int | None = None
    parameters_bytes: int = 0
    """This rank's stored parameters, on any device."""
    gradients_bytes: int = 0
    """This rank's gradients as the optimizer sees them."""
    optimizer_state_bytes: int = 0


class CollectiveReading(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of collective in one step of one rank.

    Raises:
        SpecError: for a group without ranks, or seconds that no step takes.
    """

    kind: str
    """all_gather, reduce_scatter, all_reduce, broadcast, other; copy_to_device and copy_to_host, which are no
    collectives and not in the totals."""
    calls: int
    message_bytes: int
    """The whole message summed over calls: an all-gather's output, a reduce-scatter's input, else the tensor."""
    seconds: float | None = None
    """Time in which collectives of this kind ran; None where the profiler did not show them."""
    group_size: int | None = None
    """Ranks that take part; None where they were not the same in all calls, and for copies."""

    def __post_init__(self) -> None:
        if self.group_size is not None and self.group_size < 1:
            raise SpecError(f"group_size: {self.group_size} is not allowed; 1 or more")
        if self.seconds is not None:
            _check_seconds("seconds", self.seconds)

    @property
    def algorithm_bandwidth(self) -> float | None:
        """Message bytes a second: algbw of nccl-tests (doc/PERFORMANCE.md)."""
        return self.message_bytes / self.seconds if self.seconds else None

    @property
    def bus_bandwidth(self) -> float | None:
        """Bytes a second that every rank's link must carry: busbw of nccl-tests (doc/PERFORMANCE.md).

        The algorithm bandwidth times (n - 1) / n for all-gather and reduce-scatter, twice that for all-reduce, 1 for
        broadcast and for copies. A reduce-scatter counts as one also where gloo runs it as an all-reduce.
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
    """Communication in one profiled step of one rank.

    Raises:
        SpecError: for a step that took no time.
    """

    step_seconds: float
    """Duration of the profiled step, which the profiler slows down."""
    total_seconds: float
    """Time during which any collective ran."""
    exposed_seconds: float
    """Time during which a collective ran and no compute did."""
    collectives: tuple[CollectiveReading, ...] = ()

    def __post_init__(self) -> None:
        if self.step_seconds == 0:
            raise SpecError("step_seconds: 0 is not allowed; a step takes time")
        for field in ("step_seconds", "total_seconds", "exposed_seconds"):
            _check_seconds(field, getattr(self, field))


def _check_seconds(field: str, *values: float) -> None:
    for value in values:
        if not 0 <= value <= MOST_SECONDS:
            raise SpecError(f"{field}: {value} is not allowed; seconds, from 0 to {MOST_SECONDS:g}")


class EffectiveSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What was read back from the wrapped model, after the first step."""

    strategy: str
    """The strategy that the wrapper runs; ``unknown`` when it cannot be read."""
    wrapper: str
    """FullyShardedDataParallel, fully_shard or DistributedDataParallel."""
    num_units: int
    shard_group_size: int
    parameter_dtypes: tuple[str, ...]
    gradient_dtypes: tuple[str, ...]
    optimizer_state_dtypes: tuple[str, ...]
    selective_saved_ops: tuple[str, ...] = ()
    """With selective checkpointing: the operators whose outputs are saved."""


class Telemetry(msgspec.Struct, frozen=True, kw_only=True):
    """NVML samples taken during the measured steps, in order."""

    power_watts: tuple[float, ...] = ()
    utilization_percent: tuple[float, ...] = ()


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a rank did not finish."""

    message: str
    phase: str
    at: float
    """Seconds since the epoch, to find the first cause among ranks of one machine."""
    limit: str | None = None
    """For an OOM, what ran out: ``device``, ``budget`` (memory_limit on a CPU) or ``host``."""
    allocator_summary: str | None = None


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank measured before it ended.

    Raises:
        SpecError: for seconds that no step takes.
    """

    rank: int
    outcome: Outcome
    device_name: str = "unknown"
    memory: MemoryReading | None = None
    warmup_seconds: tuple[float, ...] = ()
    step_seconds: tuple[float, ...] = ()
    communication: tuple[CommunicationReading, ...] = ()
    seconds_without_communication: tuple[float, ...] = ()
    """Of each step with collectives that end at once."""
    without_communication_failure: str | None = None
    """Why there are none, where that was tried."""
    losses: tuple[AnyFloat, ...] = ()
    """This rank's mean loss of each step in order, warm-up included. NaN and infinity are stored as ``"nan"``,
    ``"inf"`` and ``"-inf"``."""
    effective: EffectiveSetup | None = None
    telemetry: Telemetry | None = None
    failure: Failure | None = None
    environment: dict[str, str] = {}
    """Versions and devices as this rank saw them."""

    def __post_init__(self) -> None:
        for field in ("warmup_seconds", "step_seconds", "seconds_without_communication"):
            _check_seconds(field, *getattr(self, field))


def divergence(ranks: Sequence[RankReport]) -> str | None:
    """Return at which step a loss first became NaN or infinite, as text; steps count from 1, warm-up included."""
    lost = [
        (step, rank.rank, loss) for rank in ranks for step, loss in enumerate(rank.losses, 1) if not math.isfinite(loss)
    ]
    if not lost:
        return None
    step, rank_number, loss = min(lost, key=lambda found: found[:2])
    return f"loss became {loss} at step {step} on rank {rank_number}"
