"""Where bars stand side by side, and the levels of labels under them.

Positions are in slots, one a bar; a strategy's bars form a group, and a gap lies between groups. The innermost level
labels every bar, an outer one the run of bars that share its word, the last one the strategy.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Generic, TypeVar

from fsdp_bench.report.charts.slides import Group, Slot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

T = TypeVar("T")

FONT = 11.0
HEADER_FONT = 12.5
LINE = 22.0
"""Pixels from one line of text to the next."""
GAP = 0.7
"""Slots between groups."""
WIDEST_SLOT = 260.0
"""Pixels that a slot may take when there are few."""
PADDING = 9.0
INK, FAINT, RULE = "#333333", "#555555", "#999999"

Width = Callable[[str, float, bool], float]
"""Pixels of one line of text, of its font size in points, and whether it is bold."""


@dataclass(frozen=True)
class Place(Generic[T]):
    """A trial's slot and where its bar's middle is; a collapsed group has one place for all of its slots."""

    group: Group[T]
    slot: Slot[T]
    middle: float


@dataclass(frozen=True)
class Label:
    """One text under the bars, with the span that it labels."""

    text: str
    start: float
    end: float
    top: float
    """Pixels under the axis."""
    rotated: bool = False
    bold: bool = False
    ruled: bool = False
    """Whether a line over the text shows the span."""
    title: bool = False
    """Whether it names a level, and ends at the span's end."""


@dataclass(frozen=True)
class Layout(Generic[T]):
    """Everything that stands along the axis."""

    places: tuple[Place[T], ...]
    labels: tuple[Label, ...]
    span: float
    """Slots from one end of the axis to the other."""
    depth: float
    """Pixels that the labels take under the axis."""


def lay_out(
    groups: tuple[Group[T], ...], titles: tuple[str, ...], pixels: float, margin: float, width: Width
) -> Layout[T]:
    """Place groups on an axis.

    Args:
        groups: the strategies and their trials.
        titles: the names of the levels, outermost first; they stand in the margin.
        pixels: the axis's length.
        margin: pixels beside the axis.
        width: measures text.
    """
    spans, starts, span = _spans(groups, pixels, width)
    places = []
    for group, room, start in zip(groups, spans, starts, strict=True):
        slots = group.slots[:1] if group.collapsed else group.slots
        first = start + (room - len(slots)) / 2 + 0.5
        places += [Place(group, slot, first + index) for index, slot in enumerate(slots)]
    labels, top, slot = [], PADDING, pixels / span
    for level in reversed(range(len(titles))):
        made, depth = _level(places, level, top, slot, width)
        title = broken(titles[level], margin, width)
        labels += [*made, Label(title, -margin / slot, -8 / slot, made[0].top, title=True)]
        top = max(top + depth, made[0].top + (title.count("\n") + 1) * LINE)
    top += 4
    headers = [_header(group) for group in groups]
    for header, room, start in zip(headers, spans, starts, strict=True):
        labels.append(Label(header, start + 0.04, start + room - 0.04, top, bold=True, ruled=True))
    top += (1 + max(header.count("\n") for header in headers)) * LINE * HEADER_FONT / FONT + PADDING
    return Layout(tuple(places), tuple(labels), span, top)


def _spans(groups: tuple[Group[T], ...], pixels: float, width: Width) -> tuple[list[float], list[float], float]:
    """Return every group's room and start, and the axis's length, in slots; each is wide enough for its header."""
    spans = [float(1 if group.collapsed else len(group.slots)) for group in groups]
    needed = [max(width(line, HEADER_FONT, True) for line in _header(group).split("\n")) + 12 for group in groups]
    gaps = GAP * (len(groups) - 1)
    for _ in range(6):  # a wider group makes every slot narrower; this settles quickly
        slot = pixels / (sum(spans) + gaps)
        spans = [max(span, pixels_needed / slot) for span, pixels_needed in zip(spans, needed, strict=True)]
    used = sum(spans) + gaps
    total = max(used, pixels / WIDEST_SLOT)
    starts = [(total - used) / 2 + sum(spans[:index]) + GAP * index for index in range(len(spans))]
    return spans, starts, total


def _header(group: Group[T]) -> str:
    """Return a group's header, the longest of PyTorch's names on two lines."""
    return group.header.replace("_HYBRID_SHARD_ZERO2", "_HYBRID_SHARD\n_ZERO2", 1)


def broken(text: str, room: float, width: Width) -> str:
    """Break text after blanks and hyphens into lines of that many pixels, where that is possible."""
    lines = [""]
    for part in re.findall(r"[^ -]+[ -]*", text):
        if lines[-1] and width((lines[-1] + part).rstrip(), FONT, False) > room:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.rstrip() for line in lines)


def _level(places: list[Place[T]], level: int, top: float, slot: float, width: Width) -> tuple[list[Label], float]:
    """Return one level's labels and their depth in pixels: broken into lines where they must be, else upright."""
    innermost = level == len(places[0].slot.labels) - 1
    runs = []
    shown = (place for place in places if not place.group.collapsed)
    for (_, path), members in groupby(shown, key=lambda p: (p.group.header, p.slot.labels[: level + 1])):
        run = list(members)
        runs.append((path[-1], run[0].middle - 0.42, run[-1].middle + 0.42))
    rooms = [(end - start + 0.1) * slot for _, start, end in runs]
    texts = [broken(text, room, width) for (text, _, _), room in zip(runs, rooms, strict=True)]
    upright = [
        any(width(line, FONT, False) > room for line in text.split("\n"))
        for text, room in zip(texts, rooms, strict=True)
    ]
    if innermost:  # neighbours that are read one after the other stand alike
        upright = [any(upright)] * len(upright)
    texts = [run[0] if rotated else text for run, text, rotated in zip(runs, texts, upright, strict=True)]
    depth = max(
        width(text, FONT, False) if rotated else (text.count("\n") + 1) * LINE
        for text, rotated in zip(texts, upright, strict=True)
    )
    below = top if innermost else top + 5
    labels = [
        Label(text, start, end, below, rotated=rotated, ruled=bool(text) and not innermost)
        for text, rotated, (_, start, end) in zip(texts, upright, runs, strict=True)
    ]
    return labels, depth + below - top + 4


def draw_labels(axes: Axes, labels: tuple[Label, ...], pixels_per_point: float) -> None:
    """Write labels under an axis whose x runs in slots."""
    transform = axes.get_xaxis_transform()
    for label in labels:
        one_line = not label.rotated and "\n" not in label.text
        # One line stands on its baseline, so that words with and without ascenders stand level.
        below = label.top + (1.35 * (HEADER_FONT if label.bold else FONT) if one_line else 0)
        x = label.end if label.title else (label.start + label.end) / 2
        axes.annotate(label.text, (x, 0), (0, -below / pixels_per_point), xycoords=transform,
                      textcoords="offset points", ha="right" if label.title else "center", linespacing=1.1,
                      color=FAINT if label.title else INK, style="italic" if label.title else "normal",
                      va="baseline" if one_line else "top", rotation=90 if label.rotated else 0,
                      fontsize=HEADER_FONT if label.bold else FONT, weight="bold" if label.bold else "normal",
                      annotation_clip=False)  # fmt: skip
        if label.ruled:
            height = -(label.top - 2) / (axes.bbox.height)
            axes.plot([label.start, label.end], [height, height], color=INK if label.bold else RULE,
                      linewidth=1.4 if label.bold else 0.9, transform=transform, clip_on=False)  # fmt: skip
