"""The charts of measured or rehearsed trials: peak memory, throughput, communication; strategies side by side.

``bars`` makes the bar of one trial, ``slides`` groups the trials by chart, and this module draws them. Every chart
prints the conditions under which its numbers hold.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from fsdp_bench.report.charts.description import Bar, BarGroup, Bars, Key, Slide
from fsdp_bench.report.charts.slide import draw
from fsdp_bench.report.charts.trials import bars
from fsdp_bench.report.charts.trials.slides import ChartTrials, group_by_chart
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.spec.units import GIB, MIB

MOST_NOTES = 3
FIRST_AFTER_SECONDS = 25.0
MOST_TIME = 0.05
"""Fraction of a running sweep's time that drawing may take. Charts are drawn between trials, never during one."""


@dataclass(frozen=True)
class Chart:
    """One kind of chart: the quantity of a trial that it shows, its title and its axis."""

    name: str
    """The file's name without its suffix."""
    title: str
    bar: Callable[[TrialRecord], Bar]
    axis: str
    """The axis's title, with places for the unit and for what a rank runs on."""
    units: tuple[tuple[float, str], ...]
    """Units of the axis (divisor, name), largest first; the first not above the highest bar is used."""
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
        "peak allocated per rank, {unit}",
        ((GIB, "GiB"), (MIB, "MiB")),
        {"cpu": "allocated: peak of live tensor bytes, worst rank", "cuda": f"{_ALLOCATED}, worst rank"},
        has_rehearsals=True,
    ),
    Chart(
        "throughput",
        "Throughput by sharding strategy",
        bars.throughput_bar,
        "{unit} per {rank}",
        ((1.0, "tokens/s"),),
        dict.fromkeys(("cpu", "cuda"), _PER_RANK),
        "; collectives end at once: the job's compute, not its throughput",
    ),
    Chart(
        "communication",
        "Communication per step by sharding strategy",
        bars.communication_bar,
        "time per step, {unit}",
        ((1.0, "s"), (1e-3, "ms")),
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
        for chart in charts_of(trials):
            path = folder / f"{chart.name}{trials.suffix}.png"
            draw(measured_slide(chart, trials), path)
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


def measured_slide(chart: Chart, trials: ChartTrials) -> Slide:
    """Return one chart of the trials that share it."""
    record = trials.groups[0].slots[0].record
    title = chart.title + (", without communication" if record.device == "emulated" and chart.emulated else "")
    return Slide(
        f"{title}: {trials.place}",
        trials.subtitle,
        (*trials.conditions, meaning_of(chart, record)),
        (trial_bars(chart, trials),),
        notes=tuple(_noted(trials.notes)),
    )


def meaning_of(chart: Chart, record: TrialRecord) -> str:
    """Return the definition of a chart's quantity, as it was read in a trial."""
    if record.source == "rehearsed":
        return f"{_ALLOCATED}; rank 0 in PyTorch's CUDA build on a stand-in for NVIDIA's libraries: kernels do nothing"
    remark = chart.emulated if record.device == "emulated" else ""
    return chart.meaning.get(record.hardware, chart.meaning["cuda"]) + remark


def charts_of(trials: ChartTrials) -> list[Chart]:
    """Return the charts in which at least one trial has a bar."""
    every = [slot.record for group in trials.groups for slot in group.slots]
    charts = [chart for chart in CHARTS if every[0].source != "rehearsed" or chart.has_rehearsals]
    return [chart for chart in charts if any(chart.bar(record).top for record in every)]


def trial_bars(chart: Chart, trials: ChartTrials) -> Bars:
    """Return the bars of the trials that share a chart."""
    drawn = [[(slot.labels, chart.bar(slot.record)) for slot in group.shown] for group in trials.groups]
    every = [one for group in drawn for _, one in group]
    highest = max(one.top for one in every)
    scale, unit = next((unit for unit in chart.units if highest >= unit[0]), chart.units[-1])
    rank = "GPU" if trials.groups[0].slots[0].record.hardware == "cuda" else "rank"
    shown = {piece.name for one in every for piece in one.pieces if piece.size}
    return Bars(
        "",
        tuple(
            BarGroup(group.header, tuple(_named(one, labels, scale) for labels, one in own))
            for group, own in zip(trials.groups, drawn, strict=True)
        ),
        chart.axis.format(unit=unit, rank=rank),
        scale,
        unit,
        trials.levels,
        tuple(Key(style, name) for name, style in bars.STYLES.items() if name in shown),
    )


def _noted(notes: tuple[str, ...]) -> list[str]:
    """Return the first notes, one line each, and a line with the number of further notes."""
    more = len(notes) - MOST_NOTES
    return [*notes[:MOST_NOTES], *([f"and {more} more reasons: trials.csv"] if more > 0 else [])]


def _named(bar: Bar, labels: tuple[str, ...], scale: float) -> Bar:
    """Return a trial's bar with its setting, and with its number in the axis's unit if it is a result."""
    scaled = bar.total / scale
    number = f"{scaled:,.1f}" if scaled < 100 or scale == GIB else f"{scaled:,.0f}"
    return replace(bar, labels=labels, words=(number, *bar.words) if bar.is_result else bar.words)
