"""Rehearsals of a script: its memory to the last step; memory and speed of several values; the largest value.

Pictures raise SpecError where nothing was rehearsed that could be drawn.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise

from fsdp_bench.plan.document import hardware_document
from fsdp_bench.plan.estimate import Verdict
from fsdp_bench.plan.rehearsal import Rehearsal
from fsdp_bench.plan.script.each import in_order, speed_of
from fsdp_bench.plan.script.largest import LargestValue
from fsdp_bench.plan.script.rehearsals import Answered
from fsdp_bench.report.charts.axis import Axis, Tick, from_zero, memory_unit
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
)
from fsdp_bench.report.charts.memory_timeline import DIVIDER, FAR_BELOW, PEAK, RESERVED, USABLE
from fsdp_bench.report.text.common import UNKNOWN
from fsdp_bench.report.text.conditions import hardware_text
from fsdp_bench.report.text.each import conclusion, largest_line, title_of
from fsdp_bench.report.text.rehearsal import place, verdict_line
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.units import format_gib

ALLOCATED = Style("blue", is_line=True, width=1.4)
SHADES = {"load": "shade", "forward": "white", "backward": "blue-shade", "optimizer": "orange-shade"}
"""The background of each phase."""


def rehearsal_slide(found: Rehearsal) -> Slide:
    """Return the chart of one rank. Raises SpecError if the script's memory history is not known."""
    report = found.report
    if not report.curve:
        raise SpecError("chart: there is no memory history; the script never used the GPU, or records its own history")
    where = hardware_text(hardware_document(found.hardware), report.world_size)
    return Slide(
        f"Memory of a training script (rehearsed): {where}",
        verdict_line(found),
        (
            report.sentence,
            f"torch {report.torch} on a stand-in for NVIDIA's libraries",
            f"allocator: {report.allocator_settings or 'default settings'}",
            f"{format_gib(found.kept_free.num_bytes)} kept free {found.kept_free.source}",
        ),
        (memory_of_script(found),),
        notes=(f"Held at the peak: {', '.join(held)}",) if (held := held_texts(found)) else (),
        is_bad=found.fits is False,
    )


def memory_of_script(found: Rehearsal, heading: str = "") -> Plot:
    """Return allocated and reserved memory of a script whose memory history is known."""
    curve = found.report.curve
    assert curve
    highest = max(point[2] for point in curve)
    unit, unit_name = memory_unit(highest)
    is_near = highest >= FAR_BELOW * found.usable_bytes
    top = 1.08 * max(highest, found.available_bytes if is_near else 0) / unit or 1.0
    x = tuple(map(float, range(len(curve))))
    allocated, reserved = (tuple(point[which] / unit for point in curve) for which in (1, 2))
    shades, names = _phases(found, top)
    peak = max(range(len(x)), key=allocated.__getitem__)
    lines = [Line(DIVIDER, (name.value, name.value), (0.0, top)) for name in names]
    lines += [Line(ALLOCATED, x, allocated, is_step=True), Line(RESERVED, x, reserved, is_step=True)]
    legend = [Key(ALLOCATED, "allocated"), Key(RESERVED, "reserved")]
    if is_near:
        lines.append(Line(USABLE, (0.0, float(len(curve))), (found.available_bytes / unit,) * 2))
        legend.append(Key(USABLE, f"{format_gib(found.available_bytes)} that PyTorch can reserve"))
    below = Area(Style("blue", opacity=0.35), x, (0.0,) * len(x), allocated, is_step=True)
    order = "allocations and frees, in their order; blue: backward, orange: optimizer"
    return Plot(
        heading,
        Axis(order, 0.0, float(len(curve)), names=names, has_grid=False),
        Axis(f"memory of rank {found.report.rank}, {unit_name}", 0.0, top),
        (*shades, below),
        tuple(lines),
        (Point(PEAK, x[peak], allocated[peak], title="; ".join(["peak", *held_texts(found)])),),
        tuple(legend),
        (f"\u25bc peak {format_gib(curve[peak][1])}: {', '.join(held_texts(found)) or 'by unknown lines'}",),
    )


