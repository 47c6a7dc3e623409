"""The trade-off picture: memory against speed, one point a setup, and the frontier that no other setup beats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import cos, hypot, pi, sin
from typing import TYPE_CHECKING

from fsdp_bench.plan.question import Prediction
from fsdp_bench.report.charts.axis import FONT, INK, LINE
from fsdp_bench.report.charts.canvas import DPI, EDGE, HEIGHT, WIDTH, new_figure, text_width, wrap, write
from fsdp_bench.report.text.prediction import common_line, title, varying_fields
from fsdp_bench.report.text.speed import rests_on
from fsdp_bench.report.text.verdict import required_lines
from fsdp_bench.report.text.words import hardware_words
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.units import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEFT = 110.0
MOST = 30
"""Setups that one picture shows legibly."""
FAR = 3.0
"""Times the card's memory, or what fits, beyond which a setup is an arrow at the right end."""
MARKER = 11.0
"""Points across."""
LABEL_FONT = 10.5
LABEL_AT = (17.0, 20.0, 26.0, 34.0, 44.0, 58.0, 76.0, 100.0)
"""Pixels between a point and its label, tried in this order."""
TURNS = tuple(pi * turn / 8 for turn in (4, 0, 8, 12, 2, 6, 14, 10, 3, 5, 1, 7, 15, 9, 13, 11))
"""Directions of a label, tried in this order: over the point, right, left, under it, and between."""
FRONTIER, FITS, NOT = "#0072B2", "#8CCBF0", "#A61C00"


@dataclass(frozen=True)
class Point:
    """One setup."""

    name: str
    memory_gib: float
    tokens: float
    fits: bool | None


def frontier(points: Sequence[Point]) -> list[Point]:
    """Return the points that fit of which none needs less memory and is as fast, from the least memory upwards."""
    best: list[Point] = []
    usable = [point for point in points if point.fits is not False]
    for point in sorted(usable, key=lambda point: (point.memory_gib, -point.tokens)):
        if not best or point.tokens > best[-1].tokens:
            best.append(point)
    return best


def trade_off_figure(predictions: Sequence[Prediction]) -> Figure:
    """Return the picture of setups of one model on the same hardware.

    Raises:
        SpecError: where fewer than two setups have a known time.
    """
    if len(predictions) > MOST:
        raise SpecError(f"trade-off: {len(predictions)} setups are too many for one picture; at most {MOST}")
    points = points_of(predictions)
    if len(points) < 2:
        known = f"the time of {len(points)} of {len(predictions)} setups is known, two are needed"
        raise SpecError(f"trade-off: {known}; --strategy all, or predict one to see what is missing")
    return _figure(points, predictions)


def points_of(predictions: Sequence[Prediction]) -> list[Point]:
    """Return a point for each setup whose time is known; memory is what would be reserved without retries."""
    varying = varying_fields([prediction.question for prediction in predictions])
    points = []
    for prediction in predictions:
        tokens = prediction.speed.tokens_per_second_per_gpu
        on_card = prediction.question.kernels == "cuda"
        memory = prediction.needed_bytes if on_card else prediction.estimate.memory.peak_allocated_bytes
        if tokens is not None:
            points.append(Point(title(prediction.question, varying), memory / GIB, tokens, prediction.fits))
    return points


def _figure(points: Sequence[Point], predictions: Sequence[Prediction]) -> Figure:
    figure, first = new_figure(), predictions[0]
    question = first.question
    footer = wrap(
        [
            hardware_words(question.hardware, question.setup.world_size),
            common_line(question.setup, varying_fields([one.question for one in predictions])),
            "predicted for eager, rank 0",
            *required_lines(one.estimate for one in predictions if one.required_headroom_bytes is not None),
            f"rates: {rests_on(first.speed, question.profile)}",
        ],
        WIDTH - 2 * EDGE,
    )
    for index, line in enumerate(footer):
        write(figure, (len(footer) - index) * LINE - 4, line, size=FONT, color="#444444")
    write(figure, HEIGHT - 34, "Predicted memory against speed: what a setting buys", size=18, weight="bold")
    write(figure, HEIGHT - 66, f"{question.model.name}: {question.model.describe()}", size=13)
    bottom, top = len(footer) * LINE + 78, HEIGHT - 100.0
    points = sorted(points, key=lambda point: (-point.tokens, point.memory_gib))
    right = _list(figure, points, top)
    box = (LEFT / WIDTH, bottom / HEIGHT, (WIDTH - LEFT - right) / WIDTH, (top - bottom) / HEIGHT)
    kind = "reserved" if question.kernels == "cuda" else "live tensors"
    _draw(figure.add_axes(box), points, first.estimate.gpu_bytes, kind)
    return figure


def _list(figure: Figure, points: Sequence[Point], top: float) -> float:
    """Write the points' names by number at the right, the fastest first; return the pixels that this takes."""
    texts = [_entry(index, point) for index, point in enumerate(points, start=1)]
    room = max(text_width(text, FONT, bold=True) for text in texts) + EDGE
    best = frontier(points)
    lines = [("on the frontier: bold", FRONTIER, "normal")]
    lines += [
        (
            text,
            NOT if point.fits is False else FRONTIER if point in best else INK,
            "bold" if point in best else "normal",
        )
        for text, point in zip(texts, points, strict=True)
    ]
    for index, (text, color, weight) in enumerate(lines):
        y = (top - 12 - index * LINE) / HEIGHT
        figure.text((WIDTH - room) / WIDTH, y, text, fontsize=FONT, color=color, weight=weight, va="center")
    return room + 40


