"""The chart of a rehearsal: allocated and reserved memory of the script from its start to its last step."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING

from fsdp_bench.plan.rehearsal import Rehearsal
from fsdp_bench.report.charts.figure import FAILURE, INK, TEXT, legend, new_frame, value_axis
from fsdp_bench.report.charts.memory_timeline import USABLE
from fsdp_bench.report.text.common import hardware_text
from fsdp_bench.report.text.rehearsal import place, verdict_line
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.units import GIB, MIB, format_gib

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHADES = {"load": "#F3F3F3", "forward": "#FFFFFF", "backward": "#E8F1F8", "optimizer": "#FDF1DC"}
"""The background of each phase."""
FAR_BELOW_LIMIT = 0.2
"""If the highest point is below this fraction of the GPU's memory, the GPU's limit is outside of the chart."""


def draw(found: Rehearsal) -> Figure:
    """Return the chart.

    Raises:
        SpecError: if PyTorch's memory history of the script is not known.
    """
    report = found.report
    if not report.curve:
        raise SpecError("chart: there is no memory history; the script never used the GPU, or records its own history")
    frame = new_frame(
        f"Memory of a training script (rehearsed): {hardware_text(found.hardware, report.world_size)}",
        verdict_line(found),
        [
            report.sentence,
            f"torch {report.torch} on a stand-in for NVIDIA's libraries",
            f"allocator: {report.allocator_settings or 'default settings'}",
            f"{format_gib(found.kept_free.num_bytes)} kept free {found.kept_free.source}",
        ],
        _notes(found),
        INK if found.fits is not False else FAILURE,
    )
    axes = frame.body.subplots()
    value_axis(axes)
    highest = max(point[2] for point in report.curve)
    scale, unit = (GIB, "GiB") if highest >= GIB else (MIB, "MiB")
    _shade_phases(axes, found)
    handles = _draw_curves(axes, found, scale)
    if highest >= FAR_BELOW_LIMIT * found.usable_bytes:
        label = f"{format_gib(found.available_bytes)} that PyTorch can reserve"
        handles.append(axes.axhline(found.available_bytes / scale, label=label, **USABLE))
        highest = max(highest, found.available_bytes)
    axes.set_ylim(0, 1.08 * highest / scale)
    axes.set_xlim(0, len(report.curve))
    axes.set_xlabel(
        "allocations and frees, in their order; white forward, blue backward, orange optimizer", fontsize=TEXT
    )
    frame.body.supylabel(f"memory of rank {report.rank}, {unit}", fontsize=12)
    legend(frame, handles)
    return frame.figure


def _draw_curves(axes: Axes, found: Rehearsal, scale: float) -> list[Artist]:
    assert found.report.curve is not None
    allocated = [point[1] / scale for point in found.report.curve]
    reserved = [point[2] / scale for point in found.report.curve]
    x = range(len(allocated))
    axes.fill_between(x, allocated, step="post", color="#0072B2", alpha=0.35, linewidth=0)
    handles: list[Artist] = []
    handles += axes.step(x, allocated, where="post", color="#0072B2", linewidth=1.4, label="allocated")
    handles += axes.step(x, reserved, where="post", color=INK, linewidth=1.4, linestyle=(0, (2, 1.5)), label="reserved")
    top = max(x, key=allocated.__getitem__)
    axes.plot([top], [allocated[top]], marker="v", markersize=9, color="black", zorder=6, clip_on=False)
    return handles


def _shade_phases(axes: Axes, found: Rehearsal) -> None:
    """Shade each phase, and write each step's number where it begins."""
    report = found.report
    assert report.curve is not None
    times = [point[0] for point in report.curve]
    ends = [(step, phase, bisect_right(times, moment)) for step, phase, moment in report.step_ends_us]
    starts = [0, *[end for _step, _phase, end in ends]]
    for (begin, end), (_step, phase, _end) in zip(pairwise(starts), ends, strict=True):
        if end > begin:
            axes.axvspan(begin, end, color=SHADES[phase], linewidth=0, zorder=0)
    first = {step: begin for (begin, _), (step, _, _) in reversed(list(zip(pairwise(starts), ends, strict=True)))}
    ticks = {step: begin for step, begin in sorted(first.items()) if step <= max(report.num_steps, 1)}
    for begin in ticks.values():
        axes.axvline(begin, color="#666666", linewidth=1.0, linestyle=(0, (2, 2)), zorder=3.5)
    axes.set_xticks(list(ticks.values()), [f"step {step}" for step in ticks], ha="left")


def _notes(found: Rehearsal) -> list[str]:
    held = [one for one in found.report.lines_at_peak or () if one.line is not None][:3]
    texts = [f"{format_gib(one.num_bytes)} by {place(one.line)}" for one in held if one.line is not None]
    return [f"Held at the peak: {', '.join(texts)}"] if texts else []