def _phases(found: Rehearsal, top: float) -> tuple[list[Area], tuple[Tick, ...]]:
    report = found.report
    times = [point[0] for point in report.curve or ()]
    ends = [(step, phase, bisect_right(times, moment)) for step, phase, moment in report.step_ends_us]
    starts = [0, *[end for _step, _phase, end in ends]]
    spans = [(begin, end, step, phase) for (begin, end), (step, phase, _) in zip(pairwise(starts), ends, strict=True)]
    shades = [
        Area(Style(SHADES[phase]), (float(begin), float(end)), (0.0, 0.0), (top, top))
        for begin, end, _, phase in spans
        if end > begin
    ]
    first = {step: begin for begin, _, step, _ in reversed(spans)}
    steps = sorted(step for step in first if step <= max(report.num_steps, 1))
    return shades, tuple(Tick(first[step], f"step {step}") for step in steps)


def held_texts(found: Rehearsal) -> list[str]:
    """Return the lines that hold most at the peak."""
    held = [one for one in found.report.lines_at_peak or () if one.line is not None][:3]
    return [f"{format_gib(one.num_bytes)} by {place(one.line)}" for one in held if one.line is not None]


MOST = 24
"""Most combinations in one picture that remain legible."""
FITS, BEYOND, UNFIT, SPEED = Style("blue"), Style("light-grey"), Style("brick"), Style("green")


def each_slide(answers: Sequence[Answered]) -> Slide:
    """Return memory and speed of combinations. Raises SpecError for too many, or if none was rehearsed."""
    check_number("chart", len(answers), MOST)
    ordered = in_order(answers)
    worst = _rehearsed(ordered)
    gpus = dict.fromkeys(one.gpu.name for one in worst)
    return Slide(
        f"Memory of a training script (rehearsed): {' or '.join(gpus)}, rank {worst[0].report.rank}",
        conclusion(ordered),
        _conditions(ordered, worst),
        (_memory_bars(ordered), *([_speed_bars(ordered)] if any(speed_of(one) for one in ordered) else [])),
        is_bad=not ordered[0].fits,
    )


def _rehearsed(answers: Iterable[Answered]) -> list[Rehearsal]:
    """Return what was rehearsed. Raises SpecError for nothing."""
    found = [one.worst for one in answers if one.worst is not None]
    if not found:
        raise SpecError("chart: nothing was rehearsed that could be drawn")
    return found


def _conditions(answers: Sequence[Answered], found: Sequence[Rehearsal]) -> tuple[str, ...]:
    """Return the conditions of rehearsals: the script, torch, and the GPUs' memory."""
    gpus = {one.gpu.name: one.available_bytes for one in found}
    kept = "; ".join(f"{format_gib(size)} that PyTorch can reserve on {name}" for name, size in gpus.items())
    torch = f"torch {found[0].report.torch} on a stand-in for NVIDIA's libraries"
    return next(one for one in answers if one.worst is not None).variant.template, torch, kept


def _memory_bars(answers: Sequence[Answered]) -> Bars:
    peaks = [one.worst.report.peak_reserved_bytes if one.worst else 0 for one in answers]
    unit, unit_name = memory_unit(max(peaks) or 1)
    legend = [Key(FITS, "allocated"), Key(BEYOND, "reserved beyond that")]
    legend += [Key(UNFIT, "does not fit")] if any(one.fits is False for one in answers) else []
    return Bars(
        "peak memory",
        (BarGroup("", tuple(_memory_bar(one, unit) for one in answers)),),
        axis=unit_name,
        scale=unit,
        levels=tuple(answers[0].variant.values),
        legend=tuple(legend),
    )


