"""The trials of a sweep as rows, as points of memory against speed, and as bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fsdp_bench.report.charts.description import Bars, Plot
from fsdp_bench.report.charts.trade_off import TradeOffPoint, trade_off_plot
from fsdp_bench.report.charts.trial_bars import CHARTS, Chart, charts_of, meaning_of, trial_bars
from fsdp_bench.report.charts.trial_slides import ChartTrials, group_by_chart
from fsdp_bench.report.html.blocks import Block, Cell, Details, Row, Section, Table, table
from fsdp_bench.report.measured.tables import disagrees, outcome_text, setting_fields, strategy_text
from fsdp_bench.report.text.common import UNKNOWN
from fsdp_bench.spec.field import Field
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.spec.units import format_gib, format_seconds
from fsdp_bench.sweep.results.flat import most_of_any_rank

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


def trade_off(numbered: Sequence[tuple[int, TrialRecord]], caption: str) -> Plot | None:
    """Return memory against speed of comparable trials; None if fewer than two have both."""
    points = [
        TradeOffPoint(_peak(record), record.tokens_per_second_per_gpu or 0.0, True, number, _name(record))
        for number, record in numbered
    ]
    known = [point for point in points if point.memory_bytes and point.tokens]
    return (
        trade_off_plot(known, caption, "peak allocated per rank", "tokens/s per rank", {}) if len(known) > 1 else None
    )


def _peak(record: TrialRecord) -> int:
    memory = record.worst_rank_memory
    return (memory.peak_allocated_bytes if memory else None) or 0


def _name(record: TrialRecord) -> str:
    """Return a trial's setting and its numbers."""
    setup = record.setup
    name = f"{strategy_text(record)} {setup.api.value} {setup.precision} checkpointing {setup.checkpointing.value}"
    return f"{name}: {format_gib(_peak(record))}, {record.tokens_per_second_per_gpu or 0:,.0f} tokens/s"


def bar_sections(records: list[TrialRecord], machine: str) -> list[Section]:
    """Return the charts of trials that a sweep draws, one section for each kind."""
    grouped = [(trials, charts_of(trials)) for trials in group_by_chart(records, machine)]
    found = []
    for chart in CHARTS:
        bars = [_bars(chart, trials) for trials, charts in grouped if chart in charts]
        if bars:
            folded = [Details(block.title, (block,)) for block in bars[1:]]
            found.append(Section(chart.title, (bars[0], *folded)))
    return found


def _bars(chart: Chart, trials: ChartTrials) -> Bars:
    """Return the bars of a slide with its conditions."""
    first = trials.groups[0].slots[0].record
    remarks = (meaning_of(chart, first), f"{trials.place}; {'; '.join(trials.conditions)}", *trials.notes)
    return replace(trial_bars(chart, trials), title=f"{trials.subtitle} ({first.source})", remarks=remarks)
