"""Predictions compared with results: memory and step time as text, and both as the Markdown page beside the results."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from fsdp_bench.report.table import Column, table_columns, table_lines
from fsdp_bench.report.text.common import UNKNOWN
from fsdp_bench.report.text.conditions import Fact
from fsdp_bench.report.text.speed import measured_rates
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.spec.units import format_gib, format_seconds
from fsdp_bench.validate.memory import Agreement, Bytes, MemoryComparison, Summary, worst_first
from fsdp_bench.validate.results import ResultsValidation
from fsdp_bench.validate.step_time import SpeedOrder, TimeComparison, TimeSummary

WORST_SHOWN, WORST_ON_PAGE = 10, 20
HEADERS = ("", "equal to the byte", "median |error|", "largest")


def format_validation(comparisons: Sequence[MemoryComparison], summary: Summary, most: int = WORST_SHOWN) -> str:
    """Return the summary, the errors by phase and the worst cells."""
    num_oom = summary.num_cells - summary.num_compared - summary.num_failed
    lines = [
        f"predicted against {summary.against}: {summary.num_cells} cells"
        + (f", {num_oom} of them out of memory" if num_oom else "")
        + f", {summary.num_failed} without a reference",
        f"  every phase equal to the byte      {_count_of(summary.num_equal, summary.num_compared)}",
    ]
    if summary.num_fits:
        lines.append(f"  fits or not, predicted correctly   {_count_of(summary.num_fits_right, summary.num_fits)}")
    lines += ["", *table_lines(error_columns(summary), indent=2)]
    if (outside := _outside_line(comparisons)) is not None:
        lines += ["", f"  {outside}"]
    unequal = worst_first(comparisons, most)
    if unequal:
        lines += ["", f"the {len(unequal)} worst cells:"]
    for one in unequal:
        phase, _error = one.worst
        lines.append(f"  {_difference(one.phases[phase], f' in {phase}')}: {one.label}")
    reserved = [(one.reserved, one.label) for one in comparisons if one.reserved is not None and one.reserved.relative]
    if reserved:
        lines += ["", "reserved memory differs in:"]
        reserved.sort(key=lambda pair: -abs(pair[0].relative))
    lines += [f"  {_difference(pair)}: {label}" for pair, label in reserved[:WORST_SHOWN]]
    lines += [  # cells whose reserved memory alone was not compared, among cells in which it was
        f"  reserved not compared, ran with retries, predicted out of memory: {one.label}"
        for one in comparisons
        if one.phases and one.reserved is None and any(other.reserved is not None for other in comparisons)
    ]
    lines += [f"  wrong: {line}" for line in _wrong_fits(comparisons)[:WORST_SHOWN]]
    failed = [comparison for comparison in comparisons if comparison.error is not None]
    lines += [f"  no reference: {comparison.error}: {comparison.label}" for comparison in failed[:WORST_SHOWN]]
    return "\n".join(lines)


def error_columns(summary: Summary) -> list[Column]:
    """Return the errors of peaks and of each phase as a table."""
    found = {"peak allocated": summary.peak, "peak reserved": summary.reserved}
    found |= {f"in {phase}": spread for phase, spread in summary.phases.items()}
    rows = [
        (name, f"{spread.num_equal} of {spread.num_cells}", f"{spread.median:.3%}", f"{spread.worst:.3%}")
        for name, spread in found.items()
        if spread is not None
    ]
    return table_columns(HEADERS, rows, HEADERS[1:])


def _difference(pair: Bytes, where: str = "") -> str:
    return (
        f"{pair.relative:+.4%}{where}: predicted {format_gib(pair.predicted_bytes)}, "
        f"reference {format_gib(pair.reference_bytes)} ({pair.predicted_bytes - pair.reference_bytes:+d} bytes)"
    )


def _wrong_fits(comparisons: Sequence[MemoryComparison]) -> list[str]:
    texts = {True: "fits", False: "does not fit"}
    return [
        f"predicted {texts[one.fit.predicted]}, measured {texts[one.fit.measured]}: {one.label}"
        for one in comparisons
        if one.fit is not None and one.fit.predicted != one.fit.measured
    ]


def _outside_line(comparisons: Sequence[MemoryComparison]) -> str | None:
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


def _count_of(count: int, whole: int) -> str:
    """Return ``9 of 10 (90.0%)``."""
    return f"{count} of {whole} ({count / whole:.1%})" if whole else "none compared"


def format_time(
    comparisons: Sequence[TimeComparison], summary: TimeSummary, source: str, most: int = WORST_SHOWN
) -> str:
    """Return the summary and the worst trials."""
    if not summary.num_trials:
        return f"time is not compared: {'; '.join(summary.not_compared) or 'no trials'}"
    lines = [f"predicted against measured time: {summary.num_trials} trials; rates {source}"]
    lines += [f"  {name:<46}{value}" for name, value in time_facts(summary)]
    known = ((error, one) for one in comparisons if (error := one.error) is not None)
    worst = sorted(known, key=lambda pair: -abs(pair[0]))[:most]
    lines += ["", f"the {len(worst)} worst steps:"]
    lines += [
        f"  {error:+.1%}: predicted {format_seconds(one.predicted_seconds or 0.0)},"
        f" measured {format_seconds(one.measured_seconds or 0.0)}: {one.label}"
        for error, one in worst
    ]
    return "\n".join(lines)


def time_facts(found: TimeSummary) -> list[Fact]:
    """Return how far predicted times are off."""
    within = f"{found.num_within} of {found.num_trials}"
    by_difference = found.median_exposed_error_by_difference, found.num_with_exposed_by_difference
    by_profiler = found.median_exposed_error_by_profiler, found.num_with_exposed_by_profiler
    near = found.num_exposed_near_difference, found.num_exposed_near_profiler
    near_difference, near_profiler = (f"{count} of {found.num_exposed}" for count in near)
    reasons = "; ".join(f"{count}: {reason}" for reason, count in found.not_compared.items())
    return [
        ("step", f"median error {found.median_error:.1%} (signed {found.median_bias:+.1%}; within 15 %: {within})"),
        ("exposed, by the step without communication", _exposed(*by_difference, near_difference)),
        ("exposed, by the profiler", _exposed(*by_profiler, near_profiler)),
        ("exposed, near either of the two", _count_of(found.num_exposed_near_either, found.num_exposed)),
        ("pairs of strategies in their measured order", _order(found.strategies)),
        ("fsdp1 and fsdp2 in their measured order", _order(found.apis)),
        *([("trials that are not compared", reasons)] if reasons else []),
    ]


def _exposed(median_error: float | None, num_trials: int, near: str) -> str:
    error = UNKNOWN if median_error is None else f"{median_error:.1%} of {num_trials} trials with any"
    return f"median error {error} (within 20 % or 5 % of the step: {near})"


def _order(order: SpeedOrder) -> str:
    return f"{_count_of(order.num_in_order, order.num_pairs)}, where no measured steps overlap"


def rates_text(found: ResultsValidation) -> str:
    """Return the source of the rates of predicted times."""
    return "of datasheets" if found.profile is None else measured_rates(found.profile)


def validation_page(found: ResultsValidation, calibration: Path | None = None) -> str:
    """Return the page, in Markdown. The file of the calibration that predicted times stands in its last line."""
    calibrated = "" if calibration is None else f" --calibration {calibration}"
    memory = format_validation(found.comparisons, found.summary, WORST_ON_PAGE)
    times = format_time(found.times, found.time_summary, rates_text(found), WORST_ON_PAGE)
    blocks = [
        f"# Predicted against {found.summary.against.split(' in ')[0]}",
        "\n".join(f"- {name}: {value}" for name, value in _conditions(found.records)),
        f"## Memory\n\n```\n{memory}\n```",
        *([line] if (line := agreement_line(found.agreements)) else []),
        f"## Step time\n\n```\n{times}\n```",
        f"Written by `fsdp-bench validate --against {found.folder}{calibrated} --page FILE`.",
    ]
    return "\n\n".join(blocks) + "\n"


def _conditions(records: Sequence[TrialRecord]) -> list[tuple[str, str]]:
    ranks = [record.ranks[0] for record in records if record.ranks]
    kinds = (f"{one.device} on {one.hardware}" if one.emulated_on else one.device for one in records)
    days = sorted(record.started_at[:10] for record in records)
    facts = {
        "trials": [str(len(records))],
        "ran on": kinds,
        "device": [rank.device_name for rank in ranks] or [UNKNOWN],
        "torch": [rank.environment.get("torch", UNKNOWN) for rank in ranks] or [UNKNOWN],
        "attention": filter(None, (rank.environment.get("attention") for rank in ranks)),
        "sweeps": [record.sweep for record in records],
    }
    shown = [(name, ", ".join(dict.fromkeys(values))) for name, values in facts.items()]
    measured = ("measured", " to ".join(dict.fromkeys((days[0], days[-1]))))
    return [(name, value) for name, value in (*shown, measured) if value]
