"""The picture of predicted memory over one training step; several setups stand side by side on one scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fsdp_bench.plan.question import Prediction, Question
from fsdp_bench.report.charts.axis import FONT, HEADER_FONT, INK, LINE
from fsdp_bench.report.charts.canvas import EDGE, FAILURE, HEIGHT, WIDTH, new_figure, scale_axis, text_width, write
from fsdp_bench.report.charts.memory_steps import CATEGORIES, Timeline, timeline
from fsdp_bench.report.text.prediction import common_line, setup_line, title, varying_fields
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
"""Setups that one picture shows legibly."""

ROWS = {1: (1, 1), 2: (1, 2), 3: (1, 3), 4: (2, 2), 5: (2, 3), 6: (2, 3)}
"""Rows and columns of panels by their number."""

NEAR = 0.2
"""Part of the card's memory that the highest peak needs for the card's limit to be on the scale."""

MARKER = 18.0
"""Pixels over the highest line, for the mark of a peak."""

NARROWEST = 50.0
"""Pixels of the narrowest phase, as wide as its name."""

LEFT, RIGHT, GAP_X, GAP_Y = 84.0, 30.0, 34.0, 98.0
"""Pixels around and between panels."""

# Okabe and Ito's palette; neighbours differ in lightness, and hatches tell them apart in black and white.
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
"""How the level lines are drawn."""


@dataclass(frozen=True)
class Panel:
    """One setup in the picture."""

    prediction: Prediction
    timeline: Timeline
    title: str


def timeline_figure(predictions: Sequence[Prediction], refused: Sequence[Question]) -> Figure:
    """Return the picture of one setup's step, or of several side by side.

    Args:
        predictions: setups of one model on the same hardware, in the order of the panels.
        refused: combinations that cannot run; they are named under the picture.

    Raises:
        SpecError: for more setups than a picture shows.
    """
    if len(predictions) > MOST:
        raise SpecError(f"chart: {len(predictions)} setups are too many for one picture; at most {MOST}")
    figure = new_figure()
    columns = ROWS[len(predictions)][1]
    pixels = (WIDTH - LEFT - RIGHT - (columns - 1) * GAP_X) / columns
    varying = varying_fields([prediction.question for prediction in predictions])
    panels = [_panel(prediction, varying, pixels) for prediction in predictions]
    footer = _wrapped(_conditions(predictions, varying), WIDTH - 2 * EDGE) + _notes(panels, refused)
    for index, line in enumerate(footer):
        write(figure, (len(footer) - index) * LINE - 4, line, size=FONT, color="#444444")
    write(figure, HEIGHT - 34, "Predicted memory over one training step", size=18, weight="bold")
    subtitle, good = _subtitle(panels)
    write(figure, HEIGHT - 66, subtitle, size=13, color=INK if good else FAILURE)
    top = HEIGHT - 112 - _legend(figure, panels) * LINE
    scale, unit = (GIB, "GiB") if _highest(panels) >= GIB else (MIB, "MiB")
    write(figure, top, f"predicted live bytes on one GPU, {unit}", size=12)
    _place(figure, panels, scale, top=top - (72 if len(panels) > 1 else 46), bottom=len(footer) * LINE + 46)
    return figure


def _place(figure: Figure, panels: Sequence[Panel], scale: float, top: float, bottom: float) -> None:
    """Draw the panels between two heights, row by row, all on one scale."""
    rows, columns = ROWS[len(panels)]
    width = (WIDTH - LEFT - RIGHT - (columns - 1) * GAP_X) / columns
    height = (top - bottom - (rows - 1) * GAP_Y) / rows
    limit = _limit(panels, height)
    for index, panel in enumerate(panels):
        row, column = divmod(index, columns)
        x = LEFT + column * (width + GAP_X)
        y = bottom + (rows - 1 - row) * (height + GAP_Y)
        axes = figure.add_axes((x / WIDTH, y / HEIGHT, width / WIDTH, height / HEIGHT))
        _draw_panel(axes, panel, scale, limit, is_first=column == 0, is_alone=len(panels) == 1)


def _panel(prediction: Prediction, varying: Sequence[str], pixels: float) -> Panel:
    made = timeline(prediction.question, round(pixels / 1.5), NARROWEST / pixels)
    return Panel(prediction, made, title(prediction.question, varying))


def _subtitle(panels: Sequence[Panel]) -> tuple[str, bool]:
    """Return the answer, or for several panels the model, and whether it is no bad news."""
    first = panels[0].prediction
    model = first.question.model
    if len(panels) > 1:
        return f"{model.name}, {len(panels)} setups on one scale", True
    text = f"{model.name}: {verdict(first)}".partition("; it runs out")[0]
    return text, first.fits is not False


def _highest(panels: Sequence[Panel]) -> int:
    return max(panel.timeline.peak.moment.total for panel in panels)


def _limit(panels: Sequence[Panel], height: float) -> float:
    """Return the bytes at the top of every axis of so many pixels.

    The highest peak has room for its mark, and the card's memory is on the scale where a peak comes near it.
    """
    highest, card = _highest(panels), panels[0].prediction.estimate.gpu_bytes
    if card is not None and highest >= NEAR * card:
        highest = max(highest, card)
    return highest * height / (height - MARKER)


def _draw_panel(axes: Axes, panel: Panel, scale: float, limit: float, *, is_first: bool, is_alone: bool) -> None:
    axes.set_xlim(0, 1)
    axes.set_ylim(0, limit / scale)
    axes.set_xticks([])
    scale_axis(axes)
    axes.tick_params(axis="y", labelleft=is_first)
    _draw_stack(axes, panel.timeline, scale)
    _draw_phases(axes, panel.timeline)
    _draw_card(axes, panel, scale)
    axes.plot([panel.timeline.peak.x], [panel.timeline.peak.moment.total / scale], marker="v", markersize=8,
              color="black", zorder=6, clip_on=False)  # fmt: skip
    _write_over(axes, _peak_words(panel, is_alone), FONT, 5.0)
    if not is_alone:
        prediction = panel.prediction
        fits = "fit unknown" if prediction.verdict is None else prediction.verdict.words
        _title(axes, f"{panel.title}: {fits}", INK if prediction.fits is not False else FAILURE)


def _title(axes: Axes, text: str, color: str) -> None:
    size = _fitting(axes, text, HEADER_FONT, True)
    axes.set_title(text, loc="left", fontsize=size, weight="bold", pad=22.0, color=color)


def _write_over(axes: Axes, text: str, font: float, above: float) -> None:
    """Write a line over a panel, so many points above it, where it covers nothing."""
    axes.annotate(text, (0, 1), (0, above), xycoords="axes fraction", textcoords="offset points", ha="left",
                  va="bottom", fontsize=_fitting(axes, text, font, False), color=INK)  # fmt: skip


def _fitting(axes: Axes, text: str, font: float, bold: bool) -> float:
    """Return the font's size, or the smaller one in which the text is as wide as the panel."""
    return min(font, 0.97 * font * float(axes.bbox.width) / text_width(text, font, bold))


