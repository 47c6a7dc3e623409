"""The pictures of measured results: peak memory, throughput, communication. Strategies side by side.

``bars`` says what one trial shows, ``slides`` which trials share a picture, ``axis`` where their bars stand; here it
is drawn. Every picture prints the conditions under which its numbers hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_bench.report.charts import bars
from fsdp_bench.report.charts.axis import FAINT, FONT, INK, LINE, Layout, draw_labels, lay_out
from fsdp_bench.report.charts.bars import Bar
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
from fsdp_bench.report.charts.slides import Slide, slides
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.spec.units import GIB, MIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEFT, RIGHT, TOP = 160.0, 25.0, 142.0
"""Pixels around the axes; the legend adds to the top, and the bottom depends on the texts there."""
BAR, WIDEST_BAR = 0.8, 130.0
"""Width of a bar in slots, and at most in pixels."""
MOST_NOTES = 3

# Okabe and Ito's palette from dark to light, so that it survives black and white; hatches tell the parts apart too.
STYLES = {
    bars.STORED: ("#0072B2", ""),
    bars.OPTIMIZER: ("#E69F00", "///"),
    bars.REST: ("#CFE8F7", ""),
    bars.WHOLE: ("#CFE8F7", "..."),
    bars.OUT_OF_MEMORY: ("#FFFFFF", "xx"),
    bars.MEDIAN: ("#0072B2", ""),
    bars.EXPOSED: ("#D55E00", ""),
    bars.OVERLAPPED: ("#F7D9C8", "..."),
}


@dataclass(frozen=True)
class Chart:
    """One question about every trial, and how its answer is drawn."""

    name: str
    """The file's name without its suffix."""
    title: str
    bar: Callable[[TrialRecord], Bar]
    units: tuple[tuple[float, str], ...]
    """Divisors with the axis's name, largest first; the first that the highest bar reaches is taken, else the last."""
    meaning: dict[str, str]
    """By kind of hardware: what the quantity is, for the conditions."""
    emulated: str = ""
    """What is to be said of it where collectives end at once."""


_ALLOCATED = "allocated: torch.cuda.max_memory_allocated"
_PROFILED = "communication: worst rank, median of profiled steps"
_PER_RANK = "tokens/s of one rank at the slowest rank's step time"
CHARTS = (
    Chart(
        "peak-memory",
        "Peak memory by sharding strategy",
        bars.memory_bar,
        ((GIB, "peak allocated per rank, GiB"), (MIB, "peak allocated per rank, MiB")),
        {"cpu": "allocated: peak of live tensor bytes, worst rank", "cuda": f"{_ALLOCATED}, worst rank"},
    ),
    Chart(
        "throughput",
        "Throughput by sharding strategy",
        bars.throughput_bar,
        ((1.0, "tokens per second per {unit}"),),
        dict.fromkeys(("cpu", "cuda"), _PER_RANK),
        "; collectives end at once: the job's compute, not its throughput",
    ),
    Chart(
        "communication",
        "Communication per step by sharding strategy",
        bars.communication_bar,
        ((1.0, "seconds per step"), (1e-3, "milliseconds per step")),
        dict.fromkeys(("cpu", "cuda"), _PROFILED),
    ),
)


def draw_all(records: list[TrialRecord], folder: Path, machine: str) -> list[Path]:
    """Draw every chart of measured records as PNG into a folder, in place of those that were drawn there before.

    Args:
        records: trials of one sweep on one machine.
        folder: where the files go; it must exist.
        machine: one line that describes the machine, printed on each picture.

    Returns:
        The files written, ``peak-memory.png`` and so on; several of a kind, ``peak-memory-fp32.png``, when the trials
        are too many for one picture or must not be compared. None when no trial has anything to show.

    Raises:
        OSError: when the folder cannot be written.
    """
    for chart in CHARTS:
        for outdated in folder.glob(f"{chart.name}*.png"):
            outdated.unlink()
    paths = []
    for slide in slides(records, machine):
        for chart in CHARTS:
            if any(chart.bar(slot.record).top for group in slide.groups for slot in group.slots):
                path = folder / f"{chart.name}{slide.suffix}.png"
                _figure(chart, slide).savefig(path)
                paths.append(path)
    return paths


def _figure(chart: Chart, slide: Slide) -> Figure:
    figure = new_figure()
    layout = lay_out(slide.groups, slide.levels, WIDTH - LEFT - RIGHT, LEFT - EDGE, text_width)
    drawn = [chart.bar(place.slot.record) for place in layout.places]
    scale, unit = _unit(chart, drawn)
    record = slide.groups[0].slots[0].record
    hardware, is_emulated = record.hardware, record.device == "emulated"
    meaning = chart.meaning.get(hardware, chart.meaning["cuda"]) + (chart.emulated if is_emulated else "")
    footer = wrap((*slide.conditions, meaning), WIDTH - 2 * EDGE) + _noted(slide.notes)
    for index, line in enumerate(footer):
        write(figure, (len(footer) - index) * LINE - 4, line, size=FONT, color="#444444")
    title = chart.title + (", without communication" if is_emulated and chart.emulated else "")
    write(figure, HEIGHT - 34, title, size=18, weight="bold")
    write(figure, HEIGHT - 66, slide.subtitle, size=13)
    top = HEIGHT - TOP - _legend(figure, drawn) * LINE
    write(figure, top + 24, unit.format(unit="GPU" if hardware == "cuda" else "rank"), size=12)
    bottom = layout.depth + len(footer) * LINE + 26
    axes = figure.add_axes((LEFT / WIDTH, bottom / HEIGHT, 1 - (LEFT + RIGHT) / WIDTH, (top - bottom) / HEIGHT))
    _draw_bars(axes, layout, drawn, scale)
    _dress(axes, layout)
    return figure


