"""Draws bars with matplotlib: one panel for each group, one row of panels for each chart, all on one scale."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fsdp_bench.report.charts.description import Bar, BarGroup, Bars
from fsdp_bench.report.charts.slide import SMALL, TEXT, WIDTH, ink, value_axis

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure


def draw_bars(body: SubFigure, rows: Sequence[Bars]) -> None:
    """Draw rows of bars; all have the same groups and labels in the same order."""
    first = rows[0]
    axes = _panels(body, first, len(rows))
    words = [bar.words for row in rows for group in row.groups for bar in group.bars if bar.is_result or bar.pieces]
    num_bars = sum(len(group.bars) for group in first.groups)
    upright = max((len(line) for lines in words for line in lines), default=0) * 11.5 > (WIDTH - 150) / num_bars
    for row, panels in zip(rows, axes, strict=True):
        for group, one in zip(row.groups, panels, strict=True):
            _draw_group(one, group, first.scale, upright)
        panels[0].set_ylabel(row.title, fontsize=12)
    body.supylabel(first.axis, fontsize=12)
    _leave_space_for_words(body, axes[0, 0], max(row.highest for row in rows) / first.scale, words, upright)


def _panels(body: SubFigure, chart: Bars, rows: int) -> np.ndarray:
    """Return axes: one column for each group, all with the same scale, and labels below the last row."""
    count = sum(len(group.bars) for group in chart.groups)
    widths = [max(len(group.bars), 0.1 * count) for group in chart.groups]
    pixels = (WIDTH - 150) / sum(widths)
    axes = body.subplots(rows, len(chart.groups), sharey=True, squeeze=False, width_ratios=widths)
    for column, (group, width) in enumerate(zip(chart.groups, widths, strict=True)):
        axes[0, column].set_title(_broken(group.title, width * pixels / 11.5), fontsize=TEXT + 1, weight="bold")
        for one in axes[:, column]:
            value_axis(one)
            one.tick_params(labelleft=column == 0)
            one.set_xlim(-0.6, len(group.bars) - 0.4)
            one.set_xticks([])
        text, is_upright = _labels([bar.labels for bar in group.bars], pixels)
        rotated = {"rotation": 90, "multialignment": "right"} if is_upright else {}
        axes[-1, column].set_xticks(range(len(text)), text, fontsize=SMALL, **rotated)
    if any(chart.levels):
        under = f"under each bar: {', '.join(chart.levels)}"
        body.supxlabel(under, fontsize=SMALL, color=ink("faint"), style="italic")
    return axes


def _labels(labels: Sequence[tuple[str, ...]], pixels: float) -> tuple[list[str], bool]:
    """Return the text below each bar, and whether the texts are vertical because a bar is narrower than its label."""
    lines = [[_broken(word, 12, "-") for word in words if word] for words in labels]
    longest = max((len(line) for words in lines for word in words for line in word.split("\n")), default=0)
    if longest * 9.5 <= pixels:
        return ["\n".join(words) for words in lines], False
    most = max(map(len, labels), default=0)
    return [("\n" if most * 25 <= pixels else " · ").join(filter(None, words)) for words in labels], True


def _broken(text: str, characters: float, mark: str = "_") -> str:
    """Break a name after ``mark`` or a blank into lines of at most ``characters`` characters, where possible."""
    lines = [""]
    for part in re.split(rf"(?<={mark})(?=\w)|(?<=\n)|(?<= )", text):
        if lines[-1] and len((lines[-1] + part).strip()) > characters:
            lines.append("")
        lines[-1] += part
        if part.endswith("\n"):
            lines[-1] = lines[-1].rstrip("\n")
            lines.append("")
    return "\n".join(line.rstrip() for line in lines if line)


def _draw_group(axes: Axes, group: BarGroup, scale: float, upright: bool) -> None:
    """Draw the bars of one panel, each with its words above it."""
    width = 0.8 if len(group.bars) > 1 else 0.5
    for place, bar in enumerate(group.bars):
        _draw_bar(axes, place, bar, scale, width)
        is_upright = upright or any(not other.pieces for other in group.bars)
        foot = (bar.spread[1] if bar.spread else bar.total) / scale
        text = axes.annotate(
            (" · " if is_upright else "\n").join(bar.words),
            (place, foot),
            (0, 11 if any(other.mark for other in group.bars) else 4),
            textcoords="offset points",
            rotation=90 if is_upright else 0,
            fontsize=TEXT,
            color=ink(bar.color),
            fontweight="bold" if bar.color == "failure" else "normal",
            ha="center",
            va="bottom",
            zorder=5,
            parse_math=False,
        )
        text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})


def _draw_bar(axes: Axes, place: int, bar: Bar, scale: float, width: float) -> None:
    foot = 0.0
    edge = ink("ink" if bar.is_result else "failure")
    for piece in bar.pieces:
        axes.bar(place, piece.size / scale, width, foot, color=ink(piece.style.color), hatch=piece.style.hatch,
                 linewidth=0.9, edgecolor=edge, zorder=2)  # fmt: skip
        foot += piece.size / scale
    if bar.outline is not None:
        axes.bar(place, bar.outline / scale, width, facecolor="none", edgecolor="#666666", linestyle=(0, (3, 2)),
                 linewidth=1.1, zorder=1.5)  # fmt: skip
    if bar.spread is not None:
        axes.vlines(place, bar.spread[0] / scale, bar.spread[1] / scale, color="black", linewidth=1.8, zorder=3)
    if bar.mark is not None:
        axes.plot([place], [bar.mark / scale], marker="D", markersize=9.0, markerfacecolor="white", zorder=4,
                  markeredgecolor="black", markeredgewidth=1.8, linestyle="none")  # fmt: skip


def _leave_space_for_words(
    body: SubFigure, axes: Axes, highest: float, words: Sequence[Sequence[str]], upright: bool
) -> None:
    """Set the vertical axis from zero to where the words fit above the highest bar."""
    body.figure.draw_without_rendering()  # lays the figure out, which sets the height of the axes
    lengths = [len(" · ".join(lines)) * 10.5 if upright else len(lines) * 21.0 for lines in words]
    part = (max(lengths, default=0) + 14) / axes.bbox.height
    axes.set_ylim(0, highest / max(1 - part, 0.2) or 1.0)