def _peak_words(panel: Panel, is_alone: bool) -> str:
    """Return how high the marked moment is and where, what is reserved, and why it does not fit where no line shows it.

    A panel among several has no room for the operator, nor for the place where there is a reason to be told.
    """
    made, prediction = panel.timeline, panel.prediction
    moment, reason = made.peak.moment, _hidden_reason(prediction)
    where = f" in {made.peak_phase}" if moment.block is None else f" in {made.peak_phase}, block {moment.block}"
    where = f"{where}, at {moment.operator}" if is_alone else "" if reason else where
    told = f"\u25bc peak {format_gib(moment.total)}{where}"
    if prediction.reserved_bytes is not None:
        told += f"; reserved {format_gib(prediction.reserved_bytes)}"
    return told + reason


def _hidden_reason(prediction: Prediction) -> str:
    """Return why a setup does not fit where the picture's lines do not show it, else an empty text."""
    estimate, reading = prediction.estimate, prediction.estimate.allocator
    if prediction.fits is not False:
        return ""
    if reading.out_of_memory is not None:
        is_seen = estimate.memory.peak_allocated_bytes > (estimate.gpu_bytes or 0)
        if is_seen:
            return ""
        kept = format_gib(estimate.required_headroom.num_bytes)
        return f"; its segments need {format_gib(prediction.needed_bytes)}, {kept} are kept free"
    if count := reading.num_alloc_retries:
        return f" only with {count} allocation {'retry' if count == 1 else 'retries'}"
    return "; host memory is too small"


