"""The largest value that fits: bars grouped by strategy, predicted, measured, rehearsed or published.

Every bar begins at zero, has its number above it and its setting below it. Hatches distinguish neighbouring bars in
black and white. Predicted bars have pale colours, measured bars saturated ones, rehearsed bars lie between. On a
measured or rehearsed bar, a mark shows the predicted value, and the error stands above the bar. ``max_size_slide``
has max-size's answers, frontier.py those of a sweep.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeVar

from fsdp_bench.plan.max_size import HardwareResult
from fsdp_bench.plan.search.quantity import Quantity
from fsdp_bench.plan.search.search import SearchResult
from fsdp_bench.plan.setup_text import SELDOM, SIZES, named, setup_line, spaced
from fsdp_bench.plan.setup_text import value_text as field_text
from fsdp_bench.report.charts.colors import Style
from fsdp_bench.report.charts.description import Bar, BarGroup, Bars, Key, Piece, Slide
from fsdp_bench.report.charts.trial_facts import NESTING, ORDER
from fsdp_bench.report.text.common import hardware_text
from fsdp_bench.report.text.max_size import QUANTITY_TEXTS, host_line, kept_free, load_lines, model_line, value_text
from fsdp_bench.simulate import TORCH_VERSION
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.setup import Offload, TrainSetup
from fsdp_bench.spec.units import format_count, format_gib

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

    Args:
        places: names of servers or GPUs, each with one quantity per setting.

    Raises:
        SpecError: for more settings than a chart shows legibly.
    """
    settings = [(name, quantity[0].setup) for name, quantities in places for quantity in quantities]
    values = {field: {_label(field, *setting) for setting in settings} for field in LEVELS}
    levels = tuple(field for field in LEVELS if len(values[field]) > 1)
    if len(settings) <= MOST_BARS:
        return Arrangement(levels, None)
    for field in levels:
        most = max(sum(_label(field, *setting) == word for setting in settings) for word in values[field])
        if len(values[field]) <= MOST_ROWS and most <= MOST_BARS:
            return Arrangement(tuple(level for level in levels if level != field), field)
    raise SpecError(
        f"chart: {len(settings)} settings are too many for one picture; at most {MOST_BARS}, or {MOST_ROWS} rows"
        f" of {MOST_BARS}; name fewer with --strategy, --precision, --checkpointing, --offload"
    )


def _label(field: str, name: str, setup: TrainSetup) -> str:
    if field == SERVER:
        return name
    text = field_text(field, getattr(setup, field))
    return named(field, text) if field in (*SELDOM, *SIZES) else text


def max_size_slide(results: Sequence[HardwareResult], arrangement: Arrangement) -> Slide:
    """Return the chart of predicted results."""
    first = results[0].cells[0]
    text = QUANTITY_TEXTS[first.quantity.name]
    cells = [(one.title, cell) for one in results for cell in one.cells]
    cells = nested(
        cells, arrangement.levels, lambda level, one: _label(level, one[0], one[1].setup), lambda c: c[1].setup
    )
    field, rows = arrangement.rows, dict[str, list[MaxSizeBar]]()
    for word in dict.fromkeys(_label(field, name, cell.setup) if field else "" for name, cell in cells):
        chosen = [(n, c) for n, c in cells if not field or _label(field, n, c.setup) == word]
        title = word if field in (None, SERVER, *SELDOM, *SIZES) else f"{field} {word}"
        rows[title] = [_bar_of(n, c, arrangement.levels) for n, c in chosen]
    name = first.quantity.name
    return Slide(
        f"{text.title} (predicted): {_servers(results)}",
        _subtitle(results),
        tuple(_conditions(results)),
        size_bars(rows, text.axes, arrangement.levels, lambda value: value_text(name, value), text.unit),
        notes=tuple(_notes(results)),
    )


def _bar_of(name: str, cell: SearchResult, levels: Sequence[str]) -> MaxSizeBar:
    setup = cell.setup
    group = setup.strategy.value
    if setup.effective_strategy is not setup.strategy:
        group += f"\n(runs {setup.effective_strategy.value})"
    note = CANNOT_RUN if cell.impossible else UNKNOWN if cell.unknown else NONE_FITS
    labels = tuple(_label(level, name, setup) for level in levels)
    fits, runs = cell.fits_value, cell.runs_value
    more = runs if runs is not None and fits is not None and runs > fits else None
    return MaxSizeBar(group, labels, fits, with_retries=more, note=note)


