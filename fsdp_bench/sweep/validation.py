"""Predicted against dry-run and against measured, cell by cell and phase by phase."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

import msgspec

from fsdp_bench.predict.estimate import predict_memory
from fsdp_bench.predict.kernels import CPU, CPU_EMULATED, CPU_GLOO, CUDA, CUDA_OBSERVED, Kernels
from fsdp_bench.spec.dry_run import DryRunAnswer, KernelSet
from fsdp_bench.spec.record import Outcome, TrialRecord
from fsdp_bench.sweep.drawn_cells import Cell

DRY_RUN_KERNELS: dict[KernelSet, Kernels] = {"cpu": CPU, "cuda": CUDA_OBSERVED}
"""What a dry run shows of each kernel set."""


class PhaseError(msgspec.Struct, frozen=True, kw_only=True):
    """One phase of one cell."""

    predicted_bytes: int
    reference_bytes: int

    @property
    def relative(self) -> float:
        """Predicted over reference, less one."""
        return self.predicted_bytes / self.reference_bytes - 1


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One cell: its phases, or why there is nothing to compare."""

    label: str
    phases: dict[str, PhaseError] = {}
    error: str | None = None

    @property
    def is_equal(self) -> bool:
        """Whether every phase is equal to the byte."""
        return self.error is None and all(e.predicted_bytes == e.reference_bytes for e in self.phases.values())

    @property
    def peak(self) -> PhaseError:
        """The peak over all phases."""
        return PhaseError(
            predicted_bytes=max(e.predicted_bytes for e in self.phases.values()),
            reference_bytes=max(e.reference_bytes for e in self.phases.values()),
        )

    @property
    def worst(self) -> tuple[str, float]:
        """The phase with the largest relative error, and that error."""
        phase = max(self.phases, key=lambda name: abs(self.phases[name].relative))
        return phase, self.phases[phase].relative


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What a table of comparisons amounts to."""

    against: str
    num_cells: int
    num_failed: int
    """Cells in which the reference failed."""
    num_equal: int
    """Cells in which every phase is equal to the byte."""
    num_peaks_equal: int
    worst_peak_error: float
    worst_phase_error: float
    median_phase_error: float
    phases_equal: dict[str, int]
    """By phase: in how many cells it is equal to the byte."""


def compare_with_dry_run(cell: Cell, answer: DryRunAnswer, kernels: KernelSet) -> Comparison:
    """Predict a cell and set it beside its dry run."""
    if answer.reading is None:
        return Comparison(label=cell.label, error=answer.error or "no answer")
    predicted = predict_memory(cell.model, cell.setup, DRY_RUN_KERNELS[kernels])
    return Comparison(label=cell.label, phases=_phases(predicted.phases, answer.reading.phases))


def compare_with_record(record: TrialRecord) -> Comparison:
    """Predict a measured trial and set it beside rank 0's reading."""
    cell = Cell(model=record.model, setup=record.setup)
    label = f"{record.id} {cell.label}"
    memory = record.ranks[0].memory if record.ranks else None
    if record.outcome is not Outcome.OK or memory is None:
        return Comparison(label=label, error=f"the trial ended {record.outcome.value}")
    if record.setup.compiles:
        return Comparison(label=label, error="compiled code; the prediction is for eager")
    on_cpu = CPU_EMULATED if record.device == "emulated" else CPU_GLOO
    predicted = predict_memory(record.model, record.setup, on_cpu if record.hardware == "cpu" else CUDA)
    return Comparison(label=label, phases=_phases(predicted.phases, memory.phases))


def _phases(predicted: dict[str, int], reference: dict[str, int]) -> dict[str, PhaseError]:
    return {
        phase: PhaseError(predicted_bytes=predicted[phase], reference_bytes=value)
        for phase, value in reference.items()
        if phase in predicted and value
    }


def summarize(comparisons: Sequence[Comparison], against: str) -> Summary:
    """Count, and find the worst."""
    done = [comparison for comparison in comparisons if comparison.error is None]
    errors = [abs(error.relative) for comparison in done for error in comparison.phases.values()]
    return Summary(
        against=against,
        num_cells=len(comparisons),
        num_failed=len(comparisons) - len(done),
        num_equal=sum(comparison.is_equal for comparison in done),
        num_peaks_equal=sum(c.peak.predicted_bytes == c.peak.reference_bytes for c in done),
        worst_peak_error=max((abs(c.peak.relative) for c in done), default=0.0),
        worst_phase_error=max(errors, default=0.0),
        median_phase_error=median(errors) if errors else 0.0,
        phases_equal=_equal_by_phase(done),
    )


def _equal_by_phase(comparisons: Iterable[Comparison]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for comparison in comparisons:
        for phase, error in comparison.phases.items():
            counts[phase] = counts.get(phase, 0) + (error.predicted_bytes == error.reference_bytes)
    return counts


def worst_first(comparisons: Sequence[Comparison], count: int) -> list[Comparison]:
    """Return the cells that are not equal, the largest error first."""
    unequal = [c for c in comparisons if c.error is None and not c.is_equal]
    return sorted(unequal, key=lambda c: -abs(c.worst[1]))[:count]
