"""The chart of predicted memory over one training step; several setups are side by side on one scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fsdp_bench.plan.chart_data.memory_timeline import (
    CATEGORIES,
    MemoryTimeline,
    Moment,
    memory_timeline,
    thinned,
)
from fsdp_bench.plan.chart_data.memory_timeline import widths as widths_of
from fsdp_bench.plan.question import Prediction, Question
from fsdp_bench.report.charts.figure import FAILURE, INK, TEXT, legend, new_frame, value_axis
from fsdp_bench.report.text.common import hardware_text
from fsdp_bench.report.text.setups import common_line, setup_line, title, varying_fields
from fsdp_bench.report.text.verdict import required_lines, verdict
from fsdp_bench.simulate import TORCH_VERSION
from fsdp_bench.simulate.events import Category
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.units import GIB, MIB, format_gib

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST = 6
"""Most setups in one chart that remain legible."""
ROWS = {1: (1, 1), 2: (1, 2), 3: (1, 3), 4: (2, 2), 5: (2, 3), 6: (2, 3)}
"""Rows and columns of panels, by the number of panels."""

FAR_BELOW_LIMIT = 0.2
"""If the highest peak is below this fraction of the GPU's memory, the GPU's limit is outside of the chart."""
MOMENTS = 900
"""Most moments of a step that are drawn in all panels of a row together."""

# Okabe and Ito's palette; lightness and hatches distinguish neighbours in black and white.
STYLES = {
    Category.PARAMETERS: ("#0072B2", ""),
    Category.OPTIMIZER_STATE: ("#E69F00", "///"),
    Category.GRADIENTS: ("#35AB85", "--"),
    Category.UNSHARDED_PARAMETERS: ("#8CCBF0", "\\\\\\"),
    Category.REDUCTION_BUFFERS: ("#5B3A66", ""),
    Category.ACTIVATIONS: ("#DDEBF4", ""),
    Category.LOGITS: ("#D55E00", "..."),
    Category.TEMPORARY: ("#F0E442", "xx"),
}
USABLE: dict[str, Any] = {"color": FAILURE, "linewidth": 2.2, "linestyle": (0, (7, 3))}
RESERVED: dict[str, Any] = {"color": INK, "linewidth": 1.6, "linestyle": (0, (1, 1.5))}
"""Styles of the horizontal lines: usable and reserved memory."""

_SHORT = {"forward": "fwd", "loss": "loss", "backward": "bwd", "optimizer": "opt."}


@dataclass(frozen=True)
class MemoryPanel:
    """One setup in the chart."""

    prediction: Prediction
    timeline: MemoryTimeline
    title: str


def timeline_figure(predictions: Sequence[Prediction], refused: Sequence[Question]) -> Figure:
    """Return the chart of one setup's step, or of several side by side.

    Args:
        predictions: setups of one model on the same hardware, in the order of the panels.
        refused: combinations that cannot run; they are listed below the chart.

    Raises:
        SpecError: for more setups than one chart shows legibly.
    """
    if len(predictions) > MOST:
        raise SpecError(f"chart: {len(predictions)} setups are too many for one picture; at most {MOST}")
    varying = varying_fields([prediction.question for prediction in predictions])
    panels = [MemoryPanel(one, memory_timeline(one.question), title(one.question, varying)) for one in predictions]
    first = predictions[0].question
    subtitle, is_good = _subtitle(panels)
    frame = new_frame(
        f"Memory over one training step (predicted): {hardware_text(first.hardware, first.setup.world_size)}",
        subtitle,
        _conditions(predictions, varying),
        _notes(panels, refused),
        INK if is_good else FAILURE,
    )
    rows, columns = ROWS[len(panels)]
    grid = frame.body.subplots(rows, columns, sharey=True, squeeze=False)
    scale, unit = (GIB, "GiB") if _highest(panels) >= GIB else (MIB, "MiB")
    for axes, panel in zip(grid.flat, panels, strict=False):
        _draw_panel(axes, panel, scale, MOMENTS // columns, is_alone=len(panels) == 1)
        _draw_levels(axes, panel, scale, _limit(panels))
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    grid[0, 0].set_ylim(0, _limit(panels) / scale)
    frame.body.supylabel(f"predicted live bytes on one GPU, {unit}", fontsize=12)
    legend(frame, _handles(panels))
    return frame.figure


def _subtitle(panels: Sequence[MemoryPanel]) -> tuple[str, bool]:
    """Return the answer, or for several panels the model; and False if a single setup does not fit, else True."""
    first = panels[0].prediction
    name = first.question.model.name
    if len(panels) > 1:
        return f"{name}, {len(panels)} setups on one scale", True
    text = f"{name}: {verdict(first)}".partition("; it runs out")[0]
    return text, first.fits is not False


def _highest(panels: Sequence[MemoryPanel]) -> int:
    return max(panel.timeline.peak.total for panel in panels)


def _limit(panels: Sequence[MemoryPanel]) -> float:
    """Return the bytes at the top of every axis; it includes the GPU's memory if the highest peak is near it."""
    highest, gpu_bytes = _highest(panels), panels[0].prediction.estimate.gpu_bytes
    if gpu_bytes is not None and highest >= FAR_BELOW_LIMIT * gpu_bytes:
        highest = max(highest, gpu_bytes)
    return 1.06 * highest


