"""The charts of measured or rehearsed trials: peak memory, throughput, communication; strategies side by side.

``bars`` makes the bar of one trial, ``slides`` groups the trials by chart, and this module draws them. Every chart
prints the conditions under which its numbers hold.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

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
from fsdp_bench.report.charts.trials import bars
from fsdp_bench.report.charts.trials.bars import Bar
from fsdp_bench.report.charts.trials.slides import ChartTrials, group_by_chart
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.spec.units import GIB, MIB

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_NOTES = 3
FIRST_AFTER_SECONDS = 25.0
MOST_TIME = 0.05
"""Fraction of a running sweep's time that drawing may take. Charts are drawn between trials, never during one."""

# Okabe and Ito's palette; lightness and hatches distinguish the parts in black and white.
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
    """One kind of chart: the quantity of a trial that it shows, its title and its axis."""

    name: str
    """The file's name without its suffix."""
    title: str
    bar: Callable[[TrialRecord], Bar]
    units: tuple[tuple[float, str], ...]
    """Axis scales (divisor, label), largest first; use the first not above the highest bar."""
    meaning: dict[str, str]
    """The definition of the quantity for the conditions, by kind of hardware."""
    emulated: str = ""
    """A remark for emulated trials, whose collectives take no time."""
    has_rehearsals: bool = False
    """Whether rehearsed trials have it, which take no time."""


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
        has_rehearsals=True,
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
    """Draw every chart of measured records as PNG into a folder; replace the charts from an earlier call.

    Args:
        records: trials of one sweep on one machine.
        folder: where the files go; it must exist.
        machine: one line that describes the machine, printed on each chart.

    Returns:
        The files written: ``peak-memory.png`` and so on. There are several of a kind, such as ``peak-memory-fp32.png``,
        if the trials are too many for one chart or not comparable. Empty if no trial has a bar.

    Raises:
        OSError: when the folder cannot be written.
    """
    for chart in CHARTS:
        for outdated in folder.glob(f"{chart.name}*.png"):
            outdated.unlink()
    paths = []
    for trials in group_by_chart(records, machine):
        for chart in CHARTS:
            if trials.groups[0].slots[0].record.source == "rehearsed" and not chart.has_rehearsals:
                continue
            if any(chart.bar(slot.record).top for group in trials.groups for slot in group.slots):
                path = folder / f"{chart.name}{trials.suffix}.png"
                save(measured_figure(chart, trials), path)
                paths.append(path)
    return paths


class ChartsMeanwhile:
    """Draws the charts of a running sweep from time to time; each prints how many of the trials it shows."""

    def __init__(self, folder: Path, machine: str) -> None:
        self._folder = folder
        self._machine = machine
        self._due = time.monotonic() + FIRST_AFTER_SECONDS

    def update(self, records: list[TrialRecord], num_trials: int) -> None:
        """Draw again if enough time has passed and trials remain; ignore a chart that cannot be written."""
        begin = time.monotonic()
        if begin < self._due or len(records) >= num_trials:
            return
        with contextlib.suppress(OSError):
            draw_all(records, self._folder, f"{self._machine}, {len(records)} of {num_trials} trials so far")
        now = time.monotonic()
        self._due = now + max(FIRST_AFTER_SECONDS, (now - begin) / MOST_TIME)