def _entry(index: int, point: Point) -> str:
    unfit = ", does not fit" if point.fits is False else ""
    return f"{index}  {point.name}{unfit}"


def right_end(points: Sequence[Point], card_gib: float) -> float:
    """Return the GiB at the right end of the axis: what fits, the card, and what is not far beyond both."""
    fitting = [point.memory_gib for point in points if point.fits is not False]
    near = FAR * max([card_gib, *(fitting or [min(point.memory_gib for point in points)])])
    return 1.06 * max(card_gib, *(point.memory_gib for point in points if point.memory_gib <= near))


def _draw_points(axes: Axes, points: Sequence[Point], best: Sequence[Point], edge: float) -> None:
    """Draw every point, and its number beside it; what is far beyond the card is an arrow at the right end."""
    from matplotlib.patheffects import withStroke

    places: dict[tuple[float, float], list[int]] = {}
    for index, point in enumerate(points, start=1):
        color = NOT if point.fits is False else FRONTIER if point in best else FITS
        beyond = point.memory_gib > edge
        place = (edge * 0.985 if beyond else point.memory_gib, point.tokens)
        axes.plot(
            *place, marker=">" if beyond else "o", color=color, markersize=MARKER, markeredgecolor="white", zorder=3
        )
        places.setdefault(place, []).append(index)
    middles = [tuple(map(float, axes.transData.transform(place))) for place in places]
    texts = [",".join(map(str, numbers)) for numbers in places.values()]
    box = axes.bbox
    limits = (float(box.x0), float(box.y0), float(box.x1), float(box.y1))
    for (x, y), text, (dx, dy) in zip(places, texts, label_offsets(middles, texts, limits), strict=True):
        is_far = hypot(dx, dy) > LABEL_AT[2]
        line = {"arrowstyle": "-", "color": "#999999", "linewidth": 0.7, "shrinkA": 0, "shrinkB": 5}
        axes.annotate(text, (x, y), (dx * 72 / DPI, dy * 72 / DPI), textcoords="offset points", fontsize=LABEL_FONT,
                      ha="center", va="center", color=INK, zorder=4, arrowprops=line if is_far else None,
                      path_effects=[withStroke(linewidth=2.5, foreground="white")])  # fmt: skip


def label_offsets(
    middles: Sequence[tuple[float, ...]], texts: Sequence[str], limits: tuple[float, float, float, float]
) -> list[tuple[float, float]]:
    """Return where each label's middle is, from its point, in pixels: inside the limits, on no marker and no label.

    The nearest free place is taken, point by point; where there is none, the nearest of all.
    """
    half = MARKER * DPI / 72 / 2
    taken = [(x - half, y - half, x + half, y + half) for x, y in middles]
    offsets = []
    for (x, y), text in zip(middles, texts, strict=True):
        width, height = text_width(text, LABEL_FONT) / 2 + 2, LABEL_FONT * DPI / 72 / 2 + 1
        tried = [(r * cos(turn), r * sin(turn)) for r in LABEL_AT for turn in TURNS]
        boxes = [(x + dx - width, y + dy - height, x + dx + width, y + dy + height) for dx, dy in tried]
        free = (i for i, box in enumerate(boxes) if _is_inside(box, limits) and not any(_meet(box, o) for o in taken))
        chosen = next(free, 0)
        taken.append(boxes[chosen])
        offsets.append(tried[chosen])
    return offsets


Box = tuple[float, float, float, float]
"""Left, bottom, right, top."""


def _is_inside(box: Box, limits: Box) -> bool:
    return box[0] >= limits[0] and box[1] >= limits[1] and box[2] <= limits[2] and box[3] <= limits[3]


def _meet(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _draw(axes: Axes, points: Sequence[Point], card_bytes: int | None, kind: str) -> None:
    best, card = frontier(points), (card_bytes or 0) / GIB
    axes.step([p.memory_gib for p in best], [p.tokens for p in best], where="post", color=FRONTIER, linewidth=2.2)
    edge = right_end(points, card)
    if card:
        axes.axvline(card, color=NOT, linewidth=1.2, linestyle="--", zorder=1)
        axes.annotate("usable on the card ", (card, 0.0), (-4, 8), xycoords=("data", "axes fraction"),
                      textcoords="offset points", fontsize=FONT, color=NOT, ha="right")  # fmt: skip
    axes.set_xlim(0, edge)
    lowest, highest = min(point.tokens for point in points), max(point.tokens for point in points)
    foot = 0.0 if lowest < 0.5 * highest else 0.9 * lowest
    axes.set_ylim(foot, highest + 0.08 * (highest - foot))
    _draw_points(axes, points, best, edge)
    arrows = "; arrows: further right" if any(point.memory_gib > edge for point in points) else ""
    axes.set_xlabel(f"predicted memory of one GPU ({kind}), GiB{arrows}", fontsize=12, labelpad=8)
    axes.set_ylabel("predicted tokens/s per GPU", fontsize=12)
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.tick_params(labelsize=12, length=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