def _draw_panel(axes: Axes, panel: MemoryPanel, scale: float, moments: int, *, is_alone: bool) -> None:
    value_axis(axes)
    axes.set_xlim(0, 1)
    widths = widths_of(panel.timeline)
    places = [sum(widths[:index]) for index in range(len(widths))]
    drawn = [
        moment
        for phase, start, width in zip(panel.timeline.phases, places, widths, strict=True)
        for moment in thinned(phase, start, width, moments)
    ]
    _draw_stack(axes, drawn, scale)
    _name_phases(axes, panel.timeline, places, widths, are_short=len(widths) * (1 if is_alone else 3) > 12)
    top_x, top = max(drawn, key=lambda pair: pair[1].total)
    axes.plot([top_x], [top.total / scale], marker="v", markersize=8, color="black", zorder=6, clip_on=False)
    prediction = panel.prediction
    fits = "fit unknown" if prediction.verdict is None else prediction.verdict.text
    lines = [_peak_text(panel, is_alone)] if is_alone else [f"{panel.title}: {fits}", _peak_text(panel, is_alone)]
    axes.set_title("\n".join(lines), loc="left", fontsize=TEXT if is_alone else TEXT - 0.5,
                   color=INK if prediction.fits is not False else FAILURE)  # fmt: skip


def _draw_stack(axes: Axes, drawn: Sequence[tuple[float, Moment]], scale: float) -> None:
    """Draw one step-shaped band per category, each on top of the one before."""
    x = [place for place, _ in drawn] + [1.0]
    base = [0.0] * len(x)
    for place, category in enumerate(CATEGORIES):
        sizes = [moment.live[place] / scale for _, moment in drawn]
        top = [low + size for low, size in zip(base, [*sizes, sizes[-1]], strict=True)]
        if max(sizes) > 0:
            color, hatch = STYLES[category]
            axes.fill_between(x, base, top, step="post", facecolor=color, hatch=hatch, edgecolor="#00000090",
                              linewidth=0.0, zorder=2)  # fmt: skip
            axes.step(x, top, where="post", color=INK, linewidth=0.5, zorder=2.5)
        base = top
    axes.step(x, base, where="post", color="black", linewidth=1.3, zorder=3)


def _name_phases(
    axes: Axes, timeline: MemoryTimeline, places: Sequence[float], widths: Sequence[float], *, are_short: bool
) -> None:
    """Mark where phases begin, and write their names below the axis."""
    for phase, start, width in zip(timeline.phases, places, widths, strict=True):
        if phase.name in ("loss", "optimizer"):
            axes.axvspan(start, start + width, color="#F3F3F3", linewidth=0, zorder=0)
        if start:
            axes.axvline(start, color="#666666", linewidth=1.0, linestyle=(0, (2, 2)), zorder=3.5)
    texts = [_SHORT.get(phase.name, phase.name) if are_short else phase.name for phase in timeline.phases]
    axes.set_xticks([start + width / 2 for start, width in zip(places, widths, strict=True)], texts)


def _draw_levels(axes: Axes, panel: MemoryPanel, scale: float, limit: float) -> None:
    """Draw a line at the GPU's usable memory and one at the peak reserved memory."""
    gpu_bytes, reserved = panel.prediction.estimate.gpu_bytes, panel.prediction.reserved_bytes
    if gpu_bytes is None:
        return
    for num_bytes, style, order in ((gpu_bytes, USABLE, 5.0), (reserved, RESERVED, 4.0)):
        if num_bytes is not None and num_bytes <= limit:
            axes.axhline(num_bytes / scale, zorder=order, **style)