def measured_figure(chart: Chart, trials: ChartTrials) -> Figure:
    """Return one chart of the trials that share it."""
    drawn = [[chart.bar(slot.record) for slot in group.shown] for group in trials.groups]
    everything = [bar for group in drawn for bar in group]
    scale, unit = _unit(chart, everything)
    record = trials.groups[0].slots[0].record
    is_emulated = record.device == "emulated"
    meaning = chart.meaning.get(record.hardware, chart.meaning["cuda"]) + (chart.emulated if is_emulated else "")
    if record.source == "rehearsed":
        meaning = (
            f"{_ALLOCATED}; rank 0 in PyTorch's CUDA build on a stand-in for NVIDIA's libraries: kernels do nothing"
        )
    title = chart.title + (", without communication" if is_emulated and chart.emulated else "")
    frame = new_frame(f"{title}: {trials.place}", trials.subtitle, (*trials.conditions, meaning), _noted(trials.notes))
    panels = [StrategyPanel(group.header, tuple(slot.labels for slot in group.shown)) for group in trials.groups]
    axes = strategy_panels(frame, panels, trials.levels)[0]
    words = [[_words(bar, scale) for bar in group] for group in drawn]
    flat = [lines for group in words for lines in group]
    upright = are_upright(flat, len(flat))
    for one, group, lines in zip(axes, drawn, words, strict=True):
        _draw_bars(one, group, lines, scale, upright)
    axes[0].set_ylabel(unit.format(unit="GPU" if record.hardware == "cuda" else "rank"), fontsize=12)
    legend(frame, _handles(everything))
    leave_space_for_labels(frame, axes[0], max(bar.top for bar in everything) / scale, flat, upright)
    return frame.figure


def _noted(notes: tuple[str, ...]) -> list[str]:
    """Return the first notes, one line each, and a line with the number of further notes."""
    more = len(notes) - MOST_NOTES
    return [*notes[:MOST_NOTES], *([f"and {more} more reasons: trials.csv"] if more > 0 else [])]


def _unit(chart: Chart, drawn: list[Bar]) -> tuple[float, str]:
    highest = max(bar.top for bar in drawn)
    return next((unit for unit in chart.units if highest >= unit[0]), chart.units[-1])


def _words(bar: Bar, scale: float) -> tuple[str, ...]:
    """Return a bar's number in the axis's unit, and its labels."""
    scaled = bar.total / scale
    number = f"{scaled:,.1f}" if scaled < 100 or scale == GIB else f"{scaled:,.0f}"
    return ((number,) if bar.succeeded else ()) + bar.labels


def _draw_bars(axes: Axes, drawn: Sequence[Bar], words: Sequence[Sequence[str]], scale: float, upright: bool) -> None:
    """Draw the bars of one strategy, stacked from their parts, with the spread of their samples."""
    places = range(len(drawn))
    base = [0.0] * len(drawn)
    for part, (color, hatch) in STYLES.items():
        sizes = [dict(bar.pieces).get(part, 0.0) / scale for bar in drawn]
        if any(sizes):
            edges = [INK if bar.succeeded else FAILURE for bar in drawn]
            axes.bar(places, sizes, 0.8, base, color=color, hatch=hatch, linewidth=0.8, edgecolor=edges, zorder=2)
            base = [low + size for low, size in zip(base, sizes, strict=True)]
    for place, bar in enumerate(drawn):
        if bar.spread:
            axes.vlines(place, bar.spread[0] / scale, bar.spread[1] / scale, color="black", linewidth=1.8, zorder=3)
    tops = axes.bar(places, [bar.top / scale for bar in drawn], 0.8, facecolor="none", edgecolor="none")
    label_bars(axes, tops, words, [_color(bar) for bar in drawn], upright=upright)


def _color(bar: Bar) -> str:
    """Return the colour of a bar's text: FAILURE for failed or suspect trials, FAINT for skipped ones, else INK."""
    if bar.labels and bar.labels[0] == bars.SKIPPED:
        return FAINT
    return INK if bar.succeeded and not {bars.RETRIES, bars.SUSPECT} & set(bar.labels) else FAILURE


def _handles(drawn: Sequence[Bar]) -> list[Artist]:
    """Return the legend's entries for the parts that the chart shows, in order."""
    from matplotlib.patches import Patch

    return [
        Patch(facecolor=color, hatch=hatch, linewidth=0.8, label=part,
              edgecolor=FAILURE if part == bars.OUT_OF_MEMORY else INK)
        for part, (color, hatch) in STYLES.items()
        if any(part == name and size for bar in drawn for name, size in bar.pieces)
    ]  # fmt: skip
