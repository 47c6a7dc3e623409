"""The picture of the largest that fits: bars grouped by strategy, predicted, measured or published.

It draws plain rows and knows nothing of where they come from. Every bar begins at zero, carries its number, and is
labelled with its own setting; hatches tell neighbours apart in black and white. Predicted bars are pale and hatched,
measured ones solid, with the prediction as a mark and its error over the bar.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_bench.report.charts.axis import FAINT, FONT, HEADER_FONT, INK, LINE, Layout, draw_labels, lay_out
from fsdp_bench.report.charts.canvas import (
    DPI,
    EDGE,
    FAILURE,
    HEIGHT,
    WIDTH,
    new_figure,
    scale_axis,
    shorten,
    text_width,
    wrap,
    write,
)
from fsdp_bench.report.charts.slides import Group, Slot
from fsdp_bench.spec.units import format_count

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PREDICTED, MEASURED, PUBLISHED = "predicted", "measured", "published"
NONE_FITS, CANNOT_RUN, UNKNOWN = "none fits", "cannot run", "unknown"
"""Words that stand where a bar would be."""

MOST_BARS = 30
"""Bars that a panel shows legibly."""
MOST_PANELS = 2

LEFT, RIGHT, PANEL_GAP = 160.0, 25.0, 26.0
"""Pixels beside the axes and between panels."""
BAR, WIDEST_BAR = 0.8, 110.0
"""Width of a bar in slots, and at most in pixels."""

# Okabe and Ito's palette: saturated for what was measured, washed out for what was predicted.
STYLES = {
    PREDICTED: (("#9CCBE6", "//"), ("#FBE3B8", ""), ("#BFE3D5", ".."), ("#E3C9D8", "xx"), ("#F6F0A8", "\\\\"),
                ("#E0E0E0", "--")),
    MEASURED: (("#0072B2", ""), ("#E69F00", "//"), ("#35AB85", ".."), ("#8C5A7D", ""), ("#F0E442", "\\\\"),
               ("#8CCBF0", "--")),
    PUBLISHED: (("#4D4D4D", ""),),
}  # fmt: skip

_LEGEND = {
    PREDICTED: "predicted",
    MEASURED: "measured",
    PUBLISHED: "published",
}


@dataclass(frozen=True)
class MaxSizeBar:
    """The largest that fits under one setting."""

    group: str
    """The strategy."""
    labels: tuple[str, ...]
    """One word for each of the picture's levels, outermost first."""
    value: int | None
    """How large: parameters, layers, sequences, tokens. None where there is no bar."""
    source: str = PREDICTED
    """``predicted``, ``measured`` or ``published``."""
    predicted: int | None = None
    """Of a measured bar: what was predicted, drawn as a mark with the error."""
    with_retries: int | None = None
    """The largest that still ends, with allocation retries; a dashed outline reaches up to it."""
    note: str = ""
    """What stands where there is no bar: ``none fits``, ``cannot run``, ``unknown``."""


@dataclass(frozen=True)
class Panel:
    """Bars on one axis."""

    title: str
    """Empty for a picture of one panel."""
    bars: tuple[MaxSizeBar, ...]


@dataclass(frozen=True)
class MaxSizePicture:
    """Everything that the picture says."""

    title: str
    subtitle: str
    axes: tuple[tuple[float, str], ...]
    """Divisors with the axis's name, largest first; the first that the highest bar reaches is taken, else the last."""
    levels: tuple[str, ...]
    """What the labels are: ``server``, ``checkpointing``."""
    panels: tuple[Panel, ...]
    """All with the same groups and labels in the same order."""
    conditions: tuple[str, ...]
    notes: tuple[str, ...] = ()
    number: Callable[[int], str] = format_count
    """Prints a bar's number."""


Bars = dict[tuple[str, tuple[str, ...]], MaxSizeBar]
"""A panel's bars by group and labels."""


def draw(picture: MaxSizePicture, path: Path) -> None:
    """Draw as PNG or SVG, by the file's suffix.

    Raises:
        OSError: when the file cannot be written.
    """
    figure(picture).savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)


