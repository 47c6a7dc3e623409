"""Prints how far predicted steps are from measured ones."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_bench.spec.units import format_seconds
from fsdp_bench.sweep.time_validation import TimeComparison, TimeSummary

WORST_SHOWN = 10


def format_time(comparisons: Sequence[TimeComparison], summary: TimeSummary, source: str) -> str:
    """Return the summary, and the worst trials by name."""
    if not summary.num_trials:
        reasons = dict.fromkeys(one.reason for one in comparisons if one.reason)
        return f"time is not compared: {'; '.join(str(reason) for reason in reasons) or 'no trials'}"
    assert summary.median_error is not None
    assert summary.median_bias is not None
    exposed = summary.num_exposed
    lines = [
        f"predicted against measured time: {summary.num_trials} trials; {source}",
        f"  step, median |error|                          {summary.median_error:.1%} (median error"
        f" {summary.median_bias:+.1%}; within 15 %: {summary.num_within} of {summary.num_trials})",
        "  exposed communication within 20 % or 5 % of the step",
        f"    of the step less one without communication  {summary.num_exposed_near_difference} of {exposed}",
        f"    of the profiler's                           {summary.num_exposed_near_profiler} of {exposed}",
        f"    of either                                   {summary.num_exposed_near_either} of {exposed}",
        f"  strategies in their measured order            {summary.num_pairs_in_order} of {summary.num_pairs} pairs"
        " whose steps do not overlap",
    ]
    worst = sorted((one for one in comparisons if one.error is not None), key=lambda one: -abs(one.error or 0.0))
    lines += ["", f"the {min(len(worst), WORST_SHOWN)} worst steps:"]
    lines += [_line(one) for one in worst[:WORST_SHOWN]]
    return "\n".join(lines)


def _line(one: TimeComparison) -> str:
    assert one.predicted_seconds is not None
    assert one.measured_seconds is not None
    return (
        f"  {one.error:+.1%}: predicted {format_seconds(one.predicted_seconds)},"
        f" measured {format_seconds(one.measured_seconds)}: {one.label}"
    )
