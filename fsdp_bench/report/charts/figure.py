"""The frame of every chart: title and subtitle at the top, conditions at the bottom, axes between them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fsdp_bench.spec.errors import printable

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.container import BarContainer
    from matplotlib.figure import Figure, SubFigure

WIDTH, HEIGHT, DPI = 1600, 900, 120
"""Size in pixels, and pixels per inch. Font sizes are true to scale on a 13.3 x 7.5 inch slide."""
TITLE, SUBTITLE, TEXT, SMALL = 18.0, 13.0, 11.0, 10.0
"""Font sizes in points."""
EDGE = 30.0
"""Pixels between the chart's edge and its texts."""
LINE = 19.0
"""Pixels from one line of small text to the next."""
CHARACTERS = 172
"""Most characters in a line of small text."""
MOST_LINES = 9
"""Most lines of small text below the axes."""
INK, FAINT, FAILURE = "#333333", "#555555", "#A61C00"


Place = Literal["outside upper left", "outside right upper"]
"""The position of a legend, as matplotlib names it."""


@dataclass(frozen=True)
class Frame:
    """A chart with its texts, and the part of the figure for the axes."""

    figure: Figure
    body: SubFigure


def new_frame(
    title: str, subtitle: str, conditions: Sequence[str], notes: Sequence[str] = (), color: str = INK
) -> Frame:
    """Return a chart without axes.

    Args:
        title: the quantity shown, and the hardware.
        subtitle: the answer, or the model.
        conditions: the conditions that a reader needs to repeat the chart.
        notes: remarks and omissions, one line each.
        color: colour of the subtitle.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH / DPI, HEIGHT / DPI), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    lines = textwrap.wrap(printable("; ".join(conditions)), CHARACTERS, break_on_hyphens=False)
    lines += [textwrap.shorten(printable(note), CHARACTERS, placeholder=" ...") for note in notes]
    lines = lines[:MOST_LINES]
    above, below = 82.0, len(lines) * LINE + 16
    _write(figure, HEIGHT - 30, title, min(TITLE, TITLE * 82 / len(title)), INK, "bold")
    _write(figure, HEIGHT - 62, subtitle, min(SUBTITLE, SUBTITLE * 118 / max(len(subtitle), 1)), color)
    for index, line in enumerate(lines):
        _write(figure, below - 16 - index * LINE, line, SMALL, "#444444")
    grid = figure.add_gridspec(3, 1, height_ratios=(above, HEIGHT - above - below, below), hspace=0)
    return Frame(figure, figure.add_subfigure(grid[1]))


def _write(figure: Figure, y: float, text: str, size: float, color: str, weight: str = "normal") -> None:
    figure.text(EDGE / WIDTH, y / HEIGHT, printable(text), fontsize=size, color=color, weight=weight, va="center",
                parse_math=False)  # fmt: skip


def save(figure: Figure, path: Path) -> None:
    """Write a chart as PNG or SVG, by the file's suffix. An SVG has no date, so that equal charts are equal files.

    Raises:
        OSError: if the file cannot be written.
    """
    figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)


def value_axis(axes: Axes) -> None:
    """Style the vertical axis: plain numbers and horizontal grid lines, without spines or ticks."""
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.tick_params(labelsize=TEXT, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)


def legend(frame: Frame, handles: Sequence[Artist], place: Place = "outside upper left") -> None:
    """Draw a legend above the axes or beside them; without handles draw none."""
    if handles:
        columns = 1 if "right" in place else min(len(handles), 5)
        frame.body.legend(handles=handles, loc=place, frameon=False, fontsize=TEXT, ncols=columns, columnspacing=1.4,
                          handlelength=2.2, labelspacing=0.4)  # fmt: skip


@dataclass(frozen=True)
class StrategyPanel:
    """One panel of bars: the strategy, and the labels below its bars."""

    title: str
    labels: tuple[tuple[str, ...], ...]
    """One tuple per bar, with one label per level, outermost first."""


def strategy_panels(frame: Frame, panels: Sequence[StrategyPanel], levels: Sequence[str], rows: int = 1) -> np.ndarray:
    """Return axes for bars: one column per strategy, all with the same scale, and labels below the last row."""
    count = sum(len(panel.labels) for panel in panels)
    widths = [max(len(panel.labels), 0.1 * count) for panel in panels]
    pixels = (WIDTH - 150) / sum(widths)
    axes = frame.body.subplots(rows, len(panels), sharey=True, squeeze=False, width_ratios=widths)
    for column, (panel, width) in enumerate(zip(panels, widths, strict=True)):
        axes[0, column].set_title(_broken(panel.title, width * pixels / 11.5), fontsize=TEXT + 1, weight="bold")
        for row in range(rows):
            one = axes[row, column]
            value_axis(one)
            one.tick_params(labelleft=column == 0)
            one.set_xlim(-0.6, max(len(panel.labels), 1) - 0.4)
            one.set_xticks([])
        text, is_upright = _tick_labels(panel.labels, pixels)
        rotated = {"rotation": 90, "multialignment": "right"} if is_upright else {}
        axes[-1, column].set_xticks(range(len(text)), text, fontsize=SMALL, **rotated)
    if any(levels):
        frame.body.supxlabel(f"under each bar: {', '.join(levels)}", fontsize=SMALL, color=FAINT, style="italic")
    return axes


def _tick_labels(labels: Sequence[tuple[str, ...]], pixels: float) -> tuple[list[str], bool]:
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


def label_bars(
    axes: Axes,
    bars: BarContainer,
    words: Sequence[Sequence[str]],
    colors: Sequence[str],
    *,
    upright: bool,
    padding: float = 4,
) -> None:
    """Write words above each bar, vertically if ``upright``; texts in other colours than INK and FAINT are bold."""
    texts = [(" · " if upright else "\n").join(lines) for lines in words]
    for text, color in zip(axes.bar_label(bars, texts, padding=padding), colors, strict=True):
        text.set(rotation=90 if upright else 0, fontsize=TEXT, color=color, zorder=5, parse_math=False)
        text.set_fontweight("normal" if color in (INK, FAINT) else "bold")
        text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})


def are_upright(words: Sequence[Sequence[str]], bars: float) -> bool:
    """Whether the longest label is wider than a bar.

    ``bars`` is the number of bars across the chart.
    """
    longest = max((len(line) for lines in words for line in lines), default=0)
    return longest * 11.5 > (WIDTH - 150) / bars


def leave_space_for_labels(
    frame: Frame, axes: Axes, highest: float, words: Sequence[Sequence[str]], upright: bool
) -> None:
    """Set the vertical axis from zero to where the words fit above the highest bar."""
    frame.figure.draw_without_rendering()  # lays the figure out, which sets the height of the axes
    lengths = [len(" · ".join(lines)) * 10.5 if upright else len(lines) * 21.0 for lines in words]
    part = (max(lengths, default=0) + 14) / axes.bbox.height
    axes.set_ylim(0, highest / max(1 - part, 0.2) or 1.0)


def in_file_name(text: str, most: int = 120) -> str:
    """Return text as a part of a file's name: letters, digits, ``.`` and ``-``, at most so many of them."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", text)[:most].strip("-")
