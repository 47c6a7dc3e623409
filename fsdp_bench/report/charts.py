"""The pictures of measured results: peak memory, throughput, communication. One file a panel and question."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_bench.report.panels import Panel, Row, panels
from fsdp_bench.spec.record import Outcome, TrialRecord
from fsdp_bench.spec.setup import Offload
from fsdp_bench.spec.units import GIB, MIB, format_gib, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, dark to light, so that it survives black and white; hatches tell the parts apart as well.
PARTS = {
    "parameters, stored": ("#0072B2", ""),
    "optimizer states": ("#E69F00", "///"),
    "activations, gradients, gathered parameters, temporary": ("#BFE3F5", ""),
    "everything on the device": ("#BFE3F5", ""),
    "median; the line spans the slowest to the fastest step": ("#0072B2", ""),
    "exposed: no compute meanwhile": ("#D55E00", ""),
    "overlapped with compute": ("#F7CDB5", "..."),
}
FONT = 12
WIDTH, HEIGHT, DPI = 16.0, 9.0, 100

Bars = list[tuple[str, float]]
Quantity = Callable[[TrialRecord], Bars]
"""The parts of one trial's bar with their lengths; empty when it has none."""


def draw_all(records: list[TrialRecord], folder: Path, machine: str) -> list[Path]:
    """Draw every chart of measured records as PNG into a folder.

    Args:
        records: trials of one sweep on one machine.
        folder: where the files go; it must exist.
        machine: one line that describes the machine, printed on each picture.

    Returns:
        The files written; none when no trial ended ok.

    Raises:
        OSError: when the folder cannot be written.
    """
    paths = []
    for panel in panels(records, machine):
        rows = [row for _, group in panel.groups for row in group]
        for name, title, quantity, text in (
            ("peak-memory", "Peak memory allocated, worst rank", memory_stack, memory_text),
            ("throughput", "Throughput", throughput, throughput_text),
            ("communication", "Communication per step, worst rank", communication, communication_text),
        ):
            if any(quantity(row.record) for row in rows):
                path = folder / f"{name}-{panel.name}.png"
                _draw(panel, f"{title}: {panel.title}", quantity, text, path)
                paths.append(path)
    return paths


def memory_stack(record: TrialRecord) -> Bars:
    """Return the parts of a trial's peak, in bytes; they add up to it. Only a trial that ended ok has one.

    What a rank stores between steps is live at the peak too, unless it is offloaded; the rest is not told apart.
    """
    memory = record.worst_rank_memory
    if record.outcome is not Outcome.OK or memory is None or memory.peak_allocated_bytes is None:
        return []
    peak, resident = memory.peak_allocated_bytes, memory.parameters_bytes + memory.optimizer_state_bytes
    on_host = record.setup.offload is Offload.PARAMS and record.device == "cuda"
    if on_host or resident > peak:
        return [("everything on the device", peak)]
    return [
        ("parameters, stored", memory.parameters_bytes),
        ("optimizer states", memory.optimizer_state_bytes),
        ("activations, gradients, gathered parameters, temporary", peak - resident),
    ]


def memory_text(record: TrialRecord) -> str:
    """Return the peak, its phase, and whether the allocator had to retry."""
    memory = record.worst_rank_memory
    assert memory is not None
    retries = "" if record.fits else ", with allocation retries: does not fit"
    return f"{format_gib(memory.peak_allocated_bytes or 0)} in {memory.peak_phase}{retries}"


def throughput(record: TrialRecord) -> Bars:
    """Return the median tokens a second."""
    tokens = record.tokens_per_second_per_gpu
    return (
        [("median; the line spans the slowest to the fastest step", tokens)]
        if record.outcome is Outcome.OK and tokens
        else []
    )


def throughput_range(record: TrialRecord) -> tuple[float, float]:
    """Return the tokens a second of the slowest and of the fastest measured step."""
    samples = [rank.step_seconds for rank in record.ranks if rank.step_seconds]
    steps = [max(step) for step in zip(*samples, strict=False)]
    tokens = record.setup.tokens_per_step_per_rank
    return tokens / max(steps), tokens / min(steps)


def throughput_text(record: TrialRecord) -> str:
    """Return the median with the step's seconds and, where the GPU's peak is known, the MFU."""
    mfu = f", MFU {record.mfu:.1%}" if record.mfu is not None else ""
    return f"{record.tokens_per_second_per_gpu:,.0f} tokens/s, step {format_seconds(record.step_seconds or 0)}{mfu}"