def _draw_stack(axes: Axes, made: Timeline, scale: float) -> None:
    """Fill one step-shaped band a category, each over the one before."""
    x = [column.x for column in made.columns] + [1.0]
    base = [0.0] * len(x)
    for place, category in enumerate(CATEGORIES):
        sizes = [column.moment.live[place] / scale for column in made.columns]
        top = [low + size for low, size in zip(base, [*sizes, sizes[-1]], strict=True)]
        if max(sizes) > 0:
            color, hatch = STYLES[category]
            axes.fill_between(x, base, top, step="post", facecolor=color, hatch=hatch, edgecolor="#00000090",
                              linewidth=0.0, zorder=2)  # fmt: skip
            axes.step(x, top, where="post", color=INK, linewidth=0.5, zorder=2.5)
        base = top
    axes.step(x, base, where="post", color="black", linewidth=1.3, zorder=3)


def _draw_phases(axes: Axes, made: Timeline) -> None:
    """Mark where phases begin, and name them under the axis; a name that has no room is cut."""
    for index, span in enumerate(made.spans):
        if span.name in ("loss", "optimizer"):
            axes.axvspan(span.start, span.end, color="#F3F3F3", linewidth=0, zorder=0)
        if index:
            axes.axvline(span.start, color="#666666", linewidth=1.0, linestyle=(0, (2, 2)), zorder=3.5)
        room = (span.end - span.start) * axes.bbox.width - 4
        name = next((text for text in (span.name, _SHORT[span.name]) if text_width(text, FONT) <= room), "")
        axes.annotate(name, ((span.start + span.end) / 2, 0), (0, -14), xycoords=axes.get_xaxis_transform(),
                      textcoords="offset points", ha="center", va="baseline", fontsize=FONT, color=INK,
                      annotation_clip=False)  # fmt: skip


_SHORT = {"forward": "fwd", "loss": "loss", "backward": "bwd", "optimizer": "opt."}


def _draw_card(axes: Axes, panel: Panel, scale: float) -> None:
    """Draw what a process can use of the card, and the peak that the caching allocator reserves."""
    card, reserved = panel.prediction.estimate.gpu_bytes, panel.prediction.reserved_bytes
    if card is None:
        return
    for num_bytes, style, order in ((card, USABLE, 5.0), (reserved, RESERVED, 4.0)):
        if num_bytes is not None and num_bytes / scale <= axes.get_ylim()[1]:
            axes.axhline(num_bytes / scale, zorder=order, **style)


