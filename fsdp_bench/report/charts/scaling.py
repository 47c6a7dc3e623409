"""The scaling chart: predicted tokens per second per GPU over the number of nodes, one line per setup."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from fsdp_bench.plan.chart_data.scaling import ScalingCurve, scaling_curves
from fsdp_bench.plan.question import Question
from fsdp_bench.plan.speed import Speed
from fsdp_bench.report.charts.figure import legend, new_frame, value_axis
from fsdp_bench.report.text.setups import common_line, title, varying_fields
from fsdp_bench.report.text.speed import rests_on
from fsdp_bench.spec.errors import SpecError

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LINES: tuple[tuple[str, str, Literal["-", "--", "-.", ":"]], ...] = (
    ("#0072B2", "o", "-"), ("#E69F00", "s", "--"), ("#35AB85", "^", "-."), ("#D55E00", "D", ":"),
    ("#5B3A66", "v", "-"), ("#333333", "P", "--"), ("#CC79A7", "X", "-."), ("#8CCBF0", "*", ":"),
)  # fmt: skip
"""Colour, marker and dash pattern; the last two distinguish lines in black and white."""


def scaling_figure(questions: Sequence[Question]) -> Figure:
    """Return the chart of setups of one model on one kind of server.

    Raises:
        SpecError: for more setups than there are line styles, if no server is named, or if no time is known.
    """
    if len(questions) > len(LINES):
        raise SpecError(f"scaling: {len(questions)} setups are too many for one picture; at most {len(LINES)}")
    found = scaling_curves(questions)
    if not any(value is not None for curve in found for value in curve.tokens):
        raise SpecError("scaling: no step's time is known here: nobody documents this server's links")
    first = questions[0]
    hardware = first.hardware
    assert hardware is not None
    nodes = found[0].nodes
    conditions = [
        common_line(first.setup, varying_fields(questions)).partition(", ")[2],
        "the same batch on every GPU, so that the whole batch grows with the nodes",
        _memory_text(found),
        "predicted for eager, rank 0",
        *dict.fromkeys(f"bands: {one.range.because}" for curve in found for _, one in _ranged(curve) if one.range),
        *dict.fromkeys(f"rates: {rests_on(speed, first.profile)}" for speed in filter(None, found[0].speeds[-1:])),
    ]
    frame = new_frame(
        f"Speed of each GPU over the number of nodes (predicted): {nodes[0]} to {nodes[-1]} x {hardware.name}"
        f" ({hardware.gpus_per_node} x {hardware.gpu.name} each)",
        f"{first.model.name}: {first.model.describe()}",
        conditions,
    )
    _draw(frame.body.subplots(), found)
    legend(frame, _handles(found, questions), "outside right upper")
    return frame.figure


def _memory_text(found: Sequence[ScalingCurve]) -> str:
    """Return the condition about memory: which marks are setups that do not fit."""
    fits = {one for curve in found for one, value in zip(curve.fits, curve.tokens, strict=True) if value is not None}
    if fits == {None}:
        return "whether the memory suffices is unknown"
    return "white marks: predicted not to fit in memory" if False in fits else "all of it is predicted to fit in memory"


def _handles(found: Sequence[ScalingCurve], questions: Sequence[Question]) -> list[Artist]:
    """Return the legend's entries, sorted by speed on the most nodes, the fastest first."""
    from matplotlib.lines import Line2D

    names = [_label(curve, varying_fields(questions)) for curve in found]
    lines = [
        Line2D([], [], color=color, marker=marker, linestyle=dash, linewidth=2, markersize=8, label=name)
        for name, (color, marker, dash) in zip(names, LINES, strict=False)
    ]
    ends = [next((value for value in reversed(curve.tokens) if value is not None), 0.0) for curve in found]
    return [line for _, line in sorted(zip(ends, lines, strict=True), key=lambda pair: -pair[0])]


def _label(curve: ScalingCurve, varying: Sequence[str]) -> str:
    """Return a setup's name, its efficiency on the most nodes, and the number of nodes from which it fits."""
    known = [nodes for nodes, value in zip(curve.nodes, curve.tokens, strict=True) if value is not None]
    lines = [re.sub(r" \(\d+\)", "", title(curve.question, varying)).replace(", ", ",\n")]
    if curve.efficiency is not None:
        nodes = "1 node" if known[0] == 1 else f"{known[0]} nodes"
        lines.append(f"{curve.efficiency:.0%} of the speed on {nodes}")
    fitting = [nodes for nodes, fits in zip(curve.nodes, curve.fits, strict=True) if fits]
    if False in curve.fits:
        lines.append(f"fits from {fitting[0]} nodes" if fitting else "does not fit")
    return "\n".join(lines)


def _ranged(curve: ScalingCurve) -> list[tuple[int, Speed]]:
    """Return the numbers of nodes on which the speed is known, each with it."""
    pairs = zip(curve.nodes, curve.speeds, strict=True)
    return [(nodes, one) for nodes, one in pairs if one is not None and one.tokens_per_second_per_gpu is not None]


def _draw(axes: Axes, found: Sequence[ScalingCurve]) -> None:
    for curve, (color, marker, dash) in zip(found, LINES, strict=False):
        known = zip(curve.nodes, curve.tokens, curve.fits, strict=True)
        points = [(nodes, value, fits) for nodes, value, fits in known if value is not None]
        axes.plot([nodes for nodes, _, _ in points], [value for _, value, _ in points], color=color, linestyle=dash,
                  linewidth=2)  # fmt: skip
        bands = [(n, one.tokens_per_second_per_gpu or 0.0, one.range) for n, one in _ranged(curve) if one.range]
        axes.fill_between(
            [nodes for nodes, _, _ in bands],
            [value * span.slowest for _, value, span in bands],
            [value * span.fastest for _, value, span in bands],
            color=color, alpha=0.12, linewidth=0,
        )  # fmt: skip
        for nodes, value, fits in points:
            face = "white" if fits is False else color
            axes.plot(nodes, value, color=color, marker=marker, markersize=9, markerfacecolor=face, markeredgewidth=1.8)
    highest = max(value for curve in found for value in curve.tokens if value is not None)
    counts = found[0].nodes
    value_axis(axes)
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    axes.set_ylim(0, highest * 1.1)
    axes.set_xlabel("nodes", fontsize=12)
    axes.set_ylabel("predicted tokens/s per GPU", fontsize=12)