def figure(picture: MaxSizePicture) -> Figure:
    """Return the picture, 1600 x 900 pixels."""
    made = new_figure()
    footer = wrap(picture.conditions, WIDTH - 2 * EDGE) + [shorten(note) for note in picture.notes]
    for index, line in enumerate(footer):
        write(made, (len(footer) - index) * LINE - 4, line, size=FONT, color="#444444")
    write(made, HEIGHT - 34, picture.title, size=18, weight="bold")
    write(made, HEIGHT - 66, picture.subtitle, size=13)
    scale, name = _scale(picture)
    top = HEIGHT - (130 if _legend(made, picture) else 98)
    write(made, top, name, size=12)
    layout = lay_out(_groups(picture), picture.levels, WIDTH - LEFT - RIGHT, LEFT - EDGE, text_width)
    bottom = layout.depth + len(footer) * LINE + 26
    _draw_panels(made, picture, layout, scale, top=top - 16, bottom=bottom)
    return made


def _scale(picture: MaxSizePicture) -> tuple[float, str]:
    highest = max((_top(bar) for panel in picture.panels for bar in panel.bars), default=0)
    return next((axis for axis in picture.axes if highest >= axis[0]), picture.axes[-1])


def _top(bar: MaxSizeBar) -> int:
    """Return how high a bar and everything on it reaches."""
    return max(bar.value or 0, bar.predicted or 0, bar.with_retries or 0)


def _groups(picture: MaxSizePicture) -> tuple[Group[MaxSizeBar], ...]:
    """Return the strategies in their order; one under which nothing can run, on any panel, takes one slot."""
    made = []
    for name in dict.fromkeys(bar.group for bar in picture.panels[0].bars):
        slots = [Slot(bar, bar.labels) for bar in picture.panels[0].bars if bar.group == name]
        notes = {bar.note if bar.value is None else "" for p in picture.panels for bar in p.bars if bar.group == name}
        made.append(Group(name, tuple(slots), collapsed=notes == {CANNOT_RUN}))
    return tuple(made)


def _draw_panels(
    made: Figure, picture: MaxSizePicture, layout: Layout[MaxSizeBar], scale: float, top: float, bottom: float
) -> None:
    """Draw the panels between two heights, one over the other, all on one scale; the last has the labels."""
    count = len(picture.panels)
    titled = LINE + 8 if count > 1 else 0
    height = (top - bottom - count * titled - (count - 1) * PANEL_GAP) / count
    styles = _styles(picture)
    texts = _texts(picture, (WIDTH - LEFT - RIGHT) / layout.span)
    limit = _limit(picture, texts, height) / scale
    for index, panel in enumerate(picture.panels):
        y = bottom + (count - 1 - index) * (height + titled + PANEL_GAP)
        axes = made.add_axes((LEFT / WIDTH, y / HEIGHT, 1 - (LEFT + RIGHT) / WIDTH, height / HEIGHT))
        axes.set_xlim(0, layout.span)
        axes.set_ylim(0, limit or 1)
        axes.set_xticks([])
        scale_axis(axes)
        axes.set_title(panel.title, loc="left", fontsize=HEADER_FONT, weight="bold", pad=6, color=INK)
        bars: Bars = {(bar.group, bar.labels): bar for bar in panel.bars}
        for place in layout.places:
            bar = bars[place.group.header, place.slot.labels]
            _draw_bar(axes, place.middle, bar, styles[bar.source, bar.labels], scale)
            text = replace(texts[bar], upright=False) if place.group.collapsed else texts[bar]
            _write_over(axes, place.middle, bar, text, scale)
        if index == count - 1:
            draw_labels(axes, layout.labels, DPI / 72)


def _styles(picture: MaxSizePicture) -> dict[tuple[str, tuple[str, ...]], tuple[str, str]]:
    """Return colour and hatch by source and labels; of several levels the last one chooses only the hatch."""
    bars = [bar for panel in picture.panels for bar in panel.bars]
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


@dataclass(frozen=True)
class _Text:
    """What stands over a bar, or where there is none."""

    words: str
    size: float
    """Points."""
    upright: bool

    @property
    def height(self) -> float:
        """Pixels that it takes over the bar."""
        return text_width(self.words, self.size, True) if self.upright else (self.words.count("\n") + 1) * LINE


Texts = dict[MaxSizeBar, _Text]


def _texts(picture: MaxSizePicture, slot: float) -> Texts:
    """Return the text of every bar: all numbers a little smaller, or upright, where a slot of so many pixels is narrow.

    Words that stand for a bar are upright one by one.
    """
    lines = {bar: _lines(bar, picture.number) for panel in picture.panels for bar in panel.bars}
    numbers = [line for bar, words in lines.items() if bar.value is not None for line in words]
    sizes = [size for size in SIZES if all(text_width(line, size, True) <= 0.9 * slot for line in numbers)]
    made = {}
    for bar, words in lines.items():
        upright = not sizes if bar.value is not None else text_width(words[0], FONT, False) > slot
        made[bar] = _Text(("  " if upright else "\n").join(words), sizes[0] if sizes else FONT, upright)
    return made


