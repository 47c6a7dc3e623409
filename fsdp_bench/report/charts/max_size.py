"""The largest value that fits: bars grouped by strategy, predicted, measured, rehearsed or published.

Every bar begins at zero, has its number above it and its setting below it. Hatches distinguish neighbouring bars in
black and white. Predicted bars have pale colours, measured bars saturated ones, rehearsed bars lie between. On a
measured or rehearsed bar, a mark shows the predicted value, and the error stands above the bar.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from fsdp_bench.report.charts.colors import Style
from fsdp_bench.report.charts.description import Bar, BarGroup, Bars, Key, Piece
from fsdp_bench.report.charts.trial_facts import ORDER
from fsdp_bench.report.text.setups import spaced
from fsdp_bench.spec.setup import TrainSetup
from fsdp_bench.spec.units import format_count

T = TypeVar("T")

PREDICTED, MEASURED, REHEARSED, PUBLISHED = "predicted", "measured", "rehearsed", "published"
NONE_FITS, CANNOT_RUN, UNKNOWN = "none fits", "cannot run", "unknown"
"""Labels in place of a missing bar."""

MOST_BARS = 30
"""Most bars in one row of panels that remain legible."""
MOST_ROWS = 2
_MOST_KEYS = 10
"""More entries of a legend would take the bars' place."""

_COLORS = ("blue", "orange", "green", "mauve", "yellow", "sky")
_MEASURED = ("", "//", "..", "", "\\\\", "--")
STYLES = {
    PREDICTED: tuple(Style(f"pale-{color}", hatch) for color, hatch in
                     zip(_COLORS, ("//", "", "..", "xx", "\\\\", "--"), strict=True)),
    MEASURED: tuple(map(Style, _COLORS, _MEASURED)),
    REHEARSED: tuple(Style(f"middle-{color}", hatch) for color, hatch in zip(_COLORS, _MEASURED, strict=True)),
    PUBLISHED: (Style("dark-grey"),),
}  # fmt: skip
MARK = Style("ink", sign="D")
RETRIES = Style("faint", dash=(3, 2))


@dataclass(frozen=True)
class MaxSizeBar:
    """The largest value that fits with one setting."""

    group: str
    """The strategy."""
    labels: tuple[str, ...]
    """One label for each of the chart's levels, outermost first."""
    value: int | None
    """The value in parameters, layers, sequences, tokens or GPUs; None if there is no bar."""
    source: str = PREDICTED
    """The source of the value: ``predicted``, ``measured``, ``rehearsed`` or ``published``."""
    predicted: int | None = None
    """The predicted value of a measured or rehearsed bar, drawn as a mark with the error."""
    with_retries: int | None = None
    """The largest value that runs with allocation retries, drawn as a dashed outline."""
    note: str = ""
    """The label in place of a missing bar: ``none fits``, ``cannot run`` or ``unknown``."""

    @property
    def words(self) -> tuple[str, ...]:
        """The words above the bar beside its number, or in place of a missing bar."""
        if self.value is None:
            return (self.note or UNKNOWN,)
        if self.predicted is None:
            return ()
        return ("0%" if self.predicted == self.value else f"{self.predicted / self.value - 1:+.1%}",)


def nested(
    cells: Sequence[T], levels: Sequence[str], label: Callable[[str, T], str], setup: Callable[[T], TrainSetup]
) -> list[T]:
    """Return cells by strategy, and within one by their labels, each level in the order in which these first occur."""
    orders = {level: list(dict.fromkeys(label(level, cell) for cell in cells)) for level in levels}

    def place(cell: T) -> tuple[int, ...]:
        within = (words.index(label(level, cell)) for level, words in orders.items())
        return ORDER.index(setup(cell).strategy), *within

    return sorted(cells, key=place)


