"""The chart of the largest value that fits: bars grouped by strategy, predicted, measured, rehearsed or published.

This module draws rows of bars, whatever their source. Every bar begins at zero, has its number above it and its setting
below it. Hatches distinguish neighbouring bars in black and white. Predicted bars have pale colours, measured bars
saturated ones, rehearsed bars lie between. On a measured or rehearsed bar, a mark shows the predicted value, and the
error stands above the bar.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_bench.report.charts.figure import (
    FAILURE,
    FAINT,
    INK,
    StrategyPanel,
    are_upright,
    label_bars,
    leave_space_for_labels,
    legend,
    new_frame,
    save,
    strategy_panels,
)
from fsdp_bench.report.text.setups import spaced
from fsdp_bench.spec.units import format_count

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PREDICTED, MEASURED, REHEARSED, PUBLISHED = "predicted", "measured", "rehearsed", "published"
NONE_FITS, CANNOT_RUN, UNKNOWN = "none fits", "cannot run", "unknown"
"""Labels in place of a missing bar."""

MOST_BARS = 30
"""Most bars in one row of panels that remain legible."""
MOST_ROWS = 2

# Okabe and Ito's palette: saturated colours for measured bars, pale ones for predicted bars.
STYLES = {
    PREDICTED: (("#9CCBE6", "//"), ("#FBE3B8", ""), ("#BFE3D5", ".."), ("#E3C9D8", "xx"), ("#F6F0A8", "\\\\"),
                ("#E0E0E0", "--")),
    MEASURED: (("#0072B2", ""), ("#E69F00", "//"), ("#35AB85", ".."), ("#8C5A7D", ""), ("#F0E442", "\\\\"),
               ("#8CCBF0", "--")),
    REHEARSED: (("#66A3C7", ""), ("#EFC266", "//"), ("#86CCB5", ".."), ("#BA9DB1", ""), ("#F5ED8E", "\\\\"),
                ("#BADFF7", "--")),
    PUBLISHED: (("#4D4D4D", ""),),
}  # fmt: skip


@dataclass(frozen=True)
class MaxSizeBar:
    """The largest value that fits with one setting."""

    group: str
    """The strategy."""
    labels: tuple[str, ...]
    """One label for each of the chart's levels, outermost first."""
    value: int | None
    """The value in parameters, layers, sequences, tokens or GPUs; None if there is no bar."""
    source: str = PREDICTED
    """The source of the value: ``predicted``, ``measured``, ``rehearsed`` or ``published``."""
    predicted: int | None = None
    """The predicted value of a measured or rehearsed bar, drawn as a mark with the error."""
    with_retries: int | None = None
    """The largest value that runs with allocation retries, drawn as a dashed outline."""
    note: str = ""
    """The label in place of a missing bar: ``none fits``, ``cannot run`` or ``unknown``."""


@dataclass(frozen=True)
class BarRow:
    """One row of panels, with one panel per strategy."""

    title: str
    """Empty for a chart of one row."""
    bars: tuple[MaxSizeBar, ...]


@dataclass(frozen=True)
class MaxSizeChart:
    """The contents of one chart."""

    title: str
    subtitle: str
    axes: tuple[tuple[float, str], ...]
    """Axis scales (divisor, label), largest first; use the first not above the highest bar."""
    levels: tuple[str, ...]
    """The fields that the labels under the bars show: ``server``, ``checkpointing``."""
    rows: tuple[BarRow, ...]
    """The rows; all have the same groups and labels in the same order."""
    conditions: tuple[str, ...]
    notes: tuple[str, ...] = ()
    number: Callable[[int], str] = format_count
    """Function that formats a bar's value."""


def draw(chart: MaxSizeChart, path: Path) -> None:
    """Draw a chart as PNG or SVG, by the file's suffix.

    Raises:
        OSError: if the file cannot be written.
    """
    save(max_size_figure(chart), path)