def _memory_bar(one: Answered, unit: float) -> Bar:
    labels, worst = tuple(one.variant.values.values()), one.worst
    if worst is None or worst.report.peak is None:
        return Bar(labels, (UNKNOWN,), is_result=False)
    allocated, reserved = worst.report.peak.allocated_bytes, worst.report.peak_reserved_bytes
    if worst.fits is False:
        return Bar(labels, (_unfit_word(worst),), (Piece("does not fit", reserved, UNFIT),), color="failure")
    pieces = (Piece("allocated", allocated, FITS), Piece("reserved", reserved - allocated, BEYOND))
    return Bar(labels, (f"{reserved / unit:.1f}",), pieces)


def _unfit_word(found: Rehearsal | None) -> str:
    if found is None or found.fits is not False:
        return UNKNOWN
    return "with retries" if found.verdict is Verdict.RUNS_WITH_RETRIES else "does not fit"


def _speed_bars(answers: Sequence[Answered]) -> Bars:
    bars = []
    for one in answers:
        labels, speed = tuple(one.variant.values.values()), speed_of(one)
        if speed is None or one.fits is False:
            bars.append(Bar(labels, (_unfit_word(one.worst),), is_result=False))
        else:
            bars.append(Bar(labels, (f"{speed:,.0f}",), (Piece("speed", speed, SPEED),)))
    legend = (Key(SPEED, "speed, predicted from what was issued"),)
    levels = tuple(answers[0].variant.values)
    return Bars("predicted", (BarGroup("", tuple(bars)),), axis="tokens/s per GPU", levels=levels, legend=legend)


def largest_slide(found: Sequence[LargestValue]) -> Slide:
    """Return memory over a value, or bars of combinations. Raises SpecError for too many, or if none was rehearsed."""
    check_number("chart", len(found), MOST)
    answers = [one for each in found for one in each.tried.values()]
    worst, name = _rehearsed(answers), title_of(found[0].quantity)
    return Slide(
        f"{name[0].upper()}{name[1:]}: a training script (rehearsed)",
        largest_line(found),
        _conditions(answers, worst),
        (_memory_over_value(found[0]) if len(found) == 1 else _largest_bars(found),),
        is_bad=not any(one.fits for one in found),
    )


def _memory_over_value(one: LargestValue) -> Plot:
    rehearsed = {value: each.worst for value, each in one.tried.items() if each.worst is not None}
    limit = max(worst.most_reserved_bytes for worst in rehearsed.values())
    unit, unit_name = memory_unit(limit)
    sizes = [worst.report.peak_reserved_bytes / unit for worst in rehearsed.values()]
    x = from_zero(one.quantity.name.replace("_", " "), map(float, rehearsed))
    y = from_zero(f"peak reserved memory, {unit_name}", [*sizes, limit / unit])
    lines = [Line(USABLE, (x.low, x.high), (limit / unit,) * 2)]
    if one.largest is not None and one.next is not None:
        lines.append(Line(DIVIDER, ((one.largest + one.next) / 2,) * 2, (y.low, y.high)))
    points = [
        Point(FITS if worst.fits else UNFIT, float(value), size, title=str(value), is_hollow=worst.fits is None)
        for (value, worst), size in zip(rehearsed.items(), sizes, strict=True)
    ]
    legend = (
        Key(FITS, "fits"),
        Key(UNFIT, "does not fit, or is unknown (hollow)"),
        Key(USABLE, f"{format_gib(limit)} that PyTorch can reserve"),
    )
    return Plot("", x, y, lines=tuple(lines), points=tuple(points), legend=legend)


def _largest_bars(found: Sequence[LargestValue]) -> Bars:
    groups = (BarGroup("", tuple(map(_largest_bar, found))),)
    return Bars("", groups, axis=title_of(found[0].quantity), levels=tuple(found[0].values))


def _largest_bar(one: LargestValue) -> Bar:
    labels = tuple(one.values.values())
    if one.largest is None:
        return Bar(labels, ("nothing fits" if one.fits is False else UNKNOWN,), is_result=False)
    return Bar(labels, (str(one.largest),), (Piece(one.quantity.name, one.largest, FITS),))
