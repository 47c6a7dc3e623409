"""Memory over one training step: live bytes by category; several setups are side by side on one scale."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fsdp_bench.plan.chart_data import DrawnMemory, drawn_memory
from fsdp_bench.plan.document import hardware_document
from fsdp_bench.plan.prediction import Prediction
from fsdp_bench.plan.question import Question
from fsdp_bench.plan.setup_text import spaced, title, varying
from fsdp_bench.report.charts.axis import Axis, Tick, memory_unit
from fsdp_bench.report.charts.colors import Style
from fsdp_bench.report.charts.description import (
    Area,
    Bar,
    BarGroup,
    Bars,
    Key,
    Line,
    Piece,
    Plot,
    Point,
    Slide,
    check_number,
    stacked,
)
from fsdp_bench.report.text.conditions import conditions, hardware_text, sentences
from fsdp_bench.report.text.prediction import verdict
from fsdp_bench.simulate.events import Category
from fsdp_bench.spec.units import format_gib

MOST = 6
"""Most setups in one picture that remain legible."""
COLUMNS = {1: 1, 2: 2, 3: 3, 4: 2, 5: 3, 6: 3}
"""Plots beside each other, by their number."""
FAR_BELOW = 0.2
"""If the highest peak is below this fraction of the GPU's memory, the GPU's memory is not in the chart."""
MOMENTS = 900
"""Most moments of a step that are drawn in all plots beside each other."""

STYLES = {
    Category.PARAMETERS.value: Style("blue"),
    Category.OPTIMIZER_STATE.value: Style("orange", "///"),
    Category.GRADIENTS.value: Style("green", "--"),
    Category.UNSHARDED_PARAMETERS.value: Style("sky", "\\\\\\"),
    Category.REDUCTION_BUFFERS.value: Style("plum"),
    Category.ACTIVATIONS.value: Style("pale"),
    Category.LOGITS.value: Style("red", "..."),
    Category.TEMPORARY.value: Style("yellow", "xx"),
}
"""The styles of the categories, from the bottom of the stack to its top."""
USABLE = Style("failure", is_line=True, dash=(7, 3), width=2.2)
RESERVED = Style("ink", is_line=True, dash=(1, 1.5))
PEAK = Style("ink", sign="v")
DIVIDER = Style("faint", is_line=True, dash=(2, 2), width=1.0)
SHADE = Style("shade")

PREDICTED, MEASURED = Style("sky"), Style("ink", sign="D")
_ORDER_OF_PHASES = ("load", "forward", "loss", "backward", "optimizer")
ORDER_OF_EVENTS = "the axis counts allocations and frees in the order of the step, not seconds"
FEW_PHASES = 5
"""Most phases whose names fit side by side on a narrow screen."""
_SHORT = {"forward": "fwd", "backward": "bwd", "optimizer": "opt."}


def memory_plot(
    memory: DrawnMemory,
    heading: str,
    *,
    usable: int | None,
    reserved: int | None = None,
    gpu: str = "the GPU",
    highest: int | None = None,
    are_names_short: bool | None = None,
    is_bad: bool = False,
) -> Plot:
    """Return live memory over one step, by category.

    Lines are at the ``usable`` bytes of the GPU and at its ``reserved`` peak. Plots on the same scale have the same
    ``highest`` peak. Phases have short names by default if there are many. ``is_bad``: the heading says that it does
    not fit.
    """
    highest = max(highest or 0, memory.peak_bytes)
    unit, unit_name = memory_unit(highest)
    is_near = usable is not None and highest >= FAR_BELOW * usable
    top = 1.06 * (max(highest, usable or 0) if is_near else highest) or 1.0
    x, layers = _moments(memory, unit)
    areas, outline = stacked(x, [(STYLES.get(name, STYLES["temporary"]), sizes) for name, sizes in layers.items()])
    peak = max(range(len(x)), key=outline.y.__getitem__)
    levels = [(USABLE, usable), (RESERVED, reserved if usable is not None else None)]
    lines = [Line(style, (0.0, 1.0), (size / unit,) * 2) for style, size in levels if size is not None and size <= top]
    far = "" if is_near else ", far above"
    words = {USABLE: f"{gpu}: {format_gib(usable or 0)} usable{far}", RESERVED: "peak reserved"}
    is_short = len(memory.phases) > FEW_PHASES if are_names_short is None else are_names_short
    names, dividers, shades = _phases(memory, is_short, top / unit)
    return Plot(
        heading,
        Axis("", 0.0, 1.0, names=names, has_grid=False),
        Axis(f"predicted live bytes on one GPU, {unit_name}", 0.0, top / unit),
        areas=(*shades, *areas),
        lines=(*dividers, outline, *lines),
        points=(Point(PEAK, x[peak], outline.y[peak], title="peak"),),
        legend=(
            *(Key(STYLES.get(name, STYLES["temporary"]), spaced(name)) for name in layers),
            *(Key(style, words[style]) for style, size in levels if size is not None),
        ),
        remarks=(f"\u25bc {peak_text(memory)}; {ORDER_OF_EVENTS}",),
        is_bad=is_bad,
    )


def _moments(memory: DrawnMemory, unit: float) -> tuple[list[float], dict[str, list[float]]]:
    """Return where each moment begins, from 0 to 1 and with the end; and the size of each category that is alive."""
    names = [*STYLES, *dict.fromkeys(n for phase in memory.phases for n in phase.live_bytes if n not in STYLES)]
    places, sizes, start = list[float](), {name: list[float]() for name in names}, 0.0
    for phase in memory.phases:
        count = max(map(len, phase.live_bytes.values()), default=0)
        for name in names:
            own = [size / unit for size in phase.live_bytes.get(name, ())]
            sizes[name] += (own + [0.0] * count)[:count]
        places += [start + phase.width * place / count for place in range(count)]
        start += phase.width
    shown = {name: [*own, own[-1]] for name, own in sizes.items() if any(own)}
    return [*places, start], shown


def _phases(memory: DrawnMemory, is_short: bool, top: float) -> tuple[tuple[Tick, ...], list[Line], list[Area]]:
    names, dividers, shades, start = list[Tick](), list[Line](), list[Area](), 0.0
    for phase in memory.phases:
        name = _SHORT.get(phase.name, phase.name) if is_short else phase.name
        names.append(Tick(start + phase.width / 2, name))
        dividers += [Line(DIVIDER, (start, start), (0.0, top))] if start else []
        if phase.name in ("loss", "optimizer"):
            shades.append(Area(SHADE, (start, start + phase.width), (0.0, 0.0), (top, top)))
        start += phase.width
    return tuple(names), dividers, shades


def peak_text(memory: DrawnMemory, with_operator: bool = True) -> str:
    """Return the peak and where it is."""
    block = "" if memory.peak_block is None else f", block {memory.peak_block}"
    operator = f", at {memory.peak_operator}" if with_operator else ""
    return f"peak {format_gib(memory.peak_bytes)} in {memory.peak_phase}{block}{operator}"


def breakdown_bars(breakdown: Mapping[str, int], heading: str) -> Bars:
    """Return what is alive at the peak, the largest part first."""
    total = sum(breakdown.values()) or 1
    parts = sorted(((name, size) for name, size in breakdown.items() if size), key=lambda part: -part[1])
    bars = [
        Bar(
            (spaced(name),),
            (f"{format_gib(size)}, {size / total:.1%}",),
            (Piece(spaced(name), size, STYLES.get(name, STYLES["temporary"])),),
        )
        for name, size in parts
    ]
    return Bars(heading, (BarGroup("", tuple(bars)),))


def phase_bars(phases: Mapping[str, int], heading: str, measured: Mapping[str, int] | None = None) -> Bars:
    """Return the peak of each phase, with a mark where it was measured."""
    bars = []
    for name in sorted(phases, key=lambda name: (*_ORDER_OF_PHASES, name).index(name)):
        own = (measured or {}).get(name)
        words = (format_gib(phases[name]), *([] if own is None else [f"measured {format_gib(own)}"]))
        bars.append(Bar((name,), words, (Piece(name, phases[name], PREDICTED),), mark=own))
    legend = () if measured is None else (Key(PREDICTED, "predicted"), Key(MEASURED, "measured"))
    return Bars(heading, (BarGroup("", tuple(bars)),), legend=legend)


class _Panel(NamedTuple):
    """One setup in the picture."""

    prediction: Prediction
    memory: DrawnMemory
    title: str


def timeline_slide(predictions: Sequence[Prediction], refused: Sequence[Question]) -> Slide:
    """Return one setup's step, or several side by side, and refused ones below.

    Raises SpecError for more than one picture shows legibly.
    """
    check_number("chart", len(predictions), MOST)
    differing = varying([prediction.values for prediction in predictions])
    columns = COLUMNS[len(predictions)]
    panels = [
        _Panel(
            one, drawn_memory(one.question.simulated, most=MOMENTS // columns), title(one.question.values, differing)
        )
        for one in predictions
    ]
    first, is_alone = predictions[0].question, len(panels) == 1
    name = first.model.name
    answer = f"{name}: {verdict(predictions[0])}".partition("; it runs out")[0]
    place = hardware_text(hardware_document(first.hardware), first.setup.world_size)
    return Slide(
        f"Memory over one training step (predicted): {place}",
        answer if is_alone else f"{name}, {len(panels)} setups on one scale",
        tuple(_conditions(predictions, differing)),
        tuple(
            memory_plot(
                panel.memory,
                _heading(panel, is_alone),
                usable=panel.prediction.gpu_bytes,
                reserved=panel.prediction.reserved_bytes,
                gpu=panel.prediction.gpu.name if panel.prediction.gpu else "the GPU",
                highest=max(one.memory.peak_bytes for one in panels),
                are_names_short=len(panel.memory.phases) * (1 if is_alone else 3) >= 12,
                is_bad=panel.prediction.fits is False,
            )
            for panel in panels
        ),
        notes=tuple(_notes(panels, refused)),
        is_bad=is_alone and predictions[0].fits is False,
        columns=columns,
    )


def _heading(panel: _Panel, is_alone: bool) -> str:
    """Return the setup's name and verdict if there are several; the peak, and what no line of the plot shows."""
    prediction = panel.prediction
    reason = _hidden_reason(prediction)
    peak = peak_text(panel.memory, is_alone)
    if reason and not is_alone:
        peak = f"peak {format_gib(panel.memory.peak_bytes)}"
    if prediction.reserved_bytes is not None:
        peak += f"; reserved {format_gib(prediction.reserved_bytes)}"
    fits = "fit unknown" if prediction.verdict is None else prediction.verdict.text
    return ("" if is_alone else f"{panel.title}: {fits}\n") + f"\u25bc {peak}{reason}"


