"""Compares memory: predicted with measured or rehearsed, phase by phase; of emulated trials with those of all ranks."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median

import msgspec

from fsdp_bench.catalog.loader import gpu_by_product_name
from fsdp_bench.plan.estimate import predict_memory, read_allocator
from fsdp_bench.simulate.compiled.choose import why_eager
from fsdp_bench.simulate.operators.kernels import (
    CPU_EMULATED,
    CPU_GLOO,
    CUDA,
    FIRST_TORCH_WITH_CUDNN,
    Kernels,
    kernels_on,
)
from fsdp_bench.simulate.step import SimulatedSteps
from fsdp_bench.spec.codec import to_json
from fsdp_bench.spec.errors import MachineError, SpecError
from fsdp_bench.spec.rank_report import MemoryReading, Outcome
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.spec.recording.model import Model, RecordedModel
from fsdp_bench.spec.setup import TrainSetup
from fsdp_bench.validate.predictable import cell_label, predictable_model


class Bytes(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted and reference bytes of one quantity of one cell."""

    predicted_bytes: int
    reference_bytes: int

    @property
    def relative(self) -> float:
        """``predicted / reference - 1``."""
        return self.predicted_bytes / self.reference_bytes - 1


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a cell fits, predicted and measured: no out of memory, no allocation retries."""

    predicted: bool
    measured: bool


class MemoryComparison(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of one model and setup, or the reason why there is none."""

    label: str
    phases: dict[str, Bytes] = {}
    """Peak allocated by phase. Empty if the trial ran out of memory."""
    reserved: Bytes | None = None
    """Peak reserved, for a trial on a GPU."""
    fit: Fit | None = None
    """Whether it fits, for a measured trial."""
    outside_bytes: int | None = None
    """Measured GPU memory of the process minus reserved memory: the CUDA context and NCCL. None if earlier trials had
    loaded kernels into the process, and if the allocator released memory."""
    overall: Bytes | None = None
    """Peak allocated over all steps, if it was read apart from the phases, which are read in the first steps."""
    error: str | None = None

    @property
    def is_equal(self) -> bool:
        """Whether every phase is equal to the byte."""
        return bool(self.phases) and all(e.predicted_bytes == e.reference_bytes for e in self.phases.values())

    @property
    def peak(self) -> Bytes:
        """The peak over all phases."""
        return self.overall or Bytes(
            predicted_bytes=max(e.predicted_bytes for e in self.phases.values()),
            reference_bytes=max(e.reference_bytes for e in self.phases.values()),
        )

    @property
    def worst(self) -> tuple[str, float]:
        """The phase with the largest relative error, and that error."""
        phase = max(self.phases, key=lambda name: abs(self.phases[name].relative))
        return phase, self.phases[phase].relative


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """The relative errors of one quantity over all cells."""

    num_cells: int
    num_equal: int
    """Cells that are equal to the byte."""
    median: float
    """The median of the absolute errors."""
    worst: float
    """The largest absolute error."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers and errors of many comparisons."""

    against: str
    num_cells: int
    num_failed: int
    """Cells in which the reference failed."""
    num_compared: int
    """Cells whose phases were compared."""
    num_equal: int
    """Cells in which every phase is equal to the byte."""
    peak: Spread | None
    """Errors of peak allocated."""
    phases: dict[str, Spread]
    """Errors of peak allocated by phase."""
    reserved: Spread | None
    num_fits: int
    """Cells for which predicted and measured fit are known."""
    num_fits_right: int


def compare_with_record(record: TrialRecord) -> MemoryComparison:
    """Compare a prediction with rank 0 of a measured trial."""
    label = f"{record.id} {cell_label(record.model, record.setup)}"
    memory = record.ranks[0].memory if record.ranks else None
    if record.outcome is not Outcome.OK and not record.outcome.is_oom:
        return MemoryComparison(label=label, error=f"the trial ended {record.outcome.value}")
    kernels = CPU_GLOO if record.hardware == "cpu" else CUDA
    try:
        if (why := why_eager(predictable_model(record), record.setup, kernels)) is not None:
            return MemoryComparison(label=label, error=f"compiled; the prediction is for eager: {why}")
        return (_on_cpu if record.hardware == "cpu" else _on_gpu)(record, memory, label)
    except (SpecError, MachineError) as error:
        return MemoryComparison(label=label, error=f"not predicted: {error}")


