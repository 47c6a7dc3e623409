"""One step as plots: memory over the step, and what runs when on each stream."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_bench.plan.chart_data.drawn import DrawnMemory, DrawnStreams, DrawnView
from fsdp_bench.plan.chart_data.memory_timeline import CATEGORIES
from fsdp_bench.report.charts.step import LEGEND_LABELS, STYLES
from fsdp_bench.report.html.blocks import BarGroup, BarLine, Bars, Lane, Lanes, Legend, Note, Piece, Plot, Shape, Tick
from fsdp_bench.report.html.scales import Scale, from_zero
from fsdp_bench.report.text.setups import spaced
from fsdp_bench.spec.units import GIB, MIB, format_gib, format_seconds

CATEGORY_NAMES = tuple(category.value for category in CATEGORIES)
FAR_BELOW = 0.2
"""If the peak is below this fraction of the GPU's memory, the GPU's memory is not in the chart."""

FEW_PHASES = 5
"""Most phases whose names fit side by side on a narrow screen."""
_SHORT = {"forward": "f", "loss": "l", "backward": "b", "optimizer": "o"}
_SHORT_MEANS = "; f forward, l loss, b backward, o optimizer"

STREAMS = {
    "compute": "operators",
    "all_gather_copy_in": "copy-in",
    "all_gather": "all-gather",
    "reduce_scatter": "reductions",
    "all_reduce": "all-reduce",
    "optimizer_offload": "optimizer copies",
}
ROLES = tuple(STYLES)
ORDER = ("load", "forward", "loss", "backward", "optimizer")


def memory_plot(memory: DrawnMemory, caption: str, usable: int | None, reserved: int | None = None) -> Plot:
    """Return live memory over one step, by category."""
    levels = [size for size in (usable, reserved) if size is not None]
    is_near = usable is not None and memory.peak_bytes >= FAR_BELOW * usable
    scale = from_zero([memory.peak_bytes, *(levels if is_near else [])])
    unit, name = (GIB, "GiB") if memory.peak_bytes >= GIB else (MIB, "MiB")
    y = Scale(0.0, scale.high / unit)
    shown = [name for name in CATEGORY_NAMES if any(any(phase.live_bytes.get(name, ())) for phase in memory.phases)]
    few = len(memory.phases) <= FEW_PHASES
    starts = [sum(phase.width for phase in memory.phases[:place]) * 100 for place in range(len(memory.phases))]
    lines = []
    for size, color in ((usable, "limit"), (reserved, "reserved")):
        if is_near and size is not None:
            height = 1000 - 10 * scale.at(size)
            lines.append(Shape(color, f"M0 {height:.1f}H1000", is_line=True))
    return Plot(
        caption=caption,
        x_title=f"allocations and frees in the order of the step, not seconds{'' if few else _SHORT_MEANS}",
        y_title=f"live bytes on one GPU, {name}",
        x_ticks=tuple(
            Tick(start + 50 * phase.width, phase.name if few else _SHORT.get(phase.name, phase.name))
            for start, phase in zip(starts, memory.phases, strict=True)
        ),
        y_ticks=y.ticks(),
        shapes=(*_stack(memory, shown, scale), *lines),
        notes=_level_notes(scale, usable if is_near else None, reserved if is_near else None),
        dividers=tuple(starts[1:]),
        legend=tuple(Legend(f"memory-{name}", spaced(name)) for name in shown),
        remarks=_peak_remarks(memory, usable, is_near),
        is_in_the_middle=True,
    )


def _level_notes(scale: Scale, usable: int | None, reserved: int | None) -> tuple[Note, ...]:
    notes = []
    if usable is not None:
        notes.append(Note(99.5, scale.at(usable), f"usable on the GPU {format_gib(usable)}", "limit", is_at_end=True))
    if reserved is not None:
        notes.append(Note(0.5, scale.at(reserved), f"peak reserved {format_gib(reserved)}"))
    return tuple(notes)


def _peak_remarks(memory: DrawnMemory, usable: int | None, is_near: bool) -> tuple[str, ...]:
    block = "" if memory.peak_block is None else f", block {memory.peak_block}"
    text = f"peak {format_gib(memory.peak_bytes)} in {memory.peak_phase}{block}, at {memory.peak_operator}"
    far = () if usable is None or is_near else (f"the GPU's {format_gib(usable)} usable are far above the chart",)
    return (text, *far)


def _stack(memory: DrawnMemory, shown: Sequence[str], scale: Scale) -> list[Shape]:
    """Return one area per category, each on top of the one before."""
    places, sizes = _moments(memory, shown)
    base = [0.0] * (len(places) - 1)
    shapes = []
    for name in shown:
        top = [low + size for low, size in zip(base, sizes[name], strict=True)]
        forth = "".join(_step_to(places, place, scale.at(value)) for place, value in enumerate(top))
        back = "".join(_step_back(places, place, scale.at(base[place])) for place in reversed(range(len(base))))
        shapes.append(Shape(f"memory-{name}", f"M0 {1000 - 10 * scale.at(base[0]):.1f}{forth}{back}Z"))
        base = top
    outline = "".join(_step_to(places, place, scale.at(value)) for place, value in enumerate(base))
    return [*shapes, Shape("outline", f"M0 {1000 - 10 * scale.at(base[0]):.1f}{outline}", is_line=True)]


def _moments(memory: DrawnMemory, shown: Sequence[str]) -> tuple[list[float], dict[str, list[int]]]:
    """Return where each moment begins, from 0 to 1000, and the end; and the bytes of each category."""
    places, sizes, start = list[float](), {name: list[int]() for name in shown}, 0.0
    for phase in memory.phases:
        count = max(map(len, phase.live_bytes.values()), default=0)
        for name in shown:
            own = list(phase.live_bytes.get(name, ()))
            sizes[name] += (own + [0] * count)[:count]
        places += [start + phase.width * 1000 * place / count for place in range(count)]
        start += phase.width * 1000
    return [*places, start], sizes


def _step_to(places: Sequence[float], place: int, percent: float) -> str:
    return f"V{1000 - 10 * percent:.1f}H{places[place + 1]:.1f}"


def _step_back(places: Sequence[float], place: int, percent: float) -> str:
    return f"V{1000 - 10 * percent:.1f}H{places[place]:.1f}"


def lanes(view: DrawnView, caption: str, remarks: tuple[str, ...] = ()) -> Lanes:
    """Return what each stream does in an interval of a step, and when communication is exposed."""
    span = (view.end - view.begin) or 1.0
    scale = Scale(view.begin * 1e3, (view.begin + span) * 1e3)
    known = [stream for stream in STREAMS if any(row.stream == stream for row in view.rows)]
    others = dict.fromkeys(row.stream for row in view.rows if row.stream not in STREAMS)
    found = [Lane("exposed", (Shape("exposed", _boxes(view.exposed, scale)),))]
    for stream in (*known, *others):
        rows = sorted((row for row in view.rows if row.stream == stream), key=lambda row: _place(row.role))
        shapes = tuple(Shape(_color(row.role), _boxes(row.spans, scale)) for row in rows)
        found.append(Lane(STREAMS.get(stream, stream), shapes))
    roles = sorted({row.role for row in view.rows}, key=_place)
    legend = [Legend(_color(role), LEGEND_LABELS.get(role, role)) for role in roles]
    return Lanes(
        caption,
        "milliseconds",
        scale.ticks(),
        tuple(found),
        (*legend, Legend("exposed", "exposed: a collective runs and no operator does")),
        remarks,
    )


def _place(role: str) -> int:
    return ROLES.index(role) if role in ROLES else len(ROLES)


def _color(role: str) -> str:
    return f"role-{role}" if role in ROLES else "role-cast"


def _boxes(spans: Sequence[tuple[float, float]], scale: Scale) -> str:
    found = []
    for begin, end in spans:
        left, right = 10 * scale.at(begin * 1e3), 10 * scale.at(end * 1e3)
        found.append(f"M{left:.2f} 0H{max(right, left + 0.4):.2f}V1000H{left:.2f}Z")
    return "".join(found)


def lanes_of(streams: DrawnStreams, num_drawn: int, num_micro_batches: int) -> tuple[Lanes, Lanes]:
    """Return the step as far as it is drawn, and a part of it enlarged."""
    exposed = streams.exposed_communication_seconds
    remarks = (
        f"{format_seconds(streams.step_seconds)} for what is drawn:"
        f" operators {format_seconds(streams.compute_seconds)},"
        f" collectives {format_seconds(streams.communication_seconds)}, of which {format_seconds(exposed)} exposed",
    )
    what = "The whole step"
    if num_drawn < num_micro_batches:
        what = f"{num_drawn} of the step's {num_micro_batches} micro-batches, and the optimizer"
    part = "Blocks in the middle of backward" if num_drawn == 1 else "A part of it, enlarged"
    whole = lanes(streams.whole, f"{what}, rank 0 (predicted)", remarks)
    return whole, lanes(streams.middle_of_backward, f"{part} (predicted)")


def breakdown_bars(breakdown: dict[str, int], caption: str) -> Bars:
    """Return what is alive at the peak, the largest part first."""
    total = sum(breakdown.values()) or 1
    parts = sorted(((name, size) for name, size in breakdown.items() if size), key=lambda part: -part[1])
    bars = [
        BarLine(
            spaced(name),
            f"{format_gib(size)}, {size / total:.1%}",
            (Piece(spaced(name), memory_color(name), 100 * size / parts[0][1]),),
        )
        for name, size in parts
    ]
    return Bars(caption, (BarGroup("", tuple(bars)),))


def phase_bars(phases: dict[str, int], caption: str, measured: dict[str, int] | None = None) -> Bars:
    """Return the peak of each phase, with a mark where it was measured."""
    sizes = [*phases.values(), *(measured or {}).values()]
    highest = max(sizes, default=0) or 1
    names = sorted(phases, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))
    bars = []
    for name in names:
        own = (measured or {}).get(name)
        note = "" if own is None else f"measured {format_gib(own)}"
        mark = None if own is None else 100 * own / highest
        piece = Piece(name, "predicted", 100 * phases[name] / highest)
        bars.append(BarLine(name, format_gib(phases[name]), (piece,), note, mark))
    legend = () if measured is None else (Legend("predicted", "predicted"), Legend("mark", "measured"))
    return Bars(caption, (BarGroup("", tuple(bars)),), legend)


def memory_color(category: str) -> str:
    """Return the colour of a category of memory."""
    return f"memory-{category}" if category in CATEGORY_NAMES else "memory-temporary"
