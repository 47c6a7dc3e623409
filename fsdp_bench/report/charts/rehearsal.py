"""A rehearsal: allocated and reserved memory of the script from its start to its last step."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise

from fsdp_bench.plan.document import hardware_document
from fsdp_bench.plan.rehearsal import Rehearsal
from fsdp_bench.report.charts.axis import Axis, Tick, memory_unit
from fsdp_bench.report.charts.colors import Style
from fsdp_bench.report.charts.description import Area, Key, Line, Plot, Point, Slide
from fsdp_bench.report.charts.memory_timeline import DIVIDER, FAR_BELOW, PEAK, RESERVED, USABLE
from fsdp_bench.report.text.conditions import hardware_text
from fsdp_bench.report.text.rehearsal import place, verdict_line
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.units import format_gib

ALLOCATED = Style("blue", is_line=True, width=1.4)
SHADES = {"load": "shade", "forward": "white", "backward": "blue-shade", "optimizer": "orange-shade"}
"""The background of each phase."""


def rehearsal_slide(found: Rehearsal) -> Slide:
    """Return the chart of one rank.

    Raises:
        SpecError: if PyTorch's memory history of the script is not known.
    """
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