def _peak_text(panel: MemoryPanel, is_alone: bool) -> str:
    """Return the peak with its place, the reserved memory, and the reason for not fitting if no line shows it.

    With several panels the operator is left out, and the place as well if there is a reason.
    """
    prediction, moment, phase = panel.prediction, panel.timeline.peak, panel.timeline.peak_phase.name
    reason = _hidden_reason(prediction)
    where = f" in {phase}" if moment.block is None else f" in {phase}, block {moment.block}"
    where = f"{where}, at {moment.operator}" if is_alone else "" if reason else where
    text = f"\u25bc peak {format_gib(moment.total)}{where}"
    if prediction.reserved_bytes is not None:
        text += f"; reserved {format_gib(prediction.reserved_bytes)}"
    return text + reason


def _hidden_reason(prediction: Prediction) -> str:
    """Return why a setup does not fit, or an empty text if it fits or the chart's lines show the reason."""
    estimate, reading = prediction.estimate, prediction.estimate.allocator
    if prediction.fits is not False:
        return ""
    if reading.out_of_memory is not None:
        is_seen = estimate.memory.peak_allocated_bytes > (estimate.gpu_bytes or 0)
        if is_seen:
            return ""
        kept = format_gib(estimate.required_headroom.num_bytes)
        return f"; it reserves {format_gib(prediction.needed_bytes)}, {kept} are kept free"
    if count := reading.num_alloc_retries:
        return f" only with {count} allocation {'retry' if count == 1 else 'retries'}"
    return "; host memory is too small"


def _handles(panels: Sequence[MemoryPanel]) -> list[Artist]:
    """Return the legend's entries for the categories in the chart, in the order of the stack, and for the lines."""
    from matplotlib.patches import Patch

    moments = [moment for panel in panels for phase in panel.timeline.phases for moment in phase.moments]
    shown = [category for place, category in enumerate(CATEGORIES) if any(moment.live[place] for moment in moments)]
    patches = [
        Patch(facecolor=STYLES[category][0], hatch=STYLES[category][1], edgecolor=INK, linewidth=0.8,
              label=category.value.replace("_", " "))
        for category in shown
    ]  # fmt: skip
    return [*patches, *_lines(panels)]


def _lines(panels: Sequence[MemoryPanel]) -> list[Artist]:
    """Return the legend's entries for the horizontal lines; usable memory is named even if it is above the chart."""
    from matplotlib.lines import Line2D

    prediction = panels[0].prediction
    gpu_bytes, gpu = prediction.estimate.gpu_bytes, prediction.estimate.gpu
    if gpu_bytes is None or gpu is None:
        return []
    far = "" if _highest(panels) >= FAR_BELOW_LIMIT * gpu_bytes else ", far above"
    usable = Line2D([], [], label=f"{gpu.name}: {format_gib(gpu_bytes)} usable{far}", **USABLE)
    is_known = any(panel.prediction.reserved_bytes is not None for panel in panels)
    return [usable, *([Line2D([], [], label="peak reserved", **RESERVED)] if is_known else [])]


def _conditions(predictions: Sequence[Prediction], varying: Sequence[str]) -> list[str]:
    """Return the conditions that a reader needs to repeat the chart."""
    first = predictions[0].question
    setup = setup_line(first.setup) if len(predictions) == 1 else common_line(first.setup, varying)
    gpu = predictions[0].estimate.gpu
    facts = ["source: predicted, not measured", f"model: {first.model.describe()}", f"setup: {setup}"]
    if gpu is not None and gpu.usable_memory_source is not None:
        source = gpu.usable_memory_source
        facts.append(f"{gpu.name}'s usable memory: {source.title} ({source.date})")
    known = [one.estimate for one in predictions if one.required_headroom_bytes is not None]
    facts += [f"fits: ends without allocation retries; {line}" for line in required_lines(known)]
    return [
        *facts,
        f"torch {TORCH_VERSION} as modelled, {first.kernels.upper()} kernels, rank 0, a step in the steady state",
        "live bytes: torch.cuda.memory_allocated, without CUDA context and NCCL",
        "the axis counts allocations and frees in the order of the step, not seconds",
    ]


def _notes(panels: Sequence[MemoryPanel], refused: Sequence[Question]) -> list[str]:
    """Return a line for each thing that the chart does not show."""
    lines = []
    steps = panels[0].prediction.question.setup.gradient_accumulation_steps
    if steps > 3:
        lines.append(f"drawn: 3 of {steps} micro-batches; those between the first and the last are alike")
    if any(panel.prediction.estimate.for_eager for panel in panels):
        lines.append("torch.compile is on; the chart shows eager memory")
    for panel in panels:
        memory = panel.prediction.estimate.memory
        if memory.peak_phase == "load":
            lines.append(f"{panel.title}: loading, not drawn, is higher: {format_gib(memory.peak_allocated_bytes)}")
    reasons = dict.fromkeys(f"impossible: {title(question, ())}: {question.impossible}" for question in refused)
    return lines + list(reasons)[:3]
