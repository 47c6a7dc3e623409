"""Draws a Slide with matplotlib: title and subtitle at the top, conditions at the bottom, charts between them."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_bench.report.charts.colors import DPI, HEIGHT, SMALL, SUBTITLE, TEXT, TITLE, WIDTH, ink
from fsdp_bench.report.charts.description import Bars, Key, Lanes, Plot, Slide
from fsdp_bench.report.charts.draw_charts import draw_bars, draw_lanes, draw_plots
from fsdp_bench.spec.errors import printable

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure, SubFigure

EDGE = 30.0
"""Pixels between the chart's edge and its texts."""
LINE = 19.0
"""Pixels from one line of small text to the next."""
CHARACTERS = 172
"""Most characters in a line of small text."""
MOST_LINES = 9
"""Most lines of small text below the axes."""


def figure_of(slide: Slide) -> Figure:
    """Return a slide as a matplotlib figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH / DPI, HEIGHT / DPI), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    lines = textwrap.wrap(printable("; ".join(slide.conditions)), CHARACTERS, break_on_hyphens=False)
    lines += [textwrap.shorten(printable(note), CHARACTERS, placeholder=" ...") for note in slide.notes]
    lines = lines[:MOST_LINES]
    above, below = 82.0, len(lines) * LINE + 16
    _write(figure, HEIGHT - 30, slide.title, min(TITLE, TITLE * 82 / len(slide.title)), "ink", "bold")
    size = min(SUBTITLE, SUBTITLE * 118 / max(len(slide.subtitle), 1))
    _write(figure, HEIGHT - 62, slide.subtitle, size, "failure" if slide.is_bad else "ink")
    for index, line in enumerate(lines):
        _write(figure, below - 16 - index * LINE, line, SMALL, "faint")
    grid = figure.add_gridspec(3, 1, height_ratios=(above, HEIGHT - above - below, below), hspace=0)
    body = figure.add_subfigure(grid[1])
    _legend(body, slide)
    if plots := [chart for chart in slide.charts if isinstance(chart, Plot)]:
        draw_plots(body, plots, slide.columns)
    if lanes := [chart for chart in slide.charts if isinstance(chart, Lanes)]:
        draw_lanes(body, lanes)
    if bars := [chart for chart in slide.charts if isinstance(chart, Bars)]:
        draw_bars(body, bars)
    return figure


def _write(figure: Figure, y: float, text: str, size: float, color: str, weight: str = "normal") -> None:
    figure.text(EDGE / WIDTH, y / HEIGHT, printable(text), fontsize=size, color=ink(color), weight=weight, va="center",
                parse_math=False)  # fmt: skip


def draw(slide: Slide, path: Path) -> None:
    """Write a slide as PNG or SVG, by the file's suffix. An SVG has no date, so that equal charts are equal files.

    Raises:
        OSError: if the file cannot be written.
    """
    metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
    figure_of(slide).savefig(path, metadata=metadata)


def _legend(body: SubFigure, slide: Slide) -> None:
    if slide.legend:
        is_beside = slide.is_legend_beside
        columns = 1 if is_beside else min(len(slide.legend), 5)
        edge = "white" if isinstance(slide.charts[-1], Lanes) else "ink"
        body.legend(handles=[_handle(key, edge) for key in slide.legend], ncols=columns, frameon=False, fontsize=TEXT,
                    loc="outside right upper" if is_beside else "outside upper left", columnspacing=1.4,
                    handlelength=2.2, labelspacing=0.4)  # fmt: skip


def _handle(key: Key, edge: str) -> Artist:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    style, color = key.style, ink(key.style.color)
    if style.is_line or style.sign:
        return Line2D([], [], label=key.text, color=color, linestyle=(0, style.dash) if style.is_line else "none",
                      linewidth=style.width, marker=style.sign, markersize=8, markeredgewidth=1.8,
                      markerfacecolor=color if style.is_line else "white")  # fmt: skip
    if style.dash:
        return Patch(facecolor="none", edgecolor=color, linestyle=(0, style.dash), linewidth=1.1, label=key.text)
    edge = "failure" if style.color == "paper" else edge
    return Patch(facecolor=color, hatch=style.hatch, edgecolor=ink(edge), linewidth=0.8, label=key.text)


def in_file_name(text: str, most: int = 120) -> str:
    """Return text as a part of a file's name: letters, digits, ``.`` and ``-``, at most so many of them."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", text)[:most].strip("-")
