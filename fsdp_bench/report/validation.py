"""Prints how far predictions are from a reference."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_bench.spec.units import format_gib
from fsdp_bench.sweep.validation import Comparison, Summary, worst_first

WORST_SHOWN = 10


def format_validation(comparisons: Sequence[Comparison], summary: Summary) -> str:
    """Return the summary, the error by phase, and the worst cells by name."""
    lines = [
        f"predicted against {summary.against}: {summary.num_cells} cells, {summary.num_failed} without a reference",
        f"  peak allocated equal to the byte   {_share(summary.num_peaks_equal, summary)}",
        f"  every phase equal to the byte      {_share(summary.num_equal, summary)}",
        f"  largest error of a peak            {summary.worst_peak_error:.3%}",
        f"  largest error of a phase           {summary.worst_phase_error:.3%}",
        "",
        f"  {'phase':<12}{'equal':>16}{'largest error':>18}",
    ]
    for phase, equal in summary.phases_equal.items():
        worst = max(abs(c.phases[phase].relative) for c in comparisons if phase in c.phases)
        lines.append(f"  {phase:<12}{_share(equal, summary):>16}{worst:>18.4%}")
    unequal = worst_first(comparisons, WORST_SHOWN)
    if unequal:
        lines += ["", f"the {len(unequal)} worst cells:"]
    for comparison in unequal:
        phase, error = comparison.worst
        reading = comparison.phases[phase]
        lines.append(
            f"  {error:+.4%} in {phase}: predicted {format_gib(reading.predicted_bytes)}, "
            f"reference {format_gib(reading.reference_bytes)}"
            f" ({reading.predicted_bytes - reading.reference_bytes:+d} bytes): {comparison.label}"
        )
    failed = [comparison for comparison in comparisons if comparison.error is not None]
    lines += [f"  no reference: {comparison.error}: {comparison.label}" for comparison in failed[:WORST_SHOWN]]
    return "\n".join(lines)


def _share(count: int, summary: Summary) -> str:
    compared = summary.num_cells - summary.num_failed
    return f"{count} of {compared} ({count / compared:.1%})" if compared else "none compared"