def _noted(notes: tuple[str, ...]) -> list[str]:
    """Return the first notes, one line each, and how many there are more."""
    shown = [shorten(note) for note in notes[:MOST_NOTES]]
    more = len(notes) - MOST_NOTES
    return [*shown, f"and {more} more reasons: trials.csv"] if more > 0 else shown


def _unit(chart: Chart, drawn: list[Bar]) -> tuple[float, str]:
    highest = max(bar.top for bar in drawn)
    return next((unit for unit in chart.units if highest >= unit[0]), chart.units[-1])


def _number(value: float, scale: float) -> str:
    """Print a bar's total in the axis's unit: one decimal, none from 100 on; GiB always with one."""
    scaled = value / scale
    return f"{scaled:,.1f}" if scaled < 100 or scale == GIB else f"{scaled:,.0f}"


def _draw_bars(axes: Axes, layout: Layout[TrialRecord], drawn: list[Bar], scale: float) -> None:
    """Draw every bar with its text, and give the axis the height at which all texts fit over their bars."""
    texts, upright = _texts(drawn, scale, axes.bbox.width / layout.span)
    longest = [max(text_width(line, FONT, True) for line in text.split("\n")) for text in texts]
    lines = [(text.count("\n") + 1) * LINE for text in texts]
    heights = longest if upright else lines
    room = axes.bbox.height - 14
    tops = ((room - text) / bar.top for bar, text in zip(drawn, heights, strict=True) if bar.top)
    pixels = min(tops, default=room / scale)
    axes.set_ylim(0, axes.bbox.height / (pixels * scale))
    width = min(BAR, WIDEST_BAR * layout.span / axes.bbox.width)
    for place, bar, text in zip(layout.places, drawn, texts, strict=True):
        _draw_pieces(axes, place.middle, width, bar, scale)
        color = _color(bar)
        axes.annotate(text, (place.middle, bar.top / scale), (0, 4), textcoords="offset points", ha="center",
                      va="bottom", rotation=90 if upright else 0, fontsize=FONT, linespacing=1.1, color=color,
                      weight="normal" if color == INK else "bold", zorder=4,
                      bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})  # fmt: skip


def _texts(drawn: list[Bar], scale: float, slot: float) -> tuple[list[str], bool]:
    """Return the text of every bar, and whether they stand upright because a slot of that many pixels is too narrow."""
    words = [((_number(bar.total, scale),) if bar.succeeded else ()) + bar.words for bar in drawn]
    if all(text_width(line, FONT, True) <= 0.98 * slot for lines in words for line in lines):
        return ["\n".join(lines) for lines in words], False
    return [
        "\n".join(" · ".join(lines[start : start + 2]) for start in range(0, len(lines), 2)) for lines in words
    ], True


def _color(bar: Bar) -> str:
    """Return the colour of a bar's text: what failed or must not be trusted stands out, what was not tried does not."""
    if bar.words and bar.words[0] == bars.SKIPPED:
        return FAINT
    return INK if bar.succeeded and not {bars.RETRIES, bars.SUSPECT} & set(bar.words) else FAILURE


def _draw_pieces(axes: Axes, middle: float, width: float, bar: Bar, scale: float) -> None:
    base = 0.0
    for part, size in bar.pieces:
        color, hatch = STYLES[part]
        axes.bar(middle, size / scale, width, bottom=base / scale, color=color, hatch=hatch, linewidth=0.8,
                 edgecolor=INK if bar.succeeded else FAILURE, zorder=2)  # fmt: skip
        base += size
    if bar.spread:
        least, greatest = (end / scale for end in bar.spread)
        axes.plot([middle, middle], [least, greatest], color="black", linewidth=1.8, marker="_", markersize=9,
                  markeredgewidth=1.8, zorder=3)  # fmt: skip


def _dress(axes: Axes, layout: Layout[TrialRecord]) -> None:
    axes.set_xlim(0, layout.span)
    axes.set_xticks([])
    scale_axis(axes)
    draw_labels(axes, layout.labels, DPI / 72)


def _legend(figure: Figure, drawn: list[Bar]) -> int:
    """Explain the parts that the picture has, in their order; return the rows that this takes."""
    from matplotlib.patches import Patch

    parts = [part for part in STYLES if any(part == name and size for bar in drawn for name, size in bar.pieces)]
    handles = [
        Patch(
            facecolor=STYLES[part][0],
            hatch=STYLES[part][1],
            linewidth=0.8,
            label=part,
            edgecolor=FAILURE if part == bars.OUT_OF_MEMORY else INK,
        )
        for part in parts
    ]
    rows = 1 if sum(text_width(part, FONT) + 75 for part in parts) <= WIDTH - 2 * EDGE else 2
    place = ((EDGE - 7) / WIDTH, 1 - 80 / HEIGHT)
    figure.legend(handles=handles, loc="upper left", bbox_to_anchor=place, frameon=False, fontsize=FONT,
                  ncols=-(-len(parts) // rows), columnspacing=1.6, labelspacing=0.25, handlelength=2.2,
                  borderpad=0.3)  # fmt: skip
    return rows
