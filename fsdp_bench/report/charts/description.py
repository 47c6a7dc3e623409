"""The description of a chart, whoever draws it: marks in the units of their axes, with their styles and words.

slide.py draws a Slide with matplotlib; report/html draws the same charts on a page, as wide as the screen.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, groupby

from fsdp_bench.report.charts.axis import Axis
from fsdp_bench.report.charts.colors import Style
from fsdp_bench.spec.errors import SpecError


@dataclass(frozen=True)
class Key:
    """An entry of a legend."""

    style: Style
    text: str


@dataclass(frozen=True)
class Line:
    """A line through places of a plot."""

    style: Style
    x: tuple[float, ...]
    y: tuple[float, ...]
    is_step: bool = False
    """Whether each value holds until the next place."""


@dataclass(frozen=True)
class Area:
    """The area between two lines over the same places."""

    style: Style
    x: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    is_step: bool = False
    has_edge: bool = False
    """Whether a thin line is drawn along its upper end."""


def stacked(x: Sequence[float], layers: Sequence[tuple[Style, Sequence[float]]]) -> tuple[list[Area], Line]:
    """Return step-shaped areas on top of each other, and the outline of all."""
    tops = [[0.0] * len(x)]
    for _, sizes in layers:
        tops.append([low + size for low, size in zip(tops[-1], sizes, strict=True)])
    areas = [
        Area(style, tuple(x), tuple(low), tuple(high), is_step=True, has_edge=True)
        for (style, _), low, high in zip(layers, tops, tops[1:], strict=False)
    ]
    return areas, Line(Style("ink", is_line=True, width=1.3), tuple(x), tuple(tops[-1]), is_step=True)


@dataclass(frozen=True)
class Point:
    """A point of a plot."""

    style: Style
    x: float
    y: float
    number: int | None = None
    title: str = ""
    """The setup or trial of the point. A page shows it when the pointer is there, a slide in a list beside the plot."""
    is_hollow: bool = False


@dataclass(frozen=True)
class Mark:
    """One box for the numbered points that are near to each other, or a point of its own."""

    style: Style
    x: float
    """The place in percent of the plot's width, from the left."""
    y: float
    """The place in percent of the plot's height, from below."""
    text: str
    title: str
    is_beyond: bool
    """Whether it is beyond the right end of the axis."""


@dataclass(frozen=True)
class Plot:
    """A chart with two axes."""

    title: str
    x: Axis
    y: Axis
    areas: tuple[Area, ...] = ()
    """The areas, the lowest first."""
    lines: tuple[Line, ...] = ()
    points: tuple[Point, ...] = ()
    legend: tuple[Key, ...] = ()
    """Points that share a box have the first of their styles here."""
    remarks: tuple[str, ...] = ()
    is_bad: bool = False
    """Whether the title says what fails."""
    is_square: bool = False
    """Whether both axes have the same scale."""

    def marks(self) -> list[Mark]:
        """Return the points as boxes that do not overlap."""
        order = [key.style for key in self.legend]
        found = []
        numbered = [point for point in self.points if point.number is not None]
        for left, low, indices in boxes_apart(
            [(min(self.x.at(p.x), _LAST) / 100, self.y.at(p.y) / 100) for p in numbered]
        ):
            own = [numbered[index - 1] for index in indices]
            style = min((point.style for point in own), key=lambda style: order.index(style) if style in order else 99)
            text = ranges_text([point.number for point in own if point.number is not None])
            is_beyond = all(point.x > self.x.high for point in own)
            titles = "; ".join(f"{point.number}: {point.title}" for point in own)
            found.append(Mark(style, 100 * left, 100 * low, text, titles, is_beyond))
        others = [point for point in self.points if point.number is None]
        return found + [Mark(p.style, self.x.at(p.x), self.y.at(p.y), "", p.title, False) for p in others]


_LAST = 97.5
"""The place of points beyond the right end of the axis, in percent."""
Box = tuple[float, float, list[int]]
"""A place in fractions of a plot, and the numbers of the points there."""
BOX_HEIGHT, BOX_WIDTH, DIGIT = 0.05, 0.02, 0.012
"""Size of a box as fractions of a plot: its height, its width without numbers, and the width of a digit."""


def boxes_apart(places: Sequence[tuple[float, float]]) -> list[Box]:
    """Return a numbered box for each place; merge boxes that would overlap into one with all their numbers."""
    boxes: list[Box] = [(x, y, [number]) for number, (x, y) in enumerate(places, start=1)]
    while pair := next((pair for pair in combinations(boxes, 2) if _overlap(*pair)), None):
        one, other = pair
        numbers = sorted([*one[2], *other[2]])
        weight = len(one[2]) / len(numbers)
        middle = (weight * one[0] + (1 - weight) * other[0], weight * one[1] + (1 - weight) * other[1])
        boxes = [box for box in boxes if box not in pair] + [(*middle, numbers)]
    return boxes