SIZES = (FONT, FONT - 0.7, FONT - 1.4)
"""Of the numbers, in points, tried in this order."""


def _lines(bar: MaxSizeBar, number: Callable[[int], str]) -> list[str]:
    if bar.value is None:
        return [bar.note or UNKNOWN]
    if bar.predicted is None:
        return [number(bar.value)]
    error = f"{bar.predicted / bar.value - 1:+.1%}"
    return [number(bar.value), "0%" if bar.predicted == bar.value else error]


def _limit(picture: MaxSizePicture, texts: Texts, height: float) -> float:
    """Return the value at the top of an axis of so many pixels on which all texts fit over their bars."""
    bars = [bar for panel in picture.panels for bar in panel.bars]
    return max(_top(bar) * height / max(height - texts[bar].height - 14, 1) for bar in bars)


def _draw_bar(axes: Axes, middle: float, bar: MaxSizeBar, style: tuple[str, str], scale: float) -> None:
    if bar.value is None:
        return
    width = min(BAR, WIDEST_BAR * axes.get_xlim()[1] / axes.bbox.width)
    color, hatch = style
    axes.bar(middle, bar.value / scale, width, color=color, hatch=hatch, linewidth=1.0, edgecolor=INK, zorder=2)
    if bar.with_retries is not None and bar.with_retries > bar.value:
        axes.bar(middle, bar.with_retries / scale, width, zorder=1.5, **_GHOST)
    if bar.predicted is not None:
        axes.plot([middle], [bar.predicted / scale], zorder=4, **_MARK)


_GHOST: dict[str, Any] = {"facecolor": "none", "edgecolor": "#666666", "linestyle": (0, (3, 2)), "linewidth": 1.1}
_MARK: dict[str, Any] = {"marker": "D", "markersize": 10.0, "markerfacecolor": "white", "markeredgecolor": "black",
         "markeredgewidth": 2.0, "linestyle": "none"}  # fmt: skip


def _write_over(axes: Axes, middle: float, bar: MaxSizeBar, text: _Text, scale: float) -> None:
    """Write over a bar: inside its dashed outline where that has room, else over it."""
    color = INK if bar.value is not None else {NONE_FITS: FAILURE}.get(bar.note, FAINT)
    own = max(bar.value or 0, bar.predicted or 0)
    outline = (_top(bar) - own) / scale / axes.get_ylim()[1] * axes.bbox.height
    base = own if outline > text.height + 6 else _top(bar)
    above = 10 if bar.predicted is not None and bar.predicted == base else 4
    axes.annotate(text.words, (middle, base / scale), (0, above), textcoords="offset points", ha="center",
                  va="bottom", rotation=90 if text.upright else 0, fontsize=text.size, linespacing=1.1, color=color,
                  zorder=5, weight="bold" if color != FAINT else "normal",
                  bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})  # fmt: skip


def _legend(made: Figure, picture: MaxSizePicture) -> bool:
    """Explain marks and kinds of bars, where there is something to explain."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    bars = [bar for panel in picture.panels for bar in panel.bars if bar.value is not None]
    sources = [source for source in STYLES if any(bar.source == source for bar in bars)]
    handles: list[Artist] = []
    if MEASURED in sources:  # elsewhere the titles and labels say it
        for source in sources:
            color, hatch = STYLES[source][0]
            handles.append(Patch(facecolor=color, hatch=hatch, edgecolor=INK, label=_LEGEND[source]))
    if any(bar.predicted is not None for bar in bars):
        label = "predicted; its error stands over the bar"
        handles.append(Line2D([], [], label=label, **_MARK))
    if any((bar.with_retries or 0) > (bar.value or 0) for bar in bars):
        handles.append(Patch(label="dashed: up to here it runs, but with allocation retries", **_GHOST))
    if handles:
        made.legend(handles=handles, loc="upper left", bbox_to_anchor=((EDGE - 7) / WIDTH, 1 - 80 / HEIGHT),
                    frameon=False, fontsize=FONT, ncols=len(handles), columnspacing=1.6, handlelength=2.2,
                    borderpad=0.3)  # fmt: skip
    return bool(handles)