def _hidden_reason(prediction: Prediction) -> str:
    """Return why a setup does not fit, or an empty text if it fits or the chart's lines show the reason."""
    reading = prediction.allocator
    if prediction.fits is not False:
        return ""
    if reading.out_of_memory is not None:
        is_seen = prediction.memory.peak_allocated_bytes > (prediction.gpu_bytes or 0)
        if is_seen:
            return ""
        kept = format_gib(prediction.required_headroom.num_bytes)
        return f"; it reserves {format_gib(prediction.needed_bytes)}, {kept} are kept free"
    if count := reading.num_alloc_retries:
        return f" only with {count} allocation {'retry' if count == 1 else 'retries'}"
    return "; host memory is too small"


def _conditions(predictions: Sequence[Prediction], differing: Sequence[str]) -> list[str]:
    answers = [one.document(with_time=False, with_communication=False) for one in predictions]
    return [
        "source: predicted, not measured, a step in the steady state",
        *sentences(conditions(answers, differing)),
        "fits: ends without allocation retries",
        "live bytes: torch.cuda.memory_allocated, without CUDA context and NCCL",
        ORDER_OF_EVENTS,
    ]


def _notes(panels: Sequence[_Panel], refused: Sequence[Question]) -> list[str]:
    lines = []
    steps = panels[0].prediction.setup.gradient_accumulation_steps
    if steps > 3:
        lines.append(f"drawn: 3 of {steps} micro-batches; those between the first and the last are alike")
    if any(panel.prediction.for_eager for panel in panels):
        lines.append("torch.compile is on; the chart shows eager memory")
    for panel in panels:
        memory = panel.prediction.memory
        if memory.peak_phase == "load":
            lines.append(f"{panel.title}: loading, not drawn, is higher: {format_gib(memory.peak_allocated_bytes)}")
    reasons = dict.fromkeys(f"impossible: {title(question.values, ())}: {question.impossible}" for question in refused)
    return lines + list(reasons)[:3]
