"""Predicted and measured step times as text: a summary and the worst trials."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_bench.report.text.common import UNKNOWN
from fsdp_bench.report.validation.memory import count_of
from fsdp_bench.spec.units import format_seconds
from fsdp_bench.validate.step_time import SpeedOrder, TimeComparison, TimeSummary

WORST_SHOWN = 10


def format_time(comparisons: Sequence[TimeComparison], summary: TimeSummary, source: str) -> str:
    """Return the summary and the worst trials."""
    if not summary.num_trials:
        reasons = dict.fromkeys(one.reason for one in comparisons if one.reason)
        return f"time is not compared: {'; '.join(str(reason) for reason in reasons) or 'no trials'}"
    lines = [f"predicted against measured time: {summary.num_trials} trials; rates {source}"]
    lines += [f"  {name:<46}{value}" for name, value in time_terms(summary)]
    worst = sorted((one for one in comparisons if one.error is not None), key=lambda one: -abs(one.error or 0.0))
    lines += ["", f"the {min(len(worst), WORST_SHOWN)} worst steps:"]
    lines += [_line(one) for one in worst[:WORST_SHOWN]]
    return "\n".join(lines)


def time_terms(summary: TimeSummary) -> list[tuple[str, str]]:
    """Return the compared quantities by name, each with its error as text."""
    within = f"{summary.num_within} of {summary.num_trials}"
    near_either = count_of(summary.num_exposed_near_either, summary.num_exposed)
    by_difference = _exposed(
        summary.median_exposed_error_by_difference,
        summary.num_with_exposed_by_difference,
        f"{summary.num_exposed_near_difference} of {summary.num_exposed}",
    )
    by_profiler = _exposed(
        summary.median_exposed_error_by_profiler,
        summary.num_with_exposed_by_profiler,
        f"{summary.num_exposed_near_profiler} of {summary.num_exposed}",
    )
    return [
        ("step", f"median error {summary.median_error:.1%} (signed {summary.median_bias:+.1%}; within 15 %: {within})"),
        ("exposed, by the step without communication", by_difference),
        ("exposed, by the profiler", by_profiler),
        ("exposed, near either of the two", near_either),
        ("pairs of strategies in their measured order", _order(summary.strategies)),
        ("fsdp1 and fsdp2 in their measured order", _order(summary.apis)),
    ]


def _exposed(median_error: float | None, num_trials: int, near: str) -> str:
    error = UNKNOWN if median_error is None else f"{median_error:.1%} of {num_trials} trials with any"
    return f"median error {error} (within 20 % or 5 % of the step: {near})"


def _order(order: SpeedOrder) -> str:
    return f"{count_of(order.num_in_order, order.num_pairs)}, where no measured steps overlap"


def _line(one: TimeComparison) -> str:
    assert one.predicted_seconds is not None
    assert one.measured_seconds is not None
    return (
        f"  {one.error:+.1%}: predicted {format_seconds(one.predicted_seconds)},"
        f" measured {format_seconds(one.measured_seconds)}: {one.label}"
    )