def communication(record: TrialRecord) -> Bars:
    """Return exposed and overlapped seconds; they add up to the total."""
    total, exposed = record.communication_seconds, record.exposed_communication_seconds
    if record.outcome is not Outcome.OK or total is None or exposed is None:
        return []
    return [("exposed: no compute meanwhile", exposed), ("overlapped with compute", max(total - exposed, 0.0))]


def communication_text(record: TrialRecord) -> str:
    """Return total and exposed."""
    total, exposed = record.communication_seconds or 0.0, record.exposed_communication_seconds or 0.0
    return f"{format_seconds(total)}, of it exposed {format_seconds(exposed)}"


def _draw(panel: Panel, title: str, quantity: Quantity, text: Callable[[TrialRecord], str], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, HEIGHT), dpi=DPI)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.33, 0.15, 0.64, 0.73))
    values = [sum(length for _, length in quantity(row.record)) for _, rows in panel.groups for row in rows]
    scale, unit = _unit(quantity, max(values))
    _draw_rows(axes, panel, quantity, text, scale)
    axes.set_xlim(0, max(values) / scale * 1.42)  # room for the text behind the longest bar
    axes.set_xlabel(unit, fontsize=FONT)
    figure.text(0.02, 0.955, title, fontsize=FONT + 5, weight="bold", va="center")
    for line, conditions in enumerate(panel.conditions):
        figure.text(0.02, 0.055 - 0.028 * line, conditions, fontsize=FONT - 1, va="center", color="#333333")
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(
        handles=list(unique.values()),
        labels=list(unique),
        ncols=len(unique),
        fontsize=FONT,
        loc="center left",
        bbox_to_anchor=(0.012, 0.905),
        frameon=False,
    )
    figure.savefig(path)


def _unit(quantity: Quantity, largest: float) -> tuple[float, str]:
    """Return the divisor and the name of the axis."""
    if quantity is memory_stack:
        return (GIB, "GiB per rank") if largest >= GIB else (MIB, "MiB per rank")
    if quantity is communication:
        return (1.0, "seconds per step") if largest >= 1 else (1e-3, "milliseconds per step")
    return 1.0, "tokens per second per rank"


def _draw_rows(axes: Axes, panel: Panel, quantity: Quantity, text: Callable[[TrialRecord], str], scale: float) -> None:
    """Draw every strategy's rows from the top down, a gap and its name between them."""
    place, ticks, labels = 0.0, [], []
    for strategy, rows in panel.groups:
        axes.text(-0.005, place, strategy, transform=axes.get_yaxis_transform(), ha="right", va="center",
                  fontsize=FONT, weight="bold")  # fmt: skip
        for row in rows:
            place += 1
            _draw_row(axes, row, place, quantity, text, scale)
            ticks.append(place)
            labels.append(row.label)
        place += 1.5
    axes.set_yticks(ticks, labels, fontsize=FONT - 1)
    axes.set_ylim(place - 0.8, -0.8)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=FONT)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)


def _draw_row(
    axes: Axes, row: Row, place: float, quantity: Quantity, text: Callable[[TrialRecord], str], scale: float
) -> None:
    """Draw one trial: its bar and figures, or the word that says why it has none."""
    end = 0.0
    for part, length in quantity(row.record):
        color, hatch = PARTS[part]
        axes.barh(place, length / scale, left=end, height=0.72, color=color, hatch=hatch, edgecolor="#333333",
                  linewidth=0.6, label=part)  # fmt: skip
        end += length / scale
    if not end:
        axes.annotate(ended(row.record), (0, place), (4, 0), textcoords="offset points", va="center",
                      fontsize=FONT - 1, style="italic", weight="bold", color="#8B0000")  # fmt: skip
        return
    if quantity is throughput:
        slowest, fastest = throughput_range(row.record)
        axes.plot(
            [slowest / scale, fastest / scale], [place, place], color="black", linewidth=2, marker="|", markersize=9
        )
        end = max(end, fastest / scale)
    axes.annotate(text(row.record), (end, place), (6, 0), textcoords="offset points", va="center", fontsize=FONT - 1,
                  bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})  # fmt: skip


def ended(record: TrialRecord) -> str:
    """Return the word for a trial without a bar."""
    limit = record.run.memory_limit_bytes
    within = f" within {format_gib(limit)}" if limit is not None else ""
    words = {
        Outcome.OOM_GPU: f"out of memory{within}",
        Outcome.OOM_HOST: f"out of memory{within}" if record.device == "cpu" and limit else "out of host memory",
        Outcome.TIMEOUT: "timed out",
        Outcome.CRASHED: "crashed",
    }
    return words.get(record.outcome, "unknown")