def kernels_of(record: TrialRecord) -> Kernels:
    """Return the kernels that a trial ran."""
    if record.hardware == "cpu":
        return CPU_EMULATED if record.device == "emulated" else CPU_GLOO
    gpu = gpu_by_product_name(record.ranks[0].device_name) if record.ranks else None
    return kernels_on(CUDA, gpu, flash_alone=_ran_flash_attention(record))


def _ran_flash_attention(record: TrialRecord) -> bool:
    """Whether torch ran FlashAttention where a newer one runs cuDNN's: as asked, as it chose, or by its version."""
    environment = record.ranks[0].environment if record.ranks else {}
    chosen = environment.get("attention", "")
    version = re.match(r"(\d+)\.(\d+)", environment.get("torch", ""))
    is_old = version is not None and (int(version[1]), int(version[2])) < FIRST_TORCH_WITH_CUDNN
    return record.run.attention == "flash" or chosen == "flash_attention" or (is_old and chosen != "cudnn_attention")


def _on_cpu(record: TrialRecord, memory: MemoryReading | None, label: str) -> MemoryComparison:
    kernels, budget = kernels_of(record), record.run.memory_limit_bytes
    predicted = predict_memory(SimulatedSteps(predictable_model(record), record.setup, kernels), rank=0)
    fits = budget is None or predicted.peak_allocated_bytes <= budget
    return MemoryComparison(
        label=label,
        phases=compare_phases(predicted.phases, memory.phases) if record.fits and memory else {},
        fit=Fit(predicted=fits, measured=record.fits) if budget is not None else None,
    )


def _on_gpu(record: TrialRecord, memory: MemoryReading | None, label: str) -> MemoryComparison:
    gpu = gpu_by_product_name(record.ranks[0].device_name) if record.ranks else None
    gpu_bytes = record.run.gpu_limit_bytes or (gpu.usable_memory_bytes if gpu else None)
    fits = None if gpu_bytes is None or record.outcome is Outcome.OOM_HOST else record.fits
    memory = memory if record.outcome is Outcome.OK else None
    kernels = replace(kernels_of(record), moves_model=True)
    found = compare_with_allocator(predictable_model(record), record.setup, label, memory, fits, kernels, gpu_bytes)
    return found if memory is None else msgspec.structs.replace(found, outside_bytes=_outside(record, memory))


def compare_with_allocator(
    model: Model,
    setup: TrainSetup,
    label: str,
    memory: MemoryReading | None,
    fits: bool | None,
    kernels: Kernels,
    gpu_bytes: int | None,
) -> MemoryComparison:
    """Compare a prediction with the statistics of PyTorch's CUDA allocator, which rank 0 read.

    ``memory`` is None if the trial did not end ok, ``fits`` if it is not known whether it fits.
    """
    steps = SimulatedSteps(model, setup, kernels)
    read = partial(read_allocator, steps, rank=0)
    reading = whole = read(gpu_bytes=gpu_bytes)
    predicted = reading.out_of_memory is None and reading.num_alloc_retries == 0
    fit = None if fits is None else Fit(predicted=predicted, measured=fits)
    if memory is None:
        return MemoryComparison(label=label, fit=fit)
    if reading.out_of_memory is not None:  # the trial ran all the same, with retries, which keep reserved memory low
        whole = read(gpu_bytes=None)
    predicted_phases = dict(whole.phases)
    if isinstance(model, RecordedModel):  # it is built in host memory and moved, and not filled on the GPU by shards
        predicted_phases.pop("load", None)
    return MemoryComparison(
        label=label,
        phases=compare_phases(predicted_phases, memory.phases),
        overall=_bytes(whole.peak_allocated_bytes, memory.peak_allocated_bytes),
        reserved=_bytes(whole.peak_reserved_bytes, memory.peak_reserved_bytes) if whole is reading else None,
        fit=fit,
    )


