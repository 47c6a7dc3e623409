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
from fsdp_bench.report.measured.tables import WORDS, Finding, findings_of, outcome_text, setting_fields, strategy_text
from fsdp_bench.spec.field import Field
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.spec.units import format_gib


def trial_table(numbered: Sequence[tuple[int, TrialRecord]], marked: Sequence[TrialRecord]) -> Table:
    """Return one row for each trial; those that the answer names are marked."""
    records = [record for _, record in numbered]
    sources = " and ".join(dict.fromkeys(record.source for record in records))
    fields = setting_fields(records, lambda one: not one.seldom or one.name == "loss")
    found = sorted(findings_of(records).items(), key=lambda one: one[1].drop_priority)  # what matters most comes first
    findings = {header.replace("\n", " "): one for header, one in found}
    times = ", times are medians" if "measured" in sources else ""
    titles = ("#", "strategy", "model", "world size", *(one.title for one in fields), *findings)
    numbers = ["#", "world size", *(one.title for one in fields if one.kind is int), *(set(findings) - set(WORDS))]
    rows = []
    for number, record in numbered:
        cells = (
            Cell(str(number), number),
            Cell(strategy_text(record)),
            Cell(record.model.name),
            Cell(f"{record.setup.world_size} {record.alone}".rstrip(), record.setup.world_size),
            *(_setting(one, getattr(record.setup, one.name)) for one in fields),
            *(_finding(name, one, record) for name, one in findings.items()),
        )
        rows.append(Row(cells, any(record is one for one in marked)))
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


def _setting(one: Field, value: Any) -> Cell:
    return Cell(one.text(value), value if one.kind is int else None)


def _finding(name: str, one: Finding, record: TrialRecord) -> Cell:
    number = None if name in WORDS else one.value(record)
    return Cell(one.text(record), number, is_warning=name == "outcome" and not record.fits)


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
