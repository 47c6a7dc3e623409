"""The page of the largest that fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from fsdp_bench.plan.max_size import MaxSizeDocument
from fsdp_bench.report.charts.description import Bars
from fsdp_bench.report.charts.max_size import CANNOT_RUN, NONE_FITS, MaxSizeBar, size_bars
from fsdp_bench.report.html.blocks import Cell, Facts, Page, Row, Section, Table, table
from fsdp_bench.report.html.prediction import bytes_cell
from fsdp_bench.report.html.settings import (
    NUMBERS,
    cell_of,
    fields_shown,
    hardware_of,
    listed,
    name_of,
    strategy_of,
    title_of,
    values_of,
)
from fsdp_bench.report.text.common import UNKNOWN
from fsdp_bench.report.text.quantity_text import QUANTITY_TEXTS, value_text
from fsdp_bench.report.text.setups import PLACES, named_values, spaced, varying


def max_size_page(servers: Sequence[MaxSizeDocument]) -> Page:
    """Return the page of the largest values that fit."""
    first = servers[0]
    known = [(one, cell) for one in servers for cell in one.cells if cell.fits_value is not None]
    fewest = first.dial == "world_size"
    chosen = (min if fewest else max)(known, key=lambda pair: pair[1].fits_value or 0, default=None)
    unanswered = any(cell.unknown for one in servers for cell in one.cells)
    answer = f"It is {UNKNOWN} what fits" if unanswered else "Nothing fits"
    if chosen is not None:
        one, cell = chosen
        setting = name_of(values_of(cell.setup), _varying(one))
        answer = f"{_value(one, cell.fits_value)} with {setting}, on {_hardware(one)} ({one.source})"
    models = [] if first.dial == "num_parameters" else [cell.model for _, cell in known if cell.model]
    facts = [("model", listed(models, "models"))] if models else []
    facts += [("hardware", _hardware(one)) for one in servers]
    assumed = dict.fromkeys(each for one in servers for cell in one.cells for each in cell.assumptions)
    facts += [("as the Trainer", "; ".join(assumed))] if assumed else []
    facts += [("fits", first.fits_means)] if first.fits_means else []
    facts += [("PyTorch", f"{first.torch or UNKNOWN}, as modelled"), ("source", f"{first.source}, no GPU was used")]
    return Page(
        QUANTITY_TEXTS[first.dial].title if first.dial in QUANTITY_TEXTS else spaced(first.dial),
        first.source,
        answer,
        lead=tuple(_largest_bars(one, max((cell.fits_value or 0 for _, cell in known), default=1)) for one in servers),
        sections=(
            Section("All settings", tuple(_largest_table(one) for one in servers)),
            Section("Conditions and versions", (Facts(tuple(facts)),)),
        ),
    )


def _hardware(one: MaxSizeDocument) -> str:
    searched = one.dial == "world_size" or not one.cells
    return hardware_of(one.server, None if searched else one.cells[0].setup.get("world_size"))


def _value(one: MaxSizeDocument, value: int | None) -> str:
    if value is None:
        return "none"
    return f"{value_text(one.dial, value)} {_unit(one)}"


def _unit(one: MaxSizeDocument) -> str:
    return QUANTITY_TEXTS[one.dial].unit if one.dial in QUANTITY_TEXTS else spaced(one.dial)


def _varying(one: MaxSizeDocument) -> list[str]:
    """Return what the settings differ in, without the strategy and what is searched."""
    found = varying([values_of(cell.setup) for cell in one.cells])
    return [field for field in found if field not in (*PLACES, one.dial)]


def _largest_bars(one: MaxSizeDocument, highest: int) -> Bars:
    fields, text = _varying(one), QUANTITY_TEXTS.get(one.dial)
    bars = []
    for cell in one.cells:
        values = values_of(cell.setup)
        note = CANNOT_RUN if cell.impossible else UNKNOWN if cell.unknown else NONE_FITS
        labels = tuple(named_values(values, fields))
        bars.append(MaxSizeBar(strategy_of(values), labels, cell.fits_value, with_retries=cell.runs_value, note=note))
    heading = f"{_hardware(one)}: what fits (predicted)"
    (found,) = size_bars(
        {heading: bars}, text.axes if text else ((1.0, ""),), (), partial(value_text, one.dial), _unit(one)
    )
    return replace(found, whole=highest)


def _largest_table(one: MaxSizeDocument) -> Table:
    fields = [field for field in fields_shown(_varying(one)) if field != one.dial]
    titles = [*map(title_of, fields), "fits", "model", "allocated", "needed", "tokens/s per GPU",
              "the next one exceeds"]  # fmt: skip
    rows = []
    for cell in one.cells:
        tokens = (cell.time.tokens_per_second_per_gpu if cell.time else None) or None
        rows.append(
            Row(
                (
                    *(cell_of(field, values_of(cell.setup)) for field in fields),
                    Cell(_value(one, cell.fits_value), cell.fits_value),
                    Cell(cell.model or ""),
                    bytes_cell(cell.memory.peak_allocated_bytes if cell.memory else None),
                    bytes_cell(cell.memory.needed_bytes if cell.memory else None),
                    Cell(UNKNOWN) if tokens is None else Cell(f"{tokens:,.0f}", tokens),
                    Cell(cell.impossible or cell.unknown or (cell.limited_by.words if cell.limited_by else "")),
                )
            )
        )
    return table(f"{_hardware(one)} (predicted)", titles, rows, (*NUMBERS, "fits"))
