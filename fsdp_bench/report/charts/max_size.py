"""The largest value that fits: bars grouped by strategy, predicted, measured, rehearsed or published.

Every bar begins at zero, has its number above it and its setting below it. Hatches distinguish neighbouring bars in
black and white. Predicted bars have pale colours, measured bars saturated ones, rehearsed bars lie between. On a
measured or rehearsed bar, a mark shows the predicted value, and the error stands above the bar. ``max_size_slide``
has max-size's answers, frontier.py those of a sweep.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fsdp_bench.plan.max_size import HardwareResult, SettingDocument
from fsdp_bench.plan.search.quantity import Quantity
from fsdp_bench.plan.setup_text import SELDOM, SIZES, named, spaced, text_of, values_of
from fsdp_bench.report.charts.colors import Style
from fsdp_bench.report.charts.description import Bar, BarGroup, Bars, Key, Piece, Slide
from fsdp_bench.report.charts.trial_facts import NESTING, ORDER
from fsdp_bench.report.text.conditions import assumed_facts, note_facts, sentences
from fsdp_bench.report.text.max_size import QUANTITY_TEXTS, live_facts, place_of, value_text
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.setup import ShardingStrategy
from fsdp_bench.spec.units import format_count

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


def nested(bars: Iterable[MaxSizeBar]) -> list[MaxSizeBar]:
    """Return bars by strategy, and within one by their labels, each level in the order in which these first occur."""
    bars = list(bars)
    orders = [list(dict.fromkeys(words)) for words in zip(*(bar.labels for bar in bars), strict=True)]

    def place(bar: MaxSizeBar) -> tuple[int, ...]:
        labels = (words.index(label) for words, label in zip(orders, bar.labels, strict=True))
        return ORDER.index(ShardingStrategy(bar.group.partition("\n")[0])), *labels

    return sorted(bars, key=place)


def size_bars(
    rows: Mapping[str, Sequence[MaxSizeBar]],
    axes: Sequence[tuple[float, str]],
    levels: Sequence[str],
    number: Callable[[int], str] = format_count,
    unit: str = "",
) -> tuple[Bars, ...]:
    """Return a chart of bars for each row, by title and with the same groups and labels, on one scale.

    ``axes`` are scales (divisor, label), largest first: the first not above the highest bar is used. ``levels`` are the
    fields that labels show, ``number`` formats a value, and ``unit`` follows it.
    """
    every = [bar for bars in rows.values() for bar in bars]
    highest = max((max(bar.value or 0, bar.predicted or 0, bar.with_retries or 0) for bar in every), default=0)
    scale, axis = next((one for one in axes if highest >= one[0]), axes[-1])
    styles, legend = _styles(every), _legend(every, levels)
    runs = {bar.group for bar in every if bar.value is not None or bar.note != CANNOT_RUN}
    made = []
    for title, bars in rows.items():
        groups = []
        for name in dict.fromkeys(bar.group for bar in bars):
            own = [bar for bar in bars if bar.group == name]
            # one bar without labels stands for a strategy that cannot run at all
            shown = own if name in runs else [replace(own[0], labels=())]
            groups.append(BarGroup(name, tuple(_bar(bar, styles, number) for bar in shown)))
        made.append(Bars(title, tuple(groups), axis, scale, unit, tuple(levels), legend))
    return tuple(made)


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
    """Return styles by source and labels: the last of several levels selects the hatch, the others the colour."""
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


SERVER = "server"
LEVELS = (SERVER, *NESTING)
"""Fields that may vary within a strategy, outermost level of labels first."""

MOST_REASONS = 3
"""Most notes and reasons for missing bars that the chart prints."""


@dataclass(frozen=True)
class Arrangement:
    """The fields that label the bars, and the field that distinguishes the rows of panels, if there are two rows."""

    levels: tuple[str, ...]
    rows: str | None


def arrange(places: Sequence[tuple[str, Sequence[Quantity]]]) -> Arrangement:
    """Choose levels and rows for the settings to search, before anything is predicted.

    ``places`` are servers or GPUs by name, each with one quantity per setting. Raises SpecError for more settings than
    a chart shows legibly.
    """
    settings = [{**values_of(one[0].setup), SERVER: name} for name, quantities in places for one in quantities]
    values = {field: {label_of(field, one) for one in settings} for field in LEVELS}
    levels = tuple(field for field in LEVELS if len(values[field]) > 1)
    if len(settings) <= MOST_BARS:
        return Arrangement(levels, None)
    for field in levels:
        most = max(sum(label_of(field, one) == word for one in settings) for word in values[field])
        if len(values[field]) <= MOST_ROWS and most <= MOST_BARS:
            return Arrangement(tuple(level for level in levels if level != field), field)
    raise SpecError(
        f"chart: {len(settings)} settings are too many for one picture; at most {MOST_BARS}, or {MOST_ROWS} rows"
        f" of {MOST_BARS}; name fewer with --strategy, --precision, --checkpointing, --offload"
    )


def label_of(field: str, values: Mapping[str, Any]) -> str:
    """Return the value of a field as a label; a number, or one that is seldom changed, with its name."""
    text = text_of(field, values)
    return named(field, text) if field in (*SELDOM, *SIZES) else text


def max_size_slide(results: Sequence[HardwareResult], arrangement: Arrangement) -> Slide:
    """Return the chart of predicted results."""
    one = results[0].document
    text, field, rows = QUANTITY_TEXTS[one.dial], arrangement.rows, dict[str, list[MaxSizeBar]]()
    for result in results:
        for cell in result.document.cells:
            values = {**cell.setup, SERVER: result.title}
            word = label_of(field, values) if field else ""
            name = word if field in (None, SERVER, *SELDOM, *SIZES) else f"{field} {word}"
            rows.setdefault(name, []).append(setting_bar(cell, values, arrangement.levels))
    number, model = partial(value_text, one.dial), results[0].cells[0].quantity[0].model
    what = f"{model.kind} models" if one.dial == "num_parameters" else model.name
    groups = {("shard groups", str(cell.setup["shard_size"])) for result in results for cell in result.document.cells
              if "HYBRID" in str(cell.setup["strategy"]) and cell.setup["shard_size"]}  # fmt: skip
    facts = [("source", "predicted, not measured"), *(each for result in results for each in live_facts(result))]
    return Slide(
        f"{text.title} (predicted): {' and '.join(place_of(each.document) for each in results)}",
        f"{what} by sharding strategy",
        sentences(dict.fromkeys([*facts, *sorted(groups)])),
        size_bars(
            {name: nested(bars) for name, bars in rows.items()}, text.axes, arrangement.levels, number, text.unit
        ),
        notes=tuple(_notes(results)),
    )


def setting_bar(cell: SettingDocument, values: Mapping[str, Any], levels: Sequence[str]) -> MaxSizeBar:
    """Return the bar of a setting, labelled by some of its values."""
    group, runs = str(values.get("strategy")), values.get("effective_strategy")
    note = CANNOT_RUN if cell.impossible else UNKNOWN if cell.unknown else NONE_FITS
    labels = tuple(label_of(level, values) for level in levels)
    group += "" if runs in (None, group) else f"\n(runs {runs})"
    return MaxSizeBar(group, labels, cell.fits_value, with_retries=cell.runs_value, note=note)


def _notes(results: Sequence[HardwareResult]) -> list[str]:
    answers = [each for one in results for each in one.answers]
    cells = [cell for one in results for cell in one.cells]
    reasons = [f"{CANNOT_RUN}: {cell.impossible}" for cell in cells if cell.impossible]
    reasons += [f"{UNKNOWN}: {cell.unknown}" for cell in cells if cell.unknown]
    remarks = [f"{name}: {value}" for name, value in (*assumed_facts(answers), *note_facts(answers))]
    return [*remarks, *dict.fromkeys(reasons)][:MOST_REASONS]
