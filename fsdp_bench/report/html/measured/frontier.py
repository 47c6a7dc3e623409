"""The largest values that a sweep found, beside the predicted ones."""

from __future__ import annotations

from collections import Counter

from fsdp_bench.report.charts.trials.trial_facts import ORDER
from fsdp_bench.report.html.blocks import BarGroup, BarLine, Bars, Block, Cell, Legend, Piece, Row, Text, table
from fsdp_bench.report.text.common import UNKNOWN
from fsdp_bench.report.text.quantity_text import QUANTITY_TEXTS
from fsdp_bench.spec.field import Field
from fsdp_bench.spec.frontier import FrontierCell, FrontierRecord, LargestValues
from fsdp_bench.spec.setup import FIELDS, ShardingStrategy


def frontier_blocks(record: FrontierRecord) -> list[Block]:
    """Return the largest values as bars and as a table, and why cells are skipped."""
    searched = [cell for cell in record.cells if cell.status != "skipped"]
    reasons = Counter(cell.reason for cell in record.cells if cell.status == "skipped")
    skipped = [Text(f"Skipped {count}: {reason}") for reason, count in reasons.items()]
    return [_bars(record, searched), _table(record, searched), *skipped] if searched else list(skipped)


def _bars(record: FrontierRecord, cells: list[FrontierCell]) -> Bars:
    """Return one bar for each cell, grouped by strategy; cells of one quantity and model are on one scale."""
    highest: dict[tuple[str, str], int] = {}
    groups: dict[tuple[str, str, int, ShardingStrategy], list[FrontierCell]] = {}
    for cell in sorted(cells, key=lambda cell: ORDER.index(cell.setup.strategy)):
        scale = cell.quantity.name, _model(cell)
        known = (largest.fits for largest in (cell.measured, cell.predicted) if largest is not None)
        highest[scale] = max(highest.get(scale, 1), *known, 1)
        groups.setdefault((*scale, cell.setup.world_size, cell.setup.strategy), []).append(cell)
    varying = [one for one in FIELDS.values() if one.has_column and len({_text(cell, one) for cell in cells}) > 1]
    made = [
        BarGroup(
            f"{model} on {ranks} ranks, {strategy.value}: {QUANTITY_TEXTS[name].title.lower()}",
            tuple(_bar(cell, _name(cell, varying), highest[name, model], record.source) for cell in own),
        )
        for (name, model, ranks, strategy), own in groups.items()
    ]
    legend = (Legend("measured", record.source), Legend("mark", "predicted"))
    return Bars(f"The largest that fits: {record.source}, and predicted", tuple(made), legend)


def _model(cell: FrontierCell) -> str:
    return cell.family.value if cell.model is None else cell.model.name


def _name(cell: FrontierCell, varying: list[Field]) -> str:
    """Return the values of the fields in which cells differ."""
    return " · ".join(_text(cell, one) for one in varying) or cell.label


def _text(cell: FrontierCell, one: Field) -> str:
    value = getattr(cell.setup, one.name)
    return one.phrase(value) if one.seldom else str(value)


def _bar(cell: FrontierCell, name: str, highest: int, source: str) -> BarLine:
    measured, predicted = cell.measured, cell.predicted
    text = cell.status if measured is None else cell.quantity.print(measured.fits)
    size = 0 if measured is None else 100 * measured.fits / highest
    mark = None if predicted is None else 100 * predicted.fits / highest
    note = f"predicted {_value(cell, predicted)}"
    return BarLine(name, text, (Piece(f"{source}: {text}", "measured", size),), note, mark, is_warning=measured is None)


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