def _overlap(one: Box, other: Box) -> bool:
    wide = BOX_WIDTH + DIGIT * (len(ranges_text(one[2])) + len(ranges_text(other[2]))) / 2
    return abs(one[0] - other[0]) < wide and abs(one[1] - other[1]) < BOX_HEIGHT


def ranges_text(numbers: Sequence[int]) -> str:
    """Return sorted numbers as text, with consecutive numbers as a range: ``1,4-6``."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)


@dataclass(frozen=True)
class Spans:
    """Intervals of a lane in one style."""

    style: Style
    intervals: tuple[tuple[float, float], ...]
    text: str = ""
    """A word in the middle of its only interval, or beside the lane if there is no room."""


@dataclass(frozen=True)
class Lane:
    """The work of one stream."""

    name: str
    spans: tuple[Spans, ...]


@dataclass(frozen=True)
class Lanes:
    """A chart of what runs when, or of the parts that a whole consists of."""

    title: str
    x: Axis
    lanes: tuple[Lane, ...]
    """The lanes from top to bottom."""
    legend: tuple[Key, ...] = ()
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Piece:
    """A part of a bar."""

    name: str
    size: float
    style: Style


@dataclass(frozen=True)
class Bar:
    """One bar: its pieces from zero upwards, or words in place of a missing bar."""

    labels: tuple[str, ...]
    """Its setting: one label for each of the chart's levels, outermost first."""
    words: tuple[str, ...]
    """Its number in the unit of the chart, if it is a result; and what else is written beside it."""
    pieces: tuple[Piece, ...] = ()
    is_result: bool = True
    color: str = "ink"
    """The colour of its words; of a result, all but ``ink`` are a warning."""
    mark: float | None = None
    """A second value."""
    spread: tuple[float, float] | None = None
    """The lowest and the highest sample."""
    outline: float | None = None
    """A value beyond the bar that is reached in another way."""

    @property
    def total(self) -> float:
        """The sum of the pieces."""
        return sum(piece.size for piece in self.pieces)

    @property
    def top(self) -> float:
        """The upper end of all that is drawn."""
        return max(self.total, self.mark or 0.0, self.outline or 0.0, self.spread[1] if self.spread else 0.0)


@dataclass(frozen=True)
class BarGroup:
    """Bars under one heading."""

    title: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class Bars:
    """A chart of bars, which all begin at zero."""

    title: str
    groups: tuple[BarGroup, ...]
    axis: str = ""
    """The quantity that the bars show, and its unit."""
    scale: float = 1.0
    """The size that is 1 on the axis."""
    unit: str = ""
    """The text after a bar's number where there is no axis."""
    levels: tuple[str, ...] = ()
    """The fields that the labels of the bars show."""
    legend: tuple[Key, ...] = ()
    remarks: tuple[str, ...] = ()
    whole: float = 0.0
    """The size of a bar along the whole chart; the highest bar if that is more."""

    @property
    def highest(self) -> float:
        """The size of a bar along the whole chart."""
        return max((bar.top for group in self.groups for bar in group.bars), default=0.0) or 1.0

    @property
    def length(self) -> float:
        """The size that a whole line of a page stands for."""
        return max(self.highest, self.whole)


Chart = Plot | Lanes | Bars


@dataclass(frozen=True)
class Slide:
    """A picture with its conditions: charts beside or above each other."""

    title: str
    """The quantity shown, and the hardware."""
    subtitle: str
    """The answer, or the model."""
    conditions: tuple[str, ...]
    """The conditions that a reader needs to repeat the chart."""
    charts: tuple[Chart, ...]
    notes: tuple[str, ...] = ()
    """Remarks and omissions, one line each."""
    is_bad: bool = False
    """Whether the subtitle says what fails."""
    columns: int = 1
    is_legend_beside: bool = False
    """Whether the legend is on the right of the charts."""

    @property
    def legend(self) -> tuple[Key, ...]:
        """The entries of all charts' legends, each once."""
        return tuple(dict.fromkeys(key for chart in self.charts for key in chart.legend))


def check_number(option: str, num_setups: int, most: int) -> None:
    """Refuse more setups than one picture shows legibly. Raises SpecError, naming the option."""
    if num_setups > most:
        raise SpecError(f"{option}: {num_setups} setups are too many for one picture; at most {most}")
