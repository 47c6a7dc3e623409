"""Predicted memory compared with a reference, as text: a summary, the errors by phase and the worst cells."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from fsdp_bench.report.table import table_columns, table_lines
from fsdp_bench.spec.units import format_gib
from fsdp_bench.validate.emulation import Agreement
from fsdp_bench.validate.memory import Bytes, MemoryComparison, Spread, Summary, worst_first

WORST_SHOWN = 10
HEADERS = ("", "equal to the byte", "median |error|", "largest")


def format_validation(comparisons: Sequence[MemoryComparison], summary: Summary) -> str:
    """Return the summary, the errors by phase and the worst cells."""
    num_oom = summary.num_cells - summary.num_compared - summary.num_failed
    lines = [
        f"predicted against {summary.against}: {summary.num_cells} cells"
        + (f", {num_oom} of them out of memory" if num_oom else "")
        + f", {summary.num_failed} without a reference",
        f"  every phase equal to the byte      {count_of(summary.num_equal, summary.num_compared)}",
    ]
    if summary.num_fits:
        lines.append(f"  fits or not, predicted correctly   {count_of(summary.num_fits_right, summary.num_fits)}")
    rows = [
        (name, f"{spread.num_equal} of {spread.num_cells}", f"{spread.median:.3%}", f"{spread.worst:.3%}")
        for name, spread in terms(summary)
    ]
    lines += ["", *table_lines(table_columns(HEADERS, rows, HEADERS[1:]), indent=2)]
    if (outside := outside_line(comparisons)) is not None:
        lines += ["", f"  {outside}"]
    unequal = worst_first(comparisons, WORST_SHOWN)
    if unequal:
        lines += ["", f"the {len(unequal)} worst cells:"]
    lines += [f"  {cell_line(comparison)}" for comparison in unequal]
    reserved = [(one.reserved, one.label) for one in comparisons if one.reserved is not None and one.reserved.relative]
    if reserved:
        lines += ["", "reserved memory differs in:"]
        reserved.sort(key=lambda pair: -abs(pair[0].relative))
    lines += [f"  {difference(pair)}: {label}" for pair, label in reserved[:WORST_SHOWN]]
    lines += [
        f"  reserved not compared, ran with retries, predicted out of memory: {one.label}"
        for one in _retried(comparisons)
    ]
    lines += [f"  wrong: {line}" for line in wrong_fits(comparisons)[:WORST_SHOWN]]
    failed = [comparison for comparison in comparisons if comparison.error is not None]
    lines += [f"  no reference: {comparison.error}: {comparison.label}" for comparison in failed[:WORST_SHOWN]]
    return "\n".join(lines)


def _retried(comparisons: Sequence[MemoryComparison]) -> list[MemoryComparison]:
    """Return the cells whose reserved memory alone was not compared, among cells in which it was."""
    any_reserved = any(one.reserved is not None for one in comparisons)
    return [one for one in comparisons if any_reserved and one.phases and one.reserved is None]


def terms(summary: Summary) -> list[tuple[str, Spread]]:
    """Return the errors by name: peak allocated, peak reserved, then each phase."""
    found = [("peak allocated", summary.peak), ("peak reserved", summary.reserved)]
    phases = [(f"in {phase}", spread) for phase, spread in summary.phases.items()]
    return [(name, spread) for name, spread in found if spread is not None] + phases


def cell_line(comparison: MemoryComparison) -> str:
    """Return the worst phase of a cell: its error, the predicted and the reference size, and the cell's label."""
    phase, _error = comparison.worst
    return f"{difference(comparison.phases[phase], f' in {phase}')}: {comparison.label}"


def difference(pair: Bytes, where: str = "") -> str:
    """Return the relative error, both sizes and their difference in bytes."""
    return (
        f"{pair.relative:+.4%}{where}: predicted {format_gib(pair.predicted_bytes)}, "
        f"reference {format_gib(pair.reference_bytes)} ({pair.predicted_bytes - pair.reference_bytes:+d} bytes)"
    )


def wrong_fits(comparisons: Sequence[MemoryComparison]) -> list[str]:
    """Return a line for each cell whose predicted and measured fit differ."""
    texts = {True: "fits", False: "does not fit"}
    return [
        f"predicted {texts[one.fit.predicted]}, measured {texts[one.fit.measured]}: {one.label}"
        for one in comparisons
        if one.fit is not None and one.fit.predicted != one.fit.measured
    ]


def outside_line(comparisons: Sequence[MemoryComparison]) -> str | None:
    """Return the memory outside the caching allocator that NVML measured; None if no trial measured it."""
    found = sorted(one.outside_bytes for one in comparisons if one.outside_bytes is not None)
    if not found:
        return None
    low, middle, high = (format_gib(value) for value in (found[0], int(median(found)), found[-1]))
    return (
        f"measured outside of the caching allocator (CUDA context; NCCL where ranks are real): {low} to {high}, "
        f"median {middle}, {len(found)} trials"
    )


def agreement_line(found: Sequence[Agreement]) -> str | None:
    """Return the difference in peak allocated between emulated and real ranks; None if no pair was measured."""
    if not found:
        return None
    errors = [abs(one.relative) for one in found]
    worst = max(found, key=lambda one: abs(one.relative))
    return (
        f"emulated rank 0 against real ranks, peak allocated: {len(found)} pairs, median |difference| "
        f"{median(errors):.3%}, largest {worst.relative:+.3%} ({worst.label})"
    )


def count_of(count: int, whole: int) -> str:
    """Return ``9 of 10 (90.0%)``."""
    return f"{count} of {whole} ({count / whole:.1%})" if whole else "none compared"
