"""The trade-off chart: memory against speed, one point per setup, and the Pareto frontier."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from fsdp_bench.plan.chart_data.trade_off import TradeOffPoint, pareto_frontier, trade_off_points
from fsdp_bench.plan.question import Prediction
from fsdp_bench.report.charts.figure import FAILURE, INK, TEXT, new_frame, value_axis
from fsdp_bench.report.text.common import hardware_text
from fsdp_bench.report.text.setups import common_line, title, varying_fields
from fsdp_bench.report.text.speed import rests_on
from fsdp_bench.report.text.verdict import required_lines
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.units import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST = 30
"""Most setups in one chart that remain legible."""
FAR = 1.3
"""A setup above this many times the GPU's memory, or the most that fits, is at the right end, with an arrow."""
BOX_HEIGHT, BOX_WIDTH, DIGIT = 0.05, 0.02, 0.012
"""Size of a point's box as fractions of the axes: its height, its width without numbers, and the width of a digit."""
FRONTIER, FITS = "#0072B2", "#5B7F95"


def trade_off_figure(predictions: Sequence[Prediction]) -> Figure:
    """Return the chart of setups of one model on the same hardware.

    Raises:
        SpecError: for more setups than one chart shows legibly, or if fewer than two setups have a known time.
    """
    if len(predictions) > MOST:
        raise SpecError(f"trade-off: {len(predictions)} setups are too many for one picture; at most {MOST}")
    points = trade_off_points(predictions)
    if len(points) < 2:
        known = f"the time of {len(points)} of {len(predictions)} setups is known, two are needed"
        raise SpecError(f"trade-off: {known}; --strategy all, or predict one to see what is missing")
    first = predictions[0]
    question, varying = first.question, varying_fields([one.question for one in predictions])
    frame = new_frame(
        f"Memory against speed (predicted): {hardware_text(question.hardware, question.setup.world_size)}",
        f"{question.model.name}: {question.model.describe()}",
        [
            common_line(question.setup, varying),
            "predicted for eager, rank 0",
            *required_lines(one.estimate for one in predictions if one.required_headroom_bytes is not None),
            f"rates: {rests_on(first.speed, question.profile)}",
        ],
    )
    chart, names = frame.body.subplots(1, 2, width_ratios=(2.4, 1))
    _draw(chart, points, (first.estimate.gpu_bytes or 0) / GIB)
    kind = "reserved" if question.kernels == "cuda" else "live tensors"
    chart.set_xlabel(f"predicted memory of one GPU ({kind}), GiB", fontsize=12)
    _list(names, points, varying)
    return frame.figure


def _list(axes: Axes, points: Sequence[TradeOffPoint], varying: Sequence[str]) -> None:
    """Write the numbered list of setups, the fastest first."""
    axes.set_axis_off()
    best = pareto_frontier(points)
    lines = [("bold: no other setup is faster with less memory", FRONTIER, False)]
    for number, point in enumerate(points, start=1):
        name = title(point.prediction.question, varying) if point.prediction else ""
        unfit = ", does not fit" if point.fits is False else ""
        lines.append((f"{number}  {name}{unfit}", _color(point, best), point in best))
    step = min(0.045, 1 / len(lines))
    longest = max(len(text) for text, _, _ in lines)
    size = min(TEXT, 1.7 * TEXT * 30 / longest)
    for index, (text, color, is_bold) in enumerate(lines):
        axes.text(0, 1 - index * step, text, transform=axes.transAxes, fontsize=size, color=color, va="top",
                  weight="bold" if is_bold else "normal")  # fmt: skip


def _color(point: TradeOffPoint, best: Sequence[TradeOffPoint]) -> str:
    return FAILURE if point.fits is False else FRONTIER if point in best else INK


def right_end(points: Sequence[TradeOffPoint], gpu_gib: float) -> float:
    """Return the GiB at the right end of the axis: it shows all setups that fit, the GPU, and setups not far beyond."""
    fitting = [point.memory_gib for point in points if point.fits is not False]
    near = FAR * max([gpu_gib, *(fitting or [min(point.memory_gib for point in points)])])
    return 1.06 * max(gpu_gib, *(point.memory_gib for point in points if point.memory_gib <= near))


Box = tuple[float, float, list[int]]
"""A place in fractions of the axes, and the numbers of the points there."""


def boxes_apart(places: Sequence[tuple[float, float]]) -> list[Box]:
    """Return a numbered box for each place; merge boxes that would overlap into one with all their numbers."""
    boxes: list[Box] = [(x, y, [number]) for number, (x, y) in enumerate(places, start=1)]
    merged = True
    while merged:
        merged = False
        for index, one in enumerate(boxes):
            other = next((box for box in boxes[index + 1 :] if _overlap(one, box)), None)
            if other is not None:
                numbers = sorted([*one[2], *other[2]])
                weight = len(one[2]) / len(numbers)
                middle = (weight * one[0] + (1 - weight) * other[0], weight * one[1] + (1 - weight) * other[1])
                boxes = [box for box in boxes if box not in (one, other)] + [(*middle, numbers)]
                merged = True
                break
    return boxes


def _overlap(one: Box, other: Box) -> bool:
    wide = (_width(one) + _width(other)) / 2
    return abs(one[0] - other[0]) < wide and abs(one[1] - other[1]) < BOX_HEIGHT


def _width(box: Box) -> float:
    return BOX_WIDTH + DIGIT * len(_text(box[2]))


def _text(numbers: Sequence[int]) -> str:
    """Return sorted numbers as text, with consecutive numbers as a range: ``1,4-6``."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)


def _draw(axes: Axes, points: Sequence[TradeOffPoint], gpu_gib: float) -> None:
    best, edge = pareto_frontier(points), right_end(points, gpu_gib)
    lowest, highest = min(point.tokens for point in points), max(point.tokens for point in points)
    foot = 0.0 if lowest < 0.5 * highest else 0.9 * lowest
    top = highest + 0.08 * (highest - foot)
    axes.set_xlim(0, edge)
    axes.set_ylim(foot, top)
    axes.step([p.memory_gib for p in best], [p.tokens for p in best], where="post", color=FRONTIER, linewidth=2.2)
    if gpu_gib:
        axes.axvline(gpu_gib, color=FAILURE, linewidth=1.2, linestyle="--", zorder=1)
        axes.text(gpu_gib, foot, "usable on the GPU ", fontsize=TEXT, color=FAILURE, ha="right", va="bottom")
    places = [(min(p.memory_gib / edge, 0.975), (p.tokens - foot) / (top - foot)) for p in points]
    for x, y, numbers in boxes_apart(places):
        own = [points[number - 1] for number in numbers]
        is_far = all(point.memory_gib > edge for point in own)
        fill = FAILURE if own[0].fits is False else FRONTIER if any(point in best for point in own) else FITS
        box = {"boxstyle": "rarrow,pad=0.2" if is_far else "round,pad=0.25", "facecolor": fill, "edgecolor": "white"}
        x, side = (0.98, "right") if is_far else (x, "center")
        axes.text(x, y, _text(numbers), transform=axes.transAxes, ha=side, va="center", color="white", zorder=4,
                  fontsize=TEXT - 0.5, weight="bold", bbox=box)  # fmt: skip
    value_axis(axes)
    cut = "; the axis does not begin at zero" if foot else ""
    axes.set_ylabel(f"predicted tokens/s per GPU{cut}", fontsize=12)
    axes.grid(color="#DDDDDD", linewidth=0.8)