def size_bars(
    rows: Mapping[str, Sequence[MaxSizeBar]],
    axes: Sequence[tuple[float, str]],
    levels: Sequence[str],
    number: Callable[[int], str] = format_count,
    unit: str = "",
) -> tuple[Bars, ...]:
    """Return a chart of bars for each row, on one scale.

    Args:
        rows: the bars by the title of their row; all rows have the same groups and labels in the same order.
        axes: scales (divisor, label), largest first; the first not above the highest bar is used.
        levels: the fields that the labels show: ``server``, ``checkpointing``.
        number: the function that formats a value.
        unit: what follows a value.
    """
    every = [bar for bars in rows.values() for bar in bars]
    highest = max((max(bar.value or 0, bar.predicted or 0, bar.with_retries or 0) for bar in every), default=0)
    scale, axis = next((one for one in axes if highest >= one[0]), axes[-1])
    styles, legend = _styles(every), _legend(every, levels)
    runs = {bar.group for bar in every if bar.value is not None or bar.note != CANNOT_RUN}
    made = []
    for title, bars in rows.items():
        groups = []
        for name, own in _by_group(bars).items():
            # one bar without labels stands for a strategy that cannot run at all
            shown = own if name in runs else [replace(own[0], labels=())]
            groups.append(BarGroup(name, tuple(_bar(bar, styles, number) for bar in shown)))
        made.append(Bars(title, tuple(groups), axis, scale, unit, tuple(levels), legend))
    return tuple(made)


def _by_group(bars: Sequence[MaxSizeBar]) -> dict[str, list[MaxSizeBar]]:
    found: dict[str, list[MaxSizeBar]] = {}
    for bar in bars:
        found.setdefault(bar.group, []).append(bar)
    return found


def _bar(bar: MaxSizeBar, styles: dict[tuple[str, tuple[str, ...]], Style], number: Callable[[int], str]) -> Bar:
    if bar.value is None:
        color = "failure" if bar.note == NONE_FITS else "faint"
        return Bar(bar.labels, bar.words, is_result=False, color=color)
    return Bar(
        bar.labels,
        (number(bar.value), *bar.words),
        (Piece(bar.source, bar.value, styles[bar.source, bar.labels]),),
        mark=bar.predicted,
        outline=bar.with_retries if (bar.with_retries or 0) > bar.value else None,
    )


def _styles(bars: Sequence[MaxSizeBar]) -> dict[tuple[str, tuple[str, ...]], Style]:
    """Return the style by source and labels.

    With several levels, the last level selects the hatch and the others select the colour.
    """
    made = {}
    for source, palette in STYLES.items():
        own = list(dict.fromkeys(bar.labels for bar in bars if bar.source == source))
        outer = list(dict.fromkeys(labels[:-1] or labels for labels in own))
        inner = list(dict.fromkeys(labels[-1:] for labels in own))
        for labels in own:
            color = palette[outer.index(labels[:-1] or labels) % len(palette)].color
            made[source, labels] = Style(color, palette[inner.index(labels[-1:]) % len(palette)].hatch)
    return made


def _legend(every: Sequence[MaxSizeBar], levels: Sequence[str]) -> tuple[Key, ...]:
    bars = [bar for bar in every if bar.value is not None]
    sources = [source for source in STYLES if any(bar.source == source for bar in bars)]
    keys: list[Key] = []
    if {MEASURED, REHEARSED} & {*sources}:  # in other charts the title and the labels name the source
        keys += [Key(STYLES[source][0], source) for source in sources]
    elif len(sources) == 1 and len(levels) > 1:
        keys += _keys_of_levels(every, levels, sources[0])
    if any(bar.predicted is not None for bar in bars):
        keys.append(Key(MARK, "predicted; its error stands beside the number"))
    if any((bar.with_retries or 0) > (bar.value or 0) for bar in bars):
        keys.append(Key(RETRIES, "dashed: up to here it runs, but with allocation retries"))
    return tuple(keys)


def _keys_of_levels(bars: Sequence[MaxSizeBar], levels: Sequence[str], source: str) -> list[Key]:
    """Return what each colour and each hatch stands for, where bars of one source have labels of several levels."""
    colors, hatches = dict[str, Style](), dict[str, Style]()
    for (of, labels), style in _styles(bars).items():
        if of == source and any(labels):
            colors.setdefault(", ".join(labels[:-1]).replace("\n", " "), Style(style.color))
            name = f"{spaced(levels[-1])} {labels[-1]}".replace("\n", " ")
            hatches.setdefault(name, Style("white", style.hatch))
    keys = [Key(style, name) for name, style in {**colors, **hatches}.items()]
    return keys if len(keys) <= _MOST_KEYS else []
