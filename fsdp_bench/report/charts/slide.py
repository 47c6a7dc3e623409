"""Draws a Slide with matplotlib: title and subtitle at the top, conditions at the bottom, charts between them."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fsdp_bench.report.charts.colors import ink
from fsdp_bench.report.charts.description import Area, Bar, BarGroup, Bars, Key, Lane, Lanes, Plot, Point, Slide
from fsdp_bench.spec.errors import printable

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure


WIDTH, HEIGHT, DPI = 1600, 900, 120
"""Size of a slide in pixels, and pixels per inch. Font sizes are true to scale on a 13.3 x 7.5 inch slide."""
TITLE, SUBTITLE, HEADING, TEXT, SMALL = 18.0, 13.0, 12.0, 11.0, 10.0
"""Font sizes in points."""
GRID = "#DDDDDD"
HATCHED = "#00000090"
"""Colour of an area's hatch."""
CHARACTERS_OF_LANE = 165
"""Characters of a word along a whole lane."""


def draw_plots(body: SubFigure, plots: Sequence[Plot], columns: int) -> None:
    """Draw plots side by side on one vertical scale. One with numbered points has the list of them beside it."""
    first = plots[0]
    if any(point.number is not None for point in first.points):
        axes, names = body.subplots(1, 2, width_ratios=(2.4, 1))
        _draw_plot(axes, first, 1)
        _list(names, first)
        axes.set_ylabel("; ".join(filter(None, (first.y.title, first.y.remark))), fontsize=HEADING)
        return
    grid = body.subplots(-(-len(plots) // columns), columns, sharey=True, squeeze=False)
    for axes, plot in zip(grid.flat, plots, strict=False):
        _draw_plot(axes, plot, columns)
    for axes in grid.flat[len(plots) :]:
        axes.remove()
    body.supylabel(first.y.title, fontsize=HEADING)


def _draw_plot(axes: Axes, plot: Plot, columns: int) -> None:
    font = TEXT if columns == 1 else TEXT - 0.5
    _value_axis(axes)
    if plot.x.is_log:
        axes.set_xscale("log")
        axes.minorticks_off()
    axes.set_xlim(plot.x.low, plot.x.high)
    axes.set_ylim(plot.y.low, plot.y.high)
    names = plot.x.names or ()
    axes.set_xticks([tick.value for tick in plot.x.ticks()], [tick.text for tick in plot.x.ticks()],
                    ha="left" if names and names[0].value == plot.x.low else "center")  # fmt: skip
    axes.set_yticks([tick.value for tick in plot.y.ticks()], [tick.text for tick in plot.y.ticks()])
    if plot.x.has_grid:
        axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_xlabel(plot.x.title, fontsize=HEADING)
    for order, area in enumerate(plot.areas):
        _draw_area(axes, area, 1 + order / 100)
    for line in plot.lines:
        axes.plot(line.x, line.y, color=ink(line.style.color), linewidth=line.style.width, zorder=3,
                  drawstyle="steps-post" if line.is_step else "default", linestyle=(0, line.style.dash))  # fmt: skip
    for point in plot.points:
        if point.number is None:
            _draw_point(axes, point)
    _draw_marks(axes, plot)
    wide = [line for text in plot.title.split("\n") for line in textwrap.wrap(text, 145 // columns)]
    axes.set_title("\n".join(wide), loc="left", fontsize=font, color=ink("failure" if plot.is_bad else "ink"))


def _draw_area(axes: Axes, area: Area, order: float) -> None:
    style = area.style
    looks: dict[str, Any] = {"facecolor": ink(style.color), "linewidth": 0.0, "alpha": style.opacity, "zorder": order}
    if style.hatch:
        looks |= {"hatch": style.hatch, "edgecolor": HATCHED}
    axes.fill_between(area.x, area.low, area.high, step="post" if area.is_step else None, **looks)
    if area.has_edge:
        axes.plot(area.x, area.high, color=ink("ink"), linewidth=0.5, zorder=2.5, drawstyle="steps-post")


def _draw_point(axes: Axes, point: Point) -> None:
    color = ink(point.style.color)
    axes.plot([point.x], [point.y], color=color, marker=point.style.sign or "o", markersize=9, zorder=6, clip_on=False,
              markeredgewidth=1.8, markerfacecolor="white" if point.is_hollow else color)  # fmt: skip


def _draw_marks(axes: Axes, plot: Plot) -> None:
    for mark in plot.marks():
        if mark.text:
            shape = "rarrow,pad=0.2" if mark.is_beyond else "round,pad=0.25"
            box = {"boxstyle": shape, "facecolor": ink(mark.style.color), "edgecolor": "white"}
            x, side = (0.98, "right") if mark.is_beyond else (mark.x / 100, "center")
            axes.text(x, mark.y / 100, mark.text, transform=axes.transAxes, ha=side, va="center", color="white",
                      zorder=4, fontsize=TEXT - 0.5, weight="bold", bbox=box)  # fmt: skip


def _list(axes: Axes, plot: Plot) -> None:
    """Write the numbered list of a plot's points; if they differ, those of the legend's first style are bold."""
    axes.set_axis_off()
    best = plot.legend[0].style if len({point.style for point in plot.points}) > 1 else None
    points = [point for point in plot.points if point.number is not None]
    step = min(0.045, 1 / len(points))
    lines = [f"{point.number}  {point.title}" for point in points]
    size = min(TEXT, 1.7 * TEXT * 30 / max(map(len, lines)))
    for index, (line, point) in enumerate(zip(lines, points, strict=True)):
        axes.text(0, 1 - index * step, line, transform=axes.transAxes, fontsize=size, color=ink(point.style.color),
                  va="top", weight="bold" if point.style == best else "normal", parse_math=False)  # fmt: skip


def draw_lanes(body: SubFigure, charts: Sequence[Lanes]) -> None:
    """Draw charts of lanes below each other, each as high as its lanes."""
    heights = [
        1.0 + sum(2.0 if _has_words(lane) else 1.0 for lane in chart.lanes) + bool(chart.x.ticks()) for chart in charts
    ]
    for axes, chart in zip(body.subplots(len(charts), 1, squeeze=False, height_ratios=heights).flat, charts,
                           strict=True):  # fmt: skip
        _draw_chart(axes, chart, TEXT if len(charts) < 4 else SMALL - 1)


def _draw_chart(axes: Axes, chart: Lanes, font: float) -> None:
    lanes = chart.lanes[::-1]
    for place, lane in enumerate(lanes):
        has_words = _has_words(lane)
        foot, height = (place - 0.1, 0.5) if has_words else (place - 0.36, 0.72)
        for spans in lane.spans:
            boxes = [(begin, end - begin) for begin, end in spans.intervals]
            axes.broken_barh(boxes, (foot, height), facecolor=ink(spans.style.color), hatch=spans.style.hatch,
                             edgecolor="white", linewidth=0.8 if has_words else 0.0)  # fmt: skip
        if has_words:
            _write_words(axes, chart, lane, foot, height)
    axes.set_ylim(-0.6, len(lanes) - 0.4)
    axes.set_xlim(chart.x.low, chart.x.high)
    axes.set_yticks(range(len(lanes)), [lane.name for lane in lanes])
    axes.set_xticks([tick.value for tick in chart.x.ticks()], [tick.text for tick in chart.x.ticks()])
    axes.tick_params(axis="both", labelsize=font, length=0)
    axes.spines[:].set_visible(False)
    axes.spines["bottom"].set_visible(bool(chart.x.ticks()))
    axes.set_title(", ".join(filter(None, (chart.title, chart.x.title))), fontsize=HEADING, loc="left")
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def _has_words(lane: Lane) -> bool:
    return any(spans.text for spans in lane.spans)


def _write_words(axes: Axes, chart: Lanes, lane: Lane, foot: float, height: float) -> None:
    """Write the words of a lane's intervals into them; below the lane those that have no room."""
    from matplotlib.colors import to_rgb

    narrow = []
    for spans in lane.spans:
        ((begin, end),) = spans.intervals
        share = (end - begin) / (chart.x.high - chart.x.low)
        if share > len(spans.text) / CHARACTERS_OF_LANE:
            color = "white" if sum(to_rgb(ink(spans.style.color))) < 1.4 else "black"
            axes.text((begin + end) / 2, foot + height / 2, spans.text, ha="center", va="center", fontsize=SMALL - 1,
                      color=color)  # fmt: skip
        elif share > 0.005:
            narrow.append(spans.text)
    if narrow:
        text = f"too narrow for names: {', '.join(narrow)}"
        axes.text(chart.x.low, foot - 0.03, text, va="top", fontsize=SMALL - 2)


def _value_axis(axes: Axes) -> None:
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.tick_params(labelsize=TEXT, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def draw_bars(body: SubFigure, rows: Sequence[Bars]) -> None:
    """Draw rows of bars; all have the same groups and labels in the same order. Rows of one axis have one scale."""
    first = rows[0]
    is_one_axis = all(row.axis == first.axis for row in rows)
    axes = _panels(body, first, len(rows), sharey="all" if is_one_axis else "row")
    words = [bar.words for row in rows for group in row.groups for bar in group.bars if bar.is_result or bar.pieces]
    num_bars = sum(len(group.bars) for group in first.groups)
    upright = max((len(line) for lines in words for line in lines), default=0) * 11.5 > (WIDTH - 150) / num_bars
    for row, panels in zip(rows, axes, strict=True):
        for group, one in zip(row.groups, panels, strict=True):
            _draw_group(one, group, row.scale, upright)
        panels[0].set_ylabel(row.title if is_one_axis else f"{row.title}, {row.axis}", fontsize=HEADING)
    if is_one_axis:
        body.supylabel(first.axis, fontsize=HEADING)
    has_marks = any(bar.mark is not None for row in rows for group in row.groups for bar in group.bars)
    highest = max(row.highest for row in rows)
    for row, panels in list(zip(rows, axes, strict=True))[: 1 if is_one_axis else None]:
        top = (highest if is_one_axis else row.highest) / row.scale
        _leave_space_for_words(body, panels[0], top, words, upright, has_marks)


def _panels(body: SubFigure, chart: Bars, rows: int, sharey: Literal["all", "row"]) -> np.ndarray:
    """Return axes: one column for each group, and labels below the last row. ``sharey``: which have one scale."""
    count = sum(len(group.bars) for group in chart.groups)
    widths = [max(len(group.bars), 0.1 * count) for group in chart.groups]
    pixels = (WIDTH - 150) / sum(widths)
    axes = body.subplots(rows, len(chart.groups), sharey=sharey, squeeze=False, width_ratios=widths)
    for column, (group, width) in enumerate(zip(chart.groups, widths, strict=True)):
        axes[0, column].set_title(_broken(group.title, width * pixels / 11.5), fontsize=TEXT + 1, weight="bold")
        for one in axes[:, column]:
            _value_axis(one)
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
    width = 0.8 if len(group.bars) > 1 else 0.5
    for place, bar in enumerate(group.bars):
        _draw_bar(axes, place, bar, scale, width)
        is_upright = upright or any(not other.pieces for other in group.bars)
        foot = (bar.spread[1] if bar.spread else max(bar.total, bar.mark or 0.0)) / scale
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
    body: SubFigure, axes: Axes, highest: float, words: Sequence[Sequence[str]], upright: bool, has_marks: bool
) -> None:
    body.figure.draw_without_rendering()  # lays the figure out, which sets the height of the axes
    lengths = [len(" · ".join(lines)) * 10.5 if upright else len(lines) * 21.0 for lines in words]
    part = (max(lengths, default=0) + (26 if has_marks else 14)) / axes.bbox.height  # words stand higher above marks
    axes.set_ylim(0, highest / max(1 - part, 0.2) or 1.0)


EDGE = 30.0
"""Pixels between the chart's edge and its texts."""
LINE = 19.0
"""Pixels from one line of small text to the next."""
CHARACTERS = 172
"""Most characters in a line of small text."""
LEGEND_CHARACTERS = 160
"""Most characters in a line of a legend, with 8 for each patch."""
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

    Raises OSError if the file cannot be written.
    """
    metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
    figure_of(slide).savefig(path, metadata=metadata)


def _legend(body: SubFigure, slide: Slide) -> None:
    if slide.legend:
        is_beside = slide.is_legend_beside
        count, width = len(slide.legend), sum(len(key.text) + 8 for key in slide.legend)
        columns = 1 if is_beside else min(count, 5) if width <= LEGEND_CHARACTERS else math.ceil(count / 2)
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


def in_file_name(text: str) -> str:
    """Return text as a part of a file's name: letters, digits, ``.`` and ``-``, at most 120 of them."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", text)[:120].strip("-")
