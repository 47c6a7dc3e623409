"""The trials of a sweep as rows, as points of memory against speed, and as bars."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fsdp_bench.report.charts.trade_off import boxes_apart
from fsdp_bench.report.charts.trials import bars
from fsdp_bench.report.charts.trials.bars import Bar
from fsdp_bench.report.charts.trials.measured import CHARTS, Chart
from fsdp_bench.report.charts.trials.slides import ChartTrials, group_by_chart
from fsdp_bench.report.html.blocks import (
    BarGroup,
    BarLine,
    Bars,
    Block,
    Cell,
    Details,
    Legend,
    Piece,
    Plot,
    Point,
    Row,
    Section,
    Shape,
    Table,
    table,
)
from fsdp_bench.report.html.scales import around, from_zero, remarks_of
from fsdp_bench.report.measured.tables import disagrees, outcome_text, setting_fields, strategy_text
from fsdp_bench.report.text.common import UNKNOWN
from fsdp_bench.spec.field import Field
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.spec.units import GIB, MIB, format_gib, format_seconds
from fsdp_bench.sweep.results.flat import most_of_any_rank

COLORS = {
    bars.STORED: "stored",
    bars.OPTIMIZER: "optimizer",
    bars.REST: "rest",
    bars.WHOLE: "whole",
    bars.OUT_OF_MEMORY: "out-of-memory",
    bars.MEDIAN: "median",
    bars.EXPOSED: "exposed-part",
    bars.OVERLAPPED: "overlapped",
}
_LEGEND = {bars.EXPOSED: "exposed: no compute meanwhile; its share stands beside the bar"}
NUMBERED = 40
"""Most points that are numbered; more are dots."""
_TEXTS: dict[str, Callable[[float], str]] = {
    "peak-memory": format_gib,
    "throughput": lambda value: f"{value:,.0f} tokens/s",
    "communication": format_seconds,
}
_FINDINGS = (
    "outcome", "peak allocated", "tokens/s per rank", "step", "communication", "exposed", "MFU", "in phase", "reserved",
)  # fmt: skip
_NUMBERS = (
    "#", "world size", "peak allocated", "reserved", "step", "tokens/s per rank", "MFU", "communication", "exposed",
)  # fmt: skip


def trial_table(numbered: Sequence[tuple[int, TrialRecord]], marked: Sequence[TrialRecord]) -> Table:
    """Return one row for each trial; those that the answer names are marked."""
    sources = " and ".join(dict.fromkeys(record.source for _, record in numbered))
    fields = setting_fields([record for _, record in numbered], lambda one: not one.seldom or one.name == "loss")
    rows = [_row(number, record, fields, any(record is one for one in marked)) for number, record in numbered]
    times = ", times are medians" if "measured" in sources else ""
    titles = ("#", "strategy", "model", "world size", *(one.title for one in fields), *_FINDINGS)
    numbers = (*_NUMBERS, *(one.title for one in fields if one.kind is int))
    return table(f"{len(rows)} trials ({sources}); memory of the worst rank{times}", titles, rows, numbers)


def reasons(numbered: Sequence[tuple[int, TrialRecord]]) -> list[Block]:
    """Return why trials failed, and why measurements are suspect; nothing if there is no such trial."""
    rows = [
        Row((Cell(str(number), number), Cell(outcome_text(record)), Cell(reason)))
        for number, record in numbered
        for reason in filter(None, (record.reason, *(f"suspect: {suspicion}" for suspicion in record.suspect)))
    ]
    title = "Why trials failed, or are suspect"
    return [Details(title, (table(title, ("#", "outcome", "reason"), rows, ("#",)),))] if rows else []


def _row(number: int, record: TrialRecord, fields: Sequence[Field], is_marked: bool) -> Row:
    setup, memory = record.setup, record.worst_rank_memory
    exposed = _seconds(record.exposed_communication_seconds)
    cells = (
        Cell(str(number), number),
        Cell(strategy_text(record)),
        Cell(record.model.name),
        Cell(f"{setup.world_size} {record.alone}".rstrip(), setup.world_size),
        *(_setting(one, getattr(setup, one.name)) for one in fields),
        Cell(outcome_text(record), is_warning=not record.fits),
        _bytes(memory.peak_allocated_bytes if memory else None),
        _number(record.tokens_per_second_per_gpu, "{:,.0f}"),
        _seconds(record.step_seconds),
        _seconds(record.communication_seconds),
        Cell(f"{exposed.text} *", exposed.number) if disagrees(record) else exposed,
        _number(record.mfu, "{:.1%}"),
        Cell((memory.peak_phase if memory else "") or UNKNOWN),
        _bytes(most_of_any_rank(record, "peak_reserved_bytes")[0]),
    )
    return Row(cells, is_marked)


def _setting(one: Field, value: Any) -> Cell:
    return Cell(one.text(value), value if one.kind is int else None)


def _bytes(size: int | None) -> Cell:
    return Cell(UNKNOWN) if size is None else Cell(format_gib(size), size)


def _seconds(value: float | None) -> Cell:
    return Cell(UNKNOWN) if value is None else Cell(format_seconds(value), value)


def _number(value: float | None, form: str) -> Cell:
    return Cell(UNKNOWN) if value is None else Cell(form.format(value), value)


Placed = tuple[int, TrialRecord, float, float]
"""A trial with its number, its peak in bytes and its tokens per second."""


def trade_off(numbered: Sequence[tuple[int, TrialRecord]], caption: str) -> Plot | None:
    """Return memory against speed of comparable trials; None if fewer than two have both."""
    placed = [
        (number, record, float(_peak(record)), record.tokens_per_second_per_gpu or 0) for number, record in numbered
    ]
    placed = [one for one in placed if one[2] and one[3]]
    if len(placed) < 2:
        return None
    unit, name = (GIB, "GiB") if max(one[2] for one in placed) >= GIB else (MIB, "MiB")
    x, y = from_zero([one[2] / unit for one in placed]), around([one[3] for one in placed])
    best = _front(placed)
    places = [(x.at(one[2] / unit), y.at(one[3])) for one in placed]
    corners = [places[placed.index(one)] for one in best]
    line = f"M{10 * corners[0][0]:.1f} {1000 - 10 * corners[0][1]:.1f}" + "".join(
        f"H{10 * left:.1f}V{1000 - 10 * low:.1f}" for left, low in corners[1:]
    )
    points = _points(placed, places, best)
    front = "no other trial is faster with less memory"
    return Plot(
        caption=caption,
        x_title=f"peak allocated per rank, {name}",
        y_title="tokens/s per rank",
        x_ticks=x.ticks(),
        y_ticks=y.ticks(),
        shapes=(Shape("front", line, is_line=True),),
        points=tuple(points),
        legend=(Legend("best", front), Legend("point", "other trials that fit")),
        remarks=remarks_of(y, "tokens/s", len(points) < len(placed)),
    )


def _peak(record: TrialRecord) -> int:
    memory = record.worst_rank_memory
    return (memory.peak_allocated_bytes if memory else None) or 0


def _front(placed: Sequence[Placed]) -> list[Placed]:
    best: list[Placed] = []
    for one in sorted(placed, key=lambda each: (each[2], -each[3])):
        if not best or one[3] > best[-1][3]:
            best.append(one)
    return best


def _points(placed: Sequence[Placed], places: Sequence[tuple[float, float]], best: Sequence[Placed]) -> Sequence[Point]:
    if len(placed) > NUMBERED:
        return [Point(x, y, "", _title(one), "dot") for one, (x, y) in zip(placed, places, strict=True)]
    found = []
    for left, low, indices in boxes_apart([(x / 100, y / 100) for x, y in places]):
        own = [placed[index - 1] for index in indices]
        text = ",".join(str(one[0]) for one in own)
        color = "best" if any(one in best for one in own) else "point"
        found.append(Point(100 * left, 100 * low, text, "; ".join(map(_title, own)), color))
    return found


def _title(one: Placed) -> str:
    number, record, size, tokens = one
    setup = record.setup
    name = f"{strategy_text(record)} {setup.api.value} {setup.precision} checkpointing {setup.checkpointing.value}"
    return f"{number}: {name}: {format_gib(size)}, {tokens:,.0f} tokens/s"


def bar_sections(records: list[TrialRecord], machine: str) -> list[Section]:
    """Return the charts of trials that a sweep draws, one section for each kind."""
    grouped, found = group_by_chart(records, machine), []
    for chart in CHARTS:
        first, *more = [_bars(chart, trials) for trials in grouped] or [None]
        if first is not None:
            folded = [Details(block.caption, (block,)) for block in more if block is not None]
            found.append(Section(chart.title, (first, *folded)))
    return found


def _bars(chart: Chart, trials: ChartTrials) -> Bars | None:
    first = trials.groups[0].slots[0].record
    if first.source == "rehearsed" and not chart.has_rehearsals:
        return None
    drawn = [[(slot.labels, chart.bar(slot.record)) for slot in group.shown] for group in trials.groups]
    everything = [bar for group in drawn for _, bar in group]
    highest = max(bar.top for bar in everything)
    if not highest:
        return None
    groups = [
        BarGroup(group.header.replace("\n", " "), tuple(_line(chart, labels, bar, highest) for labels, bar in own))
        for group, own in zip(trials.groups, drawn, strict=True)
    ]
    shown = {part for bar in everything for part, size in bar.pieces if size}
    legend = tuple(Legend(color, _LEGEND.get(part, part)) for part, color in COLORS.items() if part in shown)
    remark = chart.emulated if first.device == "emulated" else ""
    meaning = chart.meaning.get(first.hardware, chart.meaning["cuda"]) + remark
    levels = f"; each bar: {', '.join(trials.levels)}" if trials.levels else ""
    return Bars(
        f"{trials.subtitle} ({first.source})",
        tuple(groups),
        legend,
        (f"{meaning}{levels}", f"{trials.place}; " + "; ".join(trials.conditions), *trials.notes),
    )


def _line(chart: Chart, labels: Sequence[str], bar: Bar, highest: float) -> BarLine:
    pieces = tuple(
        Piece(f"{part}: {_TEXTS[chart.name](size)}", COLORS[part], 100 * size / highest)
        for part, size in bar.pieces
        if size
    )
    name = " · ".join(filter(None, labels)) or "trial"
    if not bar.succeeded:
        return BarLine(name, bar.labels[0], pieces, is_warning=True)
    spread = None if bar.spread is None else (100 * bar.spread[0] / highest, 100 * bar.spread[1] / highest)
    return BarLine(name, _TEXTS[chart.name](bar.total), pieces, ", ".join(bar.labels), spread=spread)
