"""What a step's time consists of, as a bar whose parts add up to the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fsdp_bench.replay.schedule import StepTime
from fsdp_bench.replay.step_parts import StepPart
from fsdp_bench.report.charts.figure import FAILURE, SMALL
from fsdp_bench.report.text.speed import PART_LABELS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PARTS_HEIGHT = 0.28
"""Height of the bars, by the height of one panel of streams."""
_COLORS = {  # greys for operators; the others as in the panels below
    StepPart.MATRIX_PRODUCTS: "#4A4A4A",
    StepPart.ATTENTION: "#9C9C9C",
    StepPart.OTHER_OPERATORS: "#D0D0D0",
    StepPart.OPTIMIZER: "#E69F00",
    StepPart.EXPOSED_COMMUNICATION: FAILURE,
    StepPart.EXPOSED_COPIES: "#F0E442",
    StepPart.CPU_OPTIMIZER: "#F5C977",
    StepPart.WAITING_FOR_HOST: "#FFFFFF",
}
_LABELLED = 0.06
"""Narrower parts, by the longest step, have no room for their name and are named at the end of the bar."""
_CHARACTERS = 170
"""Characters of a label along the whole width."""


def draw_parts(axes: Axes, steps: Sequence[tuple[str, StepTime]]) -> None:
    """Draw a bar for each step, the parts in the order of PART_LABELS, with their names where they fit."""
    longest = max(time.step_seconds or 0.0 for _, time in steps)
    for place, (_, time) in enumerate(reversed(steps)):
        begin, rest = 0.0, []
        for name, label in PART_LABELS.items():
            part = StepPart(name)
            seconds = time.parts.get(part, 0.0)
            if seconds <= 0:
                continue
            axes.barh(place, seconds, left=begin, height=0.5, color=_COLORS[part], edgecolor="#666666", linewidth=0.6)
            text = f"{label} {seconds / (time.step_seconds or 1.0):.0%}"
            if seconds > longest * max(_LABELLED, len(text) / _CHARACTERS):
                color = "white" if part in (StepPart.MATRIX_PRODUCTS, StepPart.EXPOSED_COMMUNICATION) else "black"
                axes.text(begin + seconds / 2, place, text, ha="center", va="center", fontsize=SMALL - 1, color=color)
            elif seconds > 0.005 * longest:
                rest.append(text)
            begin += seconds
        if rest:
            axes.text(0.0, place - 0.27, f"too narrow for names: {', '.join(rest)}", va="top", fontsize=SMALL - 2)
    axes.set_xlim(0.0, longest)
    axes.set_ylim(-0.95, len(steps) - 0.5)
    axes.set_yticks(range(len(steps)), [title for title, _ in reversed(steps)], fontsize=SMALL - 1)
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title("what the step consists of", fontsize=12, loc="left")
