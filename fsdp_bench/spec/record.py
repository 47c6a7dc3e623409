"""TrialRecord: the record of one trial. RunPlan: how it is run and measured. TrialSpec: the input of its ranks.

Raw samples are stored: the seconds of every measured step, the peaks of every rank. Medians and maxima are properties,
computed from them. A value that could not be measured is None, and prints as ``unknown``.
"""

import math
import statistics
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from fsdp_bench.spec.checked import Checked, Count
from fsdp_bench.spec.codec import from_versioned
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.model_code import TrainedModel
from fsdp_bench.spec.rank_report import MemoryReading, Outcome, RankReport
from fsdp_bench.spec.setup import TrainSetup
from fsdp_bench.spec.subprocesses.rehearsal import RehearsedGpu

SCHEMA_VERSION = 1

MEASUREMENT_REVISION = 1
"""Increased whenever train/ changes so that old and new measurements are not comparable. It is part of a trial's ID."""

WITHOUT_COMMUNICATION = "without communication"
"""The last stage of a rank: timing steps with collectives that end at once."""

Device = Literal["cuda", "cpu", "fake", "emulated", "rehearsed"]


MOST_STEPS = 10**6
MOST_THREADS = 4096
LONGEST_TIMEOUT_SECONDS = 1e6
"""The longest time limit of a trial: eleven days."""


