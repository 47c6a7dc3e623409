"""The trade-off picture: memory against speed, one point a setup, and the frontier that no other setup beats."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import hypot
from typing import TYPE_CHECKING

from fsdp_bench.report.axis import FONT, INK, LINE
from fsdp_bench.report.canvas import EDGE, HEIGHT, WIDTH, new_figure, text_width, wrap, write
from fsdp_bench.report.prediction import Prediction
from fsdp_bench.report.prediction_text import common_line, title, varying_fields
from fsdp_bench.report.speed_text import rests_on
from fsdp_bench.report.words import hardware_words
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
CLOSE = 12.0
"""Pixels within which two points are on the same place."""
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
    _draw(figure.add_axes(box), points, first.estimate.card_bytes, kind)
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
    """Draw every point with its number; points on the same place share a label."""
    labels: dict[tuple[float, float, str], list[int]] = {}
    for index, point in enumerate(points, start=1):
        color = NOT if point.fits is False else FRONTIER if point in best else FITS
        beyond = point.memory_gib > edge
        x = edge * 0.985 if beyond else point.memory_gib
        axes.plot(x, point.tokens, marker=">" if beyond else "o", color=color, markersize=20, markeredgecolor="white")
        labels.setdefault(_place(axes, (x, point.tokens, color), labels), []).append(index)
    for (x, y, color), numbers in labels.items():
        text = ",".join(map(str, numbers))
        axes.annotate(text, (x, y), fontsize=min(10.0, 26.0 / len(text)), weight="bold", ha="center", va="center",
                      color=INK if color == FITS else "white")  # fmt: skip


def _place(
    axes: Axes, place: tuple[float, float, str], taken: Iterable[tuple[float, float, str]]
) -> tuple[float, float, str]:
    """Return the place of a point of that colour, or the one that is taken already and so close that both are one."""
    for other in taken:
        (x, y), (ox, oy) = axes.transData.transform([place[:2], other[:2]])
        if hypot(x - ox, y - oy) < CLOSE and other[2] == place[2]:
            return other
    return place


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
