"""The largest values that a sweep found, beside the predicted ones."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from fsdp_bench.report.charts.frontier import frontier_slides
from fsdp_bench.report.html.blocks import Block, Cell, Row, Text, table
from fsdp_bench.report.text.common import UNKNOWN
from fsdp_bench.spec.frontier import FrontierCell, FrontierRecord, LargestValues


def frontier_blocks(record: FrontierRecord) -> list[Block]:
    """Return the largest values as bars and as a table, and why cells are skipped."""
    searched = [cell for cell in record.cells if cell.status != "skipped"]
    reasons = Counter(cell.reason for cell in record.cells if cell.status == "skipped")
    skipped = [Text(f"Skipped {count}: {reason}") for reason, count in reasons.items()]
    bars = [
        replace(bars, title=slide.title, remarks=(f"{slide.subtitle}; {'; '.join(slide.conditions)}", *slide.notes))
        for _, slide in frontier_slides(record)
        for bars in slide.charts
    ]
    return [*bars, _table(record, searched), *skipped] if searched else list(skipped)


def _value(cell: FrontierCell, largest: LargestValues | None) -> str:
    return UNKNOWN if largest is None else cell.quantity.print(largest.fits)


def _table(record: FrontierRecord, cells: list[FrontierCell]) -> Block:
    titles = (
        "cell",
        "strategy",
        "api",
        "world size",
        "predicted",
        record.source,
        "steps apart",
        "trials",
        "runs out in",
    )
    rows = []
    for cell in cells:
        measured, predicted = cell.measured, cell.predicted
        failure = measured.limited_by if measured else None
        limit = (cell.reason or "") if measured is None else "nothing: no larger one was tried"
        cells_of_row = (
            Cell(cell.label),
            Cell(cell.setup.strategy.value),
            Cell(cell.setup.api.value),
            Cell(str(cell.setup.world_size), cell.setup.world_size),
            Cell(_value(cell, predicted), None if predicted is None else predicted.fits),
            Cell(_value(cell, measured), None if measured is None else measured.fits),
            Cell(UNKNOWN if cell.steps_apart is None else f"{cell.steps_apart:+d}", cell.steps_apart),
            Cell(str(len(cell.trials)), len(cell.trials)),
            Cell(limit if failure is None else f"{failure.phase} ({failure.place})"),
        )
        rows.append(Row(cells_of_row))
    return table("Every search", titles, rows, titles[3:8])