class RunPlan(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a trial is run and measured. Raises SpecError for values out of range or that contradict each other."""

    warmup_steps: Annotated[int, Meta(ge=2, le=MOST_STEPS)] = 2
    """Steps before the measured ones. On a CPU, live tensors are tracked in these only, because that takes time.
    Adam's states appear in the first step, and FSDP2's first step counts DTensor's sharding propagation."""
    steps: Annotated[int, Meta(ge=1, le=MOST_STEPS)] = 3
    """Measured steps. The seconds of each are stored."""
    communication_steps: Annotated[int, Meta(ge=0, le=MOST_STEPS)] = 1
    """Steps under the profiler, after the measured ones, for communication time. With 0 it is unknown."""
    steps_without_communication: Annotated[int, Meta(ge=0, le=MOST_STEPS)] = 0
    """Steps timed with collectives that end at once, after all other steps. With 0 their time is unknown."""
    timeout_seconds: Annotated[float, Meta(gt=0, le=LONGEST_TIMEOUT_SECONDS)] = 300.0
    """The trial's time limit, from the start of its ranks; sweep/run/runner.py applies it."""
    memory_limit_bytes: Count | None = None
    """Bytes that one rank may allocate. On a GPU torch enforces it; on a CPU live tensor bytes are compared with it."""
    threads_per_rank: Annotated[int, Meta(ge=1, le=MOST_THREADS)] | None = None
    """CPU threads of one rank; by default the number of cores divided by the number of ranks."""
    backend: Literal["gloo"] | None = None
    """The process group's backend; by default NCCL on GPUs and gloo on a CPU. With gloo several ranks can share a GPU.
    Reduce-scatters then go through host memory, so that GPU memory is the same as with NCCL."""
    attention: Literal["flash"] | None = None
    """The kernel of 16-bit attention on GPUs: FlashAttention. By default torch chooses (simulate/operators/kernels.py,
    prefers_cudnn)."""
    emulate: bool = False
    """Whether only rank 0 of the world runs, in one process, with collectives that end at once."""
    rehearsed_on: RehearsedGpu | None = None
    """The GPU that the stand-in for NVIDIA's libraries passes for, if trials are rehearsed. Rank 0 runs alone."""

    @property
    def alone(self) -> Literal["", "emulated", "rehearsed"]:
        """The way rank 0 runs alone. Empty if all ranks run."""
        return "rehearsed" if self.rehearsed_on is not None else "emulated" if self.emulate else ""

    @property
    def gpu_limit_bytes(self) -> int | None:
        """The most that torch's allocator may reserve on a GPU, if it is less than the GPU's memory."""
        available = None if self.rehearsed_on is None else self.rehearsed_on.available_bytes
        limits = (self.memory_limit_bytes, available)
        return min((limit for limit in limits if limit is not None), default=None)

    def _check(self) -> None:
        if self.emulate and self.backend is not None:
            raise SpecError(f"backend: {self.backend!r} is not allowed with emulate = true; there are no peers")
        if self.rehearsed_on is not None and not self.emulate:
            raise SpecError("emulate: False is not allowed where trials are rehearsed; rank 0 runs alone")
        for field in ("communication_steps", "steps_without_communication"):
            if self.emulate and getattr(self, field):
                raise SpecError(
                    f"{field}: {getattr(self, field)} is not allowed with emulate = true; there are no peers"
                )


class TrialSpec(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One trial to run: the input of its ranks."""

    id: str
    model: TrainedModel
    setup: TrainSetup
    run: RunPlan
    device: Device
    keep_trace: bool = False
    """Keep the trace of the last profiled step of every rank. It does not affect measurements."""
    keep_snapshot: bool = False
    """Record every allocation on the GPU from the start; write a snapshot at the end, or when memory runs out."""

    @property
    def num_processes(self) -> int:
        """Number of processes of the trial: 1 if it is emulated or rehearsed, else the world size."""
        return 1 if self.run.emulate else self.setup.world_size


class TrialRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of one trial, stored as ``trials/ID.json``."""

    schema_version: int
    id: str
    sweep: str
    source: Literal["measured", "rehearsed"]
    device: Device
    """The device. ``emulated``: rank 0 ran alone, on ``emulated_on``. ``rehearsed``: on ``run.rehearsed_on``."""
    model: TrainedModel
    num_parameters: int
    setup: TrainSetup
    effective_strategy: str
    """The strategy read back from the wrapped model; if the trial ended before that, the one that the setup implies."""
    run: RunPlan
    outcome: Outcome
    reason: str | None = None
    """The reason why the outcome is not ``ok``; or for ``ok``, at which step the loss became NaN or infinite."""
    suspect: tuple[str, ...] = ()
    """Why the measurement should not be trusted: another program's process on the GPU, for example."""
    ranks: tuple[RankReport, ...] = ()
    stderr_tail: str | None = None
    peak_flops_per_second: float | None = None
    """Dense peak of one GPU for the compute dtype. None if the GPU is not in the catalogue."""
    peak_flops_source: str | None = None
    started_at: str
    """Start time, ISO 8601 in UTC."""
    wall_seconds: float
    overhead_seconds: float | None = None
    """``wall_seconds`` minus the time from the start to the end of the ranks."""
    emulated_on: Device | None = None
    """The device of the one rank, if it ran alone: ``cuda`` or ``cpu``; ``cuda`` if it was rehearsed."""

    @property
    def hardware(self) -> str:
        """The device of torch's operators: ``cuda`` or ``cpu``; ``fake`` for a dry run."""
        return self.emulated_on or self.device

    @property
    def alone(self) -> str:
        """The way rank 0 ran alone: ``emulated`` or ``rehearsed``. Empty if all ranks ran."""
        return self.device if self.device in ("emulated", "rehearsed") else ""

    @property
    def num_nodes(self) -> int:
        """The number of nodes that its ranks ran on."""
        return len({rank.environment.get("node") for rank in self.ranks}) or 1

    @property
    def fits(self) -> bool:
        """Whether the trial ended ``ok`` without an allocation retry on any rank."""
        retries = [rank.memory.num_alloc_retries or 0 for rank in self.ranks if rank.memory]
        return self.outcome is Outcome.OK and not any(retries)

    @property
    def worst_rank_memory(self) -> MemoryReading | None:
        """The memory of the rank with the largest peak allocated."""
        readings = [rank.memory for rank in self.ranks if rank.memory]
        return max(readings, key=lambda reading: reading.peak_allocated_bytes or 0, default=None)

    @property
    def step_seconds(self) -> float | None:
        """The median over measured steps of the slowest rank's seconds. None without measured steps."""
        return _median_of_slowest([rank.step_seconds for rank in self.ranks])

    @property
    def seconds_without_communication(self) -> float | None:
        """The median over steps with collectives that end at once of the slowest rank's seconds."""
        return _median_of_slowest([rank.seconds_without_communication for rank in self.ranks])

    @property
    def exposed_by_difference_seconds(self) -> float | None:
        """Exposed communication without the profiler: ``step_seconds`` minus ``seconds_without_communication``.

        It may be negative if communication takes less time than steps vary. It includes the time that compute loses
        where communication uses the same cores or memory.
        """
        step, without = self.step_seconds, self.seconds_without_communication
        return None if step is None or without is None else step - without

    @property
    def exposed_fractions(self) -> tuple[float, float] | None:
        """Exposed communication as a fraction of a step: by the profiler, and by difference.

        Each is a fraction of the steps that it was measured in: the profiler slows communication and compute down.
        """
        difference, seconds = self.exposed_by_difference_seconds, self.step_seconds
        profiled = [
            statistics.median(reading.exposed_seconds / reading.step_seconds for reading in rank.communication)
            for rank in self.ranks
            if rank.communication
        ]
        if not profiled or difference is None or not seconds:
            return None
        return max(profiled), difference / seconds

    @property
    def exposed_disagreement(self) -> float | None:
        """The difference of the two exposed fractions."""
        fractions = self.exposed_fractions
        return None if fractions is None else abs(fractions[0] - fractions[1])

    @property
    def tokens_per_second_per_gpu(self) -> float | None:
        """Tokens per second of one rank. None for models whose batches are not made of tokens."""
        seconds = self.step_seconds
        return self.setup.tokens_per_step_per_rank / seconds if seconds and self.model.has_tokens else None

    @property
    def model_flops_per_second(self) -> float | None:
        """One rank's model FLOP/s: without recomputation, attention counted as causal. None for other code."""
        tokens, flops = self.tokens_per_second_per_gpu, self.model.model_flops_per_token(self.setup.sequence_length)
        return tokens * flops if tokens and flops is not None else None

    @property
    def mfu(self) -> float | None:
        """Model FLOP/s over the dense peak for the compute dtype. None if that peak is unknown."""
        if not self.model_flops_per_second or not self.peak_flops_per_second:
            return None
        return self.model_flops_per_second / self.peak_flops_per_second

    @property
    def hfu(self) -> float | None:
        """Hardware FLOP/s (including recomputation by checkpointing) over the same peak as ``mfu``."""
        tokens, peak = self.tokens_per_second_per_gpu, self.peak_flops_per_second
        if not tokens or not peak:
            return None
        flops = self.model.hardware_flops_per_token(self.setup)
        return None if flops is None else tokens * flops / peak

    @property
    def communication_seconds(self) -> float | None:
        """Total communication per step: the median over profiled steps of the rank with the most."""
        return self._communication("total_seconds")

    @property
    def exposed_communication_seconds(self) -> float | None:
        """Exposed communication per step: the median over profiled steps of the rank with the most."""
        return self._communication("exposed_seconds")

    def _communication(self, field: str) -> float | None:
        medians: list[float] = [
            float(statistics.median(getattr(reading, field) for reading in rank.communication))
            for rank in self.ranks
            if rank.communication
        ]
        return max(medians, default=None)

    @property
    def final_loss(self) -> float | None:
        """Mean over ranks of the loss of the last measured step. None if it is NaN or infinite."""
        finals = [rank.losses[-1] for rank in self.ranks if rank.losses]
        return statistics.fmean(finals) if finals and all(map(math.isfinite, finals)) else None


def _median_of_slowest(ranks: list[tuple[float, ...]]) -> float | None:
    samples = [seconds for seconds in ranks if seconds]
    return float(statistics.median(map(max, zip(*samples, strict=False)))) if samples else None


def read_record(data: bytes, name: str) -> TrialRecord:
    """Decode a stored record, as ``from_versioned``. The next schema version upgrades this one here."""
    return from_versioned(data, TrialRecord, name, SCHEMA_VERSION, ", or choose another results folder")