def _bytes(predicted: int, reference: int | None) -> Bytes | None:
    return Bytes(predicted_bytes=predicted, reference_bytes=reference) if reference else None


def _outside(record: TrialRecord, memory: MemoryReading) -> int | None:
    reserved, device = memory.peak_reserved_bytes, memory.peak_device_bytes
    was_first = all(rank.environment.get("trials_in_process", "1") == "1" for rank in record.ranks)
    return device - reserved if device and reserved and was_first and not memory.num_alloc_retries else None


def compare_phases(predicted: dict[str, int], reference: dict[str, int]) -> dict[str, Bytes]:
    """Pair the bytes of each phase that both have."""
    return {
        phase: Bytes(predicted_bytes=predicted[phase], reference_bytes=value)
        for phase, value in reference.items()
        if phase in predicted and value
    }


def summarize(comparisons: Sequence[MemoryComparison], against: str) -> Summary:
    """Summarize comparisons: numbers of cells, median and worst errors."""
    compared = [one for one in comparisons if one.phases]
    fits = [one.fit for one in comparisons if one.fit is not None]
    names = dict.fromkeys(phase for one in compared for phase in one.phases)
    phases = {name: _spread([one.phases[name] for one in compared if name in one.phases]) for name in names}
    return Summary(
        against=against,
        num_cells=len(comparisons),
        num_failed=sum(one.error is not None for one in comparisons),
        num_compared=len(compared),
        num_equal=sum(one.is_equal for one in compared),
        peak=_spread([one.peak for one in compared]),
        phases={name: spread for name, spread in phases.items() if spread is not None},
        reserved=_spread([one.reserved for one in comparisons if one.reserved is not None]),
        num_fits=len(fits),
        num_fits_right=sum(fit.predicted == fit.measured for fit in fits),
    )


def _spread(pairs: Sequence[Bytes]) -> Spread | None:
    if not pairs:
        return None
    errors = [abs(pair.relative) for pair in pairs]
    equal = sum(pair.predicted_bytes == pair.reference_bytes for pair in pairs)
    return Spread(num_cells=len(pairs), num_equal=equal, median=median(errors), worst=max(errors))


def worst_first(comparisons: Sequence[MemoryComparison], count: int) -> list[MemoryComparison]:
    """Return the cells that are not equal, the largest error first."""
    unequal = [one for one in comparisons if one.phases and not one.is_equal]
    return sorted(unequal, key=lambda c: -abs(c.worst[1]))[:count]


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """Peak allocated bytes of one model and setup, measured emulated and with all ranks."""

    label: str
    alone_bytes: int
    """Peak of rank 0 in the emulated trial."""
    among_peers_bytes: int
    """Peak of rank 0 in the trial with all ranks."""

    @property
    def relative(self) -> float:
        """``alone_bytes / among_peers_bytes - 1``."""
        return self.alone_bytes / self.among_peers_bytes - 1


def agreements(records: Sequence[TrialRecord]) -> list[Agreement]:
    """Pair each emulated trial with the trial with all ranks that has the same model, setup and device."""
    peers = {_key(record): record for record in _measured(records) if not record.alone}
    pairs = [(record, peers.get(_key(record))) for record in _measured(records) if record.device == "emulated"]
    return [
        Agreement(
            label=f"{alone.id} and {real.id} {cell_label(alone.model, alone.setup)}",
            alone_bytes=_peak(alone),
            among_peers_bytes=_peak(real),
        )
        for alone, real in pairs
        if real is not None
    ]


def _measured(records: Iterable[TrialRecord]) -> Iterable[TrialRecord]:
    return (record for record in records if record.outcome is Outcome.OK and _peak(record))


def _key(record: TrialRecord) -> bytes:
    torch = record.ranks[0].environment.get("torch", "unknown")
    model = msgspec.structs.replace(record.model, name="")
    return to_json((model, record.setup, record.hardware, record.ranks[0].device_name, torch))


def _peak(record: TrialRecord) -> int:
    memory = record.ranks[0].memory
    return (memory.peak_allocated_bytes or 0) if memory else 0