def _legend(figure: Figure, panels: Sequence[Panel]) -> int:
    """Explain the categories that the picture has, in the order of the stack; return the rows that this takes."""
    from matplotlib.patches import Patch

    shown = [category for place, category in enumerate(CATEGORIES)
             if any(column.moment.live[place] for panel in panels for column in panel.timeline.columns)]  # fmt: skip
    handles: list[Artist] = [
        Patch(facecolor=STYLES[category][0], hatch=STYLES[category][1], edgecolor=INK, linewidth=0.8,
              label=category.value.replace("_", " "))
        for category in shown
    ]  # fmt: skip
    lines = _lines(panels)
    needed = sum(text_width(str(handle.get_label()), FONT) + 75 for handle in (*handles, *lines))
    rows = 1 if needed <= WIDTH - 2 * EDGE else 2
    handles += lines
    figure.legend(handles=handles, loc="upper left", bbox_to_anchor=((EDGE - 7) / WIDTH, 1 - 80 / HEIGHT),
                  frameon=False, fontsize=FONT, ncols=-(-len(handles) // rows), columnspacing=1.2, labelspacing=0.25,
                  handlelength=2.2, borderpad=0.3)  # fmt: skip
    return rows


def _lines(panels: Sequence[Panel]) -> list[Artist]:
    """Explain the level lines; the card's tells where it is, also where that is far above the picture."""
    from matplotlib.lines import Line2D

    prediction = panels[0].prediction
    card, gpu = prediction.estimate.gpu_bytes, prediction.estimate.gpu
    if card is None or gpu is None:
        return []
    far = "" if _highest(panels) >= NEAR * card else ", far above"
    lines: list[Artist] = [Line2D([], [], label=f"{gpu.name}: {format_gib(card)} usable{far}", **USABLE)]
    if any(panel.prediction.reserved_bytes is not None for panel in panels):
        lines.append(Line2D([], [], label="peak reserved", **RESERVED))
    return lines


def _conditions(predictions: Sequence[Prediction], varying: Sequence[str]) -> list[str]:
    """Return what a reader needs to know to repeat the picture."""
    first = predictions[0].question
    setup = setup_line(first.setup) if len(predictions) == 1 else common_line(first.setup, varying)
    cluster, gpu = predictions[0].estimate.cluster, predictions[0].estimate.gpu
    told = ["source: predicted, not measured", f"model: {first.model.describe()}", f"setup: {setup}"]
    if cluster is not None:
        told.append(f"hardware: {cluster.num_nodes} x {cluster.server.name}, {cluster.gpus_per_node} GPUs each")
    if gpu is not None and gpu.usable_memory_source is not None:
        source = gpu.usable_memory_source
        told.append(f"{gpu.name}'s usable memory: {source.title} ({source.date})")
    known = [one.estimate for one in predictions if one.required_headroom_bytes is not None]
    told += [f"fits: ends without allocation retries; {line}" for line in required_lines(known)]
    kernels = "CUDA" if first.kernels == "cuda" else "CPU"
    told.append(f"torch {TORCH_VERSION} as modelled, {kernels} kernels, rank 0, a step in the steady state")
    told.append("live bytes: torch.cuda.memory_allocated, without CUDA context and NCCL")
    told.append("the axis counts allocations and frees in the order of the step, not seconds")
    return told


def _notes(panels: Sequence[Panel], refused: Sequence[Question]) -> list[str]:
    """Return a line for everything that the picture leaves out."""
    lines = []
    steps = panels[0].prediction.question.setup.gradient_accumulation_steps
    if steps > 3:
        lines.append(f"of {steps} micro-batches three are drawn: those between the first and the last are alike")
    if any(panel.prediction.estimate.for_eager for panel in panels):
        lines.append("the setup compiles; drawn is eager")
    for panel in panels:
        memory = panel.prediction.estimate.memory
        if memory.peak_phase == "load":
            peak = format_gib(memory.peak_allocated_bytes)
            lines.append(f"{panel.title}: loading, which is not drawn, is higher: {peak}")
    reasons = dict.fromkeys(f"impossible: {title(question, ())}: {question.impossible}" for question in refused)
    return lines + list(reasons)[:3]


def _wrapped(parts: Sequence[str], width: float) -> list[str]:
    """Join facts with semicolons into lines that are not wider than that, broken at blanks; words are measured once."""
    blank = text_width("n n", FONT) - text_width("nn", FONT)
    lines: list[list[str]] = [[]]
    room = width
    for word in "; ".join(parts).split(" "):
        needed = text_width(word, FONT) + 2 * blank  # extents leave out the sides of a word's letters
        if needed > room and lines[-1]:
            lines.append([])
            room = width
        lines[-1].append(word)
        room -= needed - 0.7 * blank
    return [" ".join(line) for line in lines]
