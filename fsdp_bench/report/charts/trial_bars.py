"""The charts of measured or rehearsed trials: peak memory, throughput, communication; strategies side by side.

trial_slides.py groups the trials by chart. A trial that ended ``ok`` has a bar that counts as a result; another has a
label in its place. Every chart prints the conditions under which its numbers hold.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from fsdp_bench.catalog.loader import gpu_by_product_name
from fsdp_bench.report.charts.colors import Style
from fsdp_bench.report.charts.description import Bar, BarGroup, Bars, Key, Piece, Slide
from fsdp_bench.report.charts.slide import draw
from fsdp_bench.report.charts.trial_facts import SKIPPED, device_name, ended, limits_exceeded
from fsdp_bench.report.charts.trial_slides import ChartTrials, group_by_chart
from fsdp_bench.spec.rank_report import Outcome
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.spec.setup import Offload
from fsdp_bench.spec.units import GIB, MIB

STORED = "stored parameters"
OPTIMIZER = "optimizer state"
REST = "activations, gradients, gathered parameters, temporary"
WHOLE = "everything on the device"
OUT_OF_MEMORY = "OOM: up to the limit, which was not enough"
MEDIAN = "median step; the line spans the slowest to the fastest"
EXPOSED = "exposed: no compute meanwhile; its share stands beside the number"
OVERLAPPED = "overlapped with compute"

RETRIES, SUSPECT = "retries", "suspect"


# Lightness and hatches distinguish the parts in black and white.
STYLES = {
    STORED: Style("blue"),
    OPTIMIZER: Style("orange", "///"),
    REST: Style("pale"),
    WHOLE: Style("pale", "..."),
    OUT_OF_MEMORY: Style("paper", "xx"),
    MEDIAN: Style("blue"),
    EXPOSED: Style("red"),
    OVERLAPPED: Style("peach", "..."),
}


def _result(words: tuple[str, ...], *parts: tuple[str, float], spread: tuple[float, float] | None = None) -> Bar:
    """Return the bar of a trial that ended ok, without its number and the labels of its setting."""
    color = "failure" if {RETRIES, SUSPECT} & set(words) else "ink"
    return Bar((), words, tuple(Piece(name, size, STYLES[name]) for name, size in parts), color=color, spread=spread)


def _missing(word: str, limit: int | None = None) -> Bar:
    """Return the bar of a trial that is no result; one that ran out of memory within a known limit reaches up to it."""
    pieces = (Piece(OUT_OF_MEMORY, limit, STYLES[OUT_OF_MEMORY]),) if limit else ()
    return Bar((), (word,), pieces, is_result=False, color="faint" if word == SKIPPED else "failure")


def memory_bar(record: TrialRecord) -> Bar:
    """Return the bar of a trial's peak allocated bytes on its worst rank; the pieces add up to the peak exactly.

    Stored parameters and optimizer state are live at the peak too, unless they are offloaded to host memory. All other
    bytes are one piece. A trial that ran out of memory within a known limit has a piece up to that limit.
    """
    if record.outcome is not Outcome.OK:
        return _missing(ended(record), exceeded_limit(record))
    memory = record.worst_rank_memory
    if memory is None or memory.peak_allocated_bytes is None:
        return _missing("unknown")
    peak, resident = memory.peak_allocated_bytes, memory.parameters_bytes + memory.optimizer_state_bytes
    elsewhere = record.setup.offload is Offload.PARAMS and record.hardware != "cpu"
    parts: tuple[tuple[str, float], ...] = ((WHOLE, peak),)
    if not elsewhere and resident <= peak:
        parts = ((STORED, memory.parameters_bytes), (OPTIMIZER, memory.optimizer_state_bytes), (REST, peak - resident))
    return _result((memory.peak_phase, *_marks(record)), *parts)


def throughput_bar(record: TrialRecord) -> Bar:
    """Return the bar of a trial's tokens per second per rank: the median, and the slowest and fastest measured step."""
    if record.outcome is not Outcome.OK:
        return _missing(ended(record))
    tokens = record.tokens_per_second_per_gpu
    if not tokens:
        return _missing("unknown")
    # The slowest rank determines when a step ends.
    steps = [max(step) for step in zip(*(r.step_seconds for r in record.ranks if r.step_seconds), strict=False)]
    per_step = record.setup.tokens_per_step_per_rank
    mfu = (f"MFU {record.mfu:.0%}",) if record.mfu is not None else ()
    spread = per_step / max(steps), per_step / min(steps)
    return _result((*mfu, *_marks(record)), (MEDIAN, tokens), spread=spread)


def communication_bar(record: TrialRecord) -> Bar:
    """Return a trial's communication seconds: total and exposed are maxima of ranks; overlapped is the rest."""
    if record.outcome is not Outcome.OK:
        return _missing(ended(record))
    total, exposed = record.communication_seconds, record.exposed_communication_seconds
    if total is None or exposed is None:
        return _missing("unknown")
    percent = (f"{exposed / total:.0%}",) if total else ()
    return _result((*percent, *_marks(record)), (EXPOSED, exposed), (OVERLAPPED, max(total - exposed, 0.0)))