def max_size_figure(chart: MaxSizeChart) -> Figure:
    """Return the chart as a matplotlib figure."""
    frame = new_frame(chart.title, chart.subtitle, chart.conditions, chart.notes)
    scale, name = _scale(chart)
    groups = [_by_strategy(row) for row in chart.rows]
    shown = {name: _shown(name, groups) for name in groups[0]}
    panels = [
        StrategyPanel(name, tuple(bar.labels if is_whole else () for bar in _bars(groups[0][name], is_whole)))
        for name, is_whole in shown.items()
    ]
    count = sum(len(panel.labels) for panel in panels)
    axes = strategy_panels(frame, panels, chart.levels, len(chart.rows))
    lines = [_lines(bar, chart.number) for row in chart.rows for bar in row.bars if bar.value is not None]
    upright = are_upright(lines, count)
    styles = _styles(chart)
    top = max((_top(bar) for row in chart.rows for bar in row.bars), default=0) / scale
    for index, (row, by_strategy) in enumerate(zip(chart.rows, groups, strict=True)):
        for one, (strategy, is_whole) in zip(axes[index], shown.items(), strict=True):
            _draw_bars(one, _bars(by_strategy[strategy], is_whole), styles, scale, chart.number, upright=upright)
        axes[index, 0].set_ylabel(row.title, fontsize=12)
    frame.body.supylabel(name, fontsize=12)
    legend(frame, _handles(chart))
    leave_space_for_labels(frame, axes[0, 0], top, lines, upright)
    return frame.figure


def _scale(chart: MaxSizeChart) -> tuple[float, str]:
    highest = max((_top(bar) for row in chart.rows for bar in row.bars), default=0)
    return next((axis for axis in chart.axes if highest >= axis[0]), chart.axes[-1])


def _top(bar: MaxSizeBar) -> int:
    """Return the highest value drawn for a bar: its value, its prediction or its value with retries."""
    return max(bar.value or 0, bar.predicted or 0, bar.with_retries or 0)


def _by_strategy(row: BarRow) -> dict[str, list[MaxSizeBar]]:
    found: dict[str, list[MaxSizeBar]] = {}
    for bar in row.bars:
        found.setdefault(bar.group, []).append(bar)
    return found


def _shown(strategy: str, groups: Sequence[dict[str, list[MaxSizeBar]]]) -> bool:
    """Return whether to show all bars of a strategy.

    False if every bar cannot run in all rows; the strategy then gets one slot.
    """
    return {bar.note if bar.value is None else "" for group in groups for bar in group[strategy]} != {CANNOT_RUN}


def _bars(bars: Sequence[MaxSizeBar], is_whole: bool) -> Sequence[MaxSizeBar]:
    return bars if is_whole else bars[:1]


def _styles(chart: MaxSizeChart) -> dict[tuple[str, tuple[str, ...]], tuple[str, str]]:
    """Return colour and hatch by source and labels.

    With several levels, the last level selects the hatch and the others select the colour.
    """
    bars = [bar for row in chart.rows for bar in row.bars]
    made = {}
    for source, palette in STYLES.items():
        own = list(dict.fromkeys(bar.labels for bar in bars if bar.source == source))
        outer = list(dict.fromkeys(labels[:-1] or labels for labels in own))
        inner = list(dict.fromkeys(labels[-1:] for labels in own))
        for labels in own:
            color, _ = palette[outer.index(labels[:-1] or labels) % len(palette)]
            _, hatch = palette[inner.index(labels[-1:]) % len(palette)]
            made[source, labels] = color, hatch
    return made


def _lines(bar: MaxSizeBar, number: Callable[[int], str]) -> list[str]:
    """Return the text above a bar, or in place of a missing bar."""
    if bar.value is None:
        return [bar.note or UNKNOWN]
    if bar.predicted is None:
        return [number(bar.value)]
    error = f"{bar.predicted / bar.value - 1:+.1%}"
    return [number(bar.value), "0%" if bar.predicted == bar.value else error]