def _subtitle(results: Sequence[HardwareResult]) -> str:
    setup = results[0].cells[0].setup
    first = results[0].cells[0]
    name, model = first.quantity.name, first.quantity[0].model
    what = f"{model.kind} models" if name == "num_parameters" else model.name
    varying = {name, *(field for field in SIZES if len(_values(results, field)) > 1)}
    batch = {"micro_batch_size": f"{setup.sequence_length} tokens a sequence, "}
    batch["sequence_length"] = f"batch {setup.micro_batch_size} per GPU, "
    both = f"batch {setup.micro_batch_size} x {setup.sequence_length} tokens per GPU, "
    known = "" if varying.issuperset(SIZES) else next((batch[field] for field in SIZES if field in varying), both)
    return f"{what}, {known}by sharding strategy"


def _values(results: Sequence[HardwareResult], field: str) -> set[str]:
    return {field_text(field, getattr(cell.setup, field)) for one in results for cell in one.cells}


def _servers(results: Sequence[HardwareResult]) -> str:
    names = [hardware_text(one.hardware, one.cells[0].setup.world_size) for one in results]
    if results[0].cells[0].quantity.name == "world_size":
        names = [one.hardware.name for one in results]
    *others, last = names
    return " and ".join([", ".join(others), last] if others else [last])


def _conditions(results: Sequence[HardwareResult]) -> list[str]:
    first = results[0].cells[0]
    setups = [cell.setup for one in results for cell in one.cells]
    differing = [level for level in (*LEVELS[1:], "world_size") if len(_values(results, level)) > 1]
    lines = ["source: predicted, not measured", f"model: {model_line(first)}"]
    lines.append(f"setup: {setup_line(first.setup, ('strategy', *differing), first.quantity.name)}")
    lines += [_hardware(one) for one in results]
    shown = [cell.shown.setup for one in results for cell in one.cells if cell.is_answered]
    groups = {str(setup.shard_group_size) for setup in shown if setup.strategy.is_hybrid}
    lines += [f"hybrid strategies in shard groups of {size}" for size in sorted(groups)]
    segments = ", expandable segments" if first.check.expandable_segments else ""
    lines += [f"torch {TORCH_VERSION} as modelled, CUDA kernels, rank 0{segments}", *load_lines(first)]
    lines += [
        f"fits: ends without allocation retries; {free}" for free in dict.fromkeys(map(kept_free, results)) if free
    ]
    if any(setup.offload is not Offload.NONE for setup in setups):
        lines += dict.fromkeys(host_line(one) for one in results)
    return lines


def _hardware(result: HardwareResult) -> str:
    gpu, first = result.hardware.gpu, result.cells[0]
    hardware = first.quantity[0].hardware or result.hardware
    name = f"{hardware.count(first.setup.world_size)} x {hardware.name_with_gpus}"
    up_to = "up to " if first.quantity.name == "world_size" else ""
    source = gpu.usable_memory_source
    read = f" ({source.title}, {source.date})" if source else ""
    return f"{up_to}{name}, {format_gib(gpu.usable_memory_bytes or 0)} usable on each{read}"


def _notes(results: Sequence[HardwareResult]) -> list[str]:
    missing = [
        (f"{CANNOT_RUN}: {cell.impossible}" if cell.impossible else f"{UNKNOWN}: {cell.unknown}")
        for one in results
        for cell in one.cells
        if not cell.is_answered
    ]
    notes = dict.fromkeys(note for one in results for cell in one.cells if cell.at for note in cell.at.notes)
    assumed = dict.fromkeys(each for one in results for cell in one.cells for each in cell.shown.assumptions)
    return [
        *(["as transformers' Trainer: " + "; ".join(assumed)] if assumed else []),
        *notes,
        *(reason for reason, _ in groupby(sorted(missing))),
    ][:MOST_REASONS]
