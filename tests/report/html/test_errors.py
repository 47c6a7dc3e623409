"""Predictions beside what was measured, as a page draws them."""

from __future__ import annotations

from fsdp_bench.report.html.errors import against
from fsdp_bench.spec.units import format_seconds


def test_step_times_are_drawn_in_the_unit_of_their_axis() -> None:
    """Steps of 10 and 20 milliseconds lie between ticks of 0 and 20 to 30."""
    plot = against("", [(1, 0.010, 0.012), (2, 0.020, 0.018)], "measured", (1e-3, "ms"), format_seconds)
    assert "ms" in plot.x.title
    labels = [float(tick.text) for tick in plot.x.ticks()]
    assert 20 <= max(labels) <= 30