_OUTLINE: dict[str, Any] = {"facecolor": "none", "edgecolor": "#666666", "linestyle": (0, (3, 2)), "linewidth": 1.1}
_MARK: dict[str, Any] = {"marker": "D", "markersize": 9.0, "markerfacecolor": "white", "markeredgecolor": "black",
                         "markeredgewidth": 1.8, "linestyle": "none"}  # fmt: skip


def _draw_bars(
    axes: Axes,
    bars: Sequence[MaxSizeBar],
    styles: dict[tuple[str, tuple[str, ...]], tuple[str, str]],
    scale: float,
    number: Callable[[int], str],
    *,
    upright: bool,
) -> None:
    """Draw the bars of one strategy, with a number above each bar and a label in place of a missing bar."""
    found = [styles[bar.source, bar.labels] for bar in bars]
    drawn = axes.bar(
        range(len(bars)),
        [(bar.value or 0) / scale for bar in bars],
        0.8 if len(bars) > 1 else 0.5,
        color=[color for color, _ in found],
        hatch=[hatch for _, hatch in found],
        linewidth=[1.0 if bar.value else 0.0 for bar in bars],
        edgecolor=INK,
        zorder=2,
    )
    for place, bar in enumerate(bars):
        if bar.value is not None and (bar.with_retries or 0) > bar.value:
            axes.bar(place, (bar.with_retries or 0) / scale, drawn[place].get_width(), zorder=1.5, **_OUTLINE)
        if bar.value is not None and bar.predicted is not None:
            axes.plot([place], [bar.predicted / scale], zorder=4, **_MARK)
    colors = [INK if bar.value is not None else FAILURE if bar.note == NONE_FITS else FAINT for bar in bars]
    words = [_lines(bar, number) for bar in bars]
    are_words_wide = upright or any(bar.value is None for bar in bars)
    label_bars(axes, drawn, words, colors, upright=are_words_wide, padding=11 if any(b.predicted for b in bars) else 4)


def _keys(chart: MaxSizeChart, source: str) -> list[Artist]:
    """Return what each colour and each hatch stands for, where bars of one source have labels of several levels."""
    from matplotlib.patches import Patch

    colors, hatches = dict[str, str](), dict[str, str]()
    for (of, labels), (color, hatch) in _styles(chart).items():
        if of == source and any(labels):
            colors.setdefault(", ".join(labels[:-1]).replace("\n", " "), color)
            hatches.setdefault(f"{spaced(chart.levels[-1])} {labels[-1]}".replace("\n", " "), hatch)
    keys: list[Artist] = [Patch(facecolor=color, edgecolor=INK, label=name) for name, color in colors.items()]
    keys += [Patch(facecolor="white", hatch=hatch, edgecolor=INK, label=name) for name, hatch in hatches.items()]
    return keys if len(keys) <= _MOST_KEYS else []


_MOST_KEYS = 10
"""More entries of a legend would take the bars' place."""


def _handles(chart: MaxSizeChart) -> list[Artist]:
    """Return the legend's entries for sources, marks and outlines."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    bars = [bar for row in chart.rows for bar in row.bars if bar.value is not None]
    sources = [source for source in STYLES if any(bar.source == source for bar in bars)]
    handles: list[Artist] = []
    if {MEASURED, REHEARSED} & {*sources}:  # in other charts the title and the labels name the source
        for source in sources:
            color, hatch = STYLES[source][0]
            handles.append(Patch(facecolor=color, hatch=hatch, edgecolor=INK, label=source))
    elif len(sources) == 1 and len(chart.levels) > 1:
        handles += _keys(chart, sources[0])
    if any(bar.predicted is not None for bar in bars):
        handles.append(Line2D([], [], label="predicted; its error stands over the bar", **_MARK))
    if any((bar.with_retries or 0) > (bar.value or 0) for bar in bars):
        handles.append(Patch(label="dashed: up to here it runs, but with allocation retries", **_OUTLINE))
    return handles