def exceeded_limit(record: TrialRecord) -> int | None:
    """Return the bytes of device memory that a trial exceeded: the run's limit, else the GPU's; None if unknown."""
    if not record.outcome.is_oom or not limits_exceeded(record) & {"device", "budget"}:
        return None
    if record.run.gpu_limit_bytes is not None:
        return record.run.gpu_limit_bytes
    gpu = gpu_by_product_name(device_name(record) or "")
    return None if gpu is None else gpu.nvml_total_bytes or round(gpu.memory_gib * GIB)


def _marks(record: TrialRecord) -> tuple[str, ...]:
    return (() if record.fits else (RETRIES,)) + ((SUSPECT,) if record.suspect else ())


MOST_NOTES = 3
FIRST_AFTER_SECONDS = 25.0
MOST_TIME = 0.05
"""Fraction of a running sweep's time that drawing may take. Charts are drawn between trials, never during one."""


@dataclass(frozen=True)
class Chart:
    """One kind of chart: the quantity of a trial that it shows, its title and its axis."""

    name: str
    title: str
    bar: Callable[[TrialRecord], Bar]
    axis: str
    """The axis's title, with places for the unit and for what a rank runs on."""
    units: tuple[tuple[float, str], ...]
    """Units of the axis (divisor, name), largest first; the first not above the highest bar is used."""
    meaning: str
    """The definition of the quantity for the conditions."""
    meaning_on_cpu: str | None = None
    """The same of trials on a CPU, if that is another."""
    emulated: str = ""
    """A remark for emulated trials, whose collectives take no time."""
    has_rehearsals: bool = False
    """Whether rehearsed trials have it, which take no time."""


_ALLOCATED = "allocated: torch.cuda.max_memory_allocated"
CHARTS = (
    Chart(
        "peak-memory",
        "Peak memory by sharding strategy",
        memory_bar,
        "peak allocated per rank, {unit}",
        ((GIB, "GiB"), (MIB, "MiB")),
        f"{_ALLOCATED}, worst rank",
        "allocated: peak of live tensor bytes, worst rank",
        has_rehearsals=True,
    ),
    Chart(
        "throughput",
        "Throughput by sharding strategy",
        throughput_bar,
        "{unit} per {rank}",
        ((1.0, "tokens/s"),),
        "tokens/s of one rank at the slowest rank's step time",
        emulated="; collectives end at once: the job's compute, not its throughput",
    ),
    Chart(
        "communication",
        "Communication per step by sharding strategy",
        communication_bar,
        "time per step, {unit}",
        ((1.0, "s"), (1e-3, "ms")),
        "communication: worst rank, median of profiled steps",
    ),
)


def draw_all(records: list[TrialRecord], folder: Path, machine: str) -> list[Path]:
    """Draw every chart of a sweep's records as PNG, in place of earlier ones; return the files, none without bars.

    Trials that are too many for one chart, or not comparable, have several, such as ``peak-memory-fp32.png``. Raises
    OSError if the folder cannot be written.
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
    record, more = trials.records[0], len(trials.notes) - MOST_NOTES
    title = chart.title + (", without communication" if record.device == "emulated" and chart.emulated else "")
    return Slide(
        f"{title}: {trials.place}",
        trials.subtitle,
        (*trials.conditions, meaning_of(chart, record)),
        (trial_bars(chart, trials),),
        notes=(*trials.notes[:MOST_NOTES], *([f"and {more} more reasons: trials.csv"] if more > 0 else [])),
    )


def meaning_of(chart: Chart, record: TrialRecord) -> str:
    """Return the definition of a chart's quantity, as it was read in a trial."""
    if record.source == "rehearsed":
        return f"{_ALLOCATED}; rank 0 in PyTorch's CUDA build on a stand-in for NVIDIA's libraries: kernels do nothing"
    meaning = chart.meaning_on_cpu if record.hardware == "cpu" and chart.meaning_on_cpu else chart.meaning
    return meaning + (chart.emulated if record.device == "emulated" else "")


def charts_of(trials: ChartTrials) -> list[Chart]:
    """Return the charts in which at least one trial has a bar."""
    records = trials.records
    charts = [chart for chart in CHARTS if records[0].source != "rehearsed" or chart.has_rehearsals]
    return [chart for chart in charts if any(chart.bar(record).top for record in records)]


def trial_bars(chart: Chart, trials: ChartTrials) -> Bars:
    """Return the bars of the trials that share a chart."""
    groups = [
        BarGroup(
            group.header,
            tuple(
                replace(chart.bar(record), labels=() if group.collapsed else labels)
                for labels, record in group.trials[: 1 if group.collapsed else None]
            ),
        )
        for group in trials.groups
    ]
    every = [bar for group in groups for bar in group.bars]
    highest = max(bar.top for bar in every)
    scale, unit = next((unit for unit in chart.units if highest >= unit[0]), chart.units[-1])
    rank = "GPU" if trials.records[0].hardware == "cuda" else "rank"
    shown = {piece.name for bar in every for piece in bar.pieces if piece.size}
    return Bars(
        "",
        tuple(replace(group, bars=tuple(_numbered(bar, scale) for bar in group.bars)) for group in groups),
        chart.axis.format(unit=unit, rank=rank),
        scale,
        unit,
        trials.levels,
        tuple(Key(style, name) for name, style in STYLES.items() if name in shown),
    )


def _numbered(bar: Bar, scale: float) -> Bar:
    scaled = bar.total / scale
    number = f"{scaled:,.1f}" if scaled < 100 or scale == GIB else f"{scaled:,.0f}"
    return replace(bar, words=(number, *bar.words)) if bar.is_result else bar
