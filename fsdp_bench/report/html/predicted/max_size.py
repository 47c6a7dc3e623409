"""The page of the largest that fits."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_bench.report.html.blocks import (
    BarGroup,
    BarLine,
    Bars,
    Cell,
    Facts,
    Page,
    Piece,
    Row,
    Section,
    Table,
    table,
)
from fsdp_bench.report.html.documents import MaxSizeDocument
from fsdp_bench.report.html.predicted.prediction import (
    NUMBERS,
    SETTINGS,
    bytes_cell,
    hardware_of,
    scalar,
    setting_cell,
)
from fsdp_bench.report.text.common import UNKNOWN
from fsdp_bench.report.text.quantity_text import QUANTITY_TEXTS
from fsdp_bench.report.text.setups import spaced
from fsdp_bench.spec.units import format_count


def max_size_page(servers: Sequence[MaxSizeDocument]) -> Page:
    """Return the page of the largest values that fit."""
    first = servers[0]
    known = [(one, cell) for one in servers for cell in one.cells if cell.fits_value is not None]
    fewest = first.dial == "world_size"
    chosen = (min if fewest else max)(known, key=lambda pair: pair[1].fits_value or 0, default=None)
    answer = "Nothing fits"
    if chosen is not None:
        one, cell = chosen
        setting = " ".join(scalar(cell.setup.get(field)) for field in ("strategy", "api", "precision"))
        answer = f"{_value(one, cell.fits_value)} with {setting} on {hardware_of(one.server)} ({one.source})"
    facts = [("hardware", hardware_of(one.server)) for one in servers]
    assumed = dict.fromkeys(each for one in servers for cell in one.cells for each in cell.assumptions)
    facts += [("as the Trainer", "; ".join(assumed))] if assumed else []
    facts += [("fits", first.fits_means)] if first.fits_means else []
    facts += [("PyTorch", f"{first.torch or UNKNOWN}, as modelled"), ("source", f"{first.source}, no GPU was used")]
    return Page(
        QUANTITY_TEXTS[first.dial].title if first.dial in QUANTITY_TEXTS else spaced(first.dial),
        first.source,
        answer,
        lead=tuple(_largest_bars(one) for one in servers),
        sections=(
            Section("All settings", tuple(_largest_table(one) for one in servers)),
            Section("Conditions and versions", (Facts(tuple(facts)),)),
        ),
    )


def _value(one: MaxSizeDocument, value: int | None) -> str:
    if value is None:
        return "none"
    return f"{format_count(value)} parameters" if one.dial == "num_parameters" else f"{value} {spaced(one.dial)}"


def _varying(one: MaxSizeDocument) -> list[str]:
    found = [field for field in SETTINGS if len({scalar(cell.setup.get(field)) for cell in one.cells}) > 1]
    return found or ["strategy"]


def _largest_bars(one: MaxSizeDocument) -> Bars:
    highest = max((cell.fits_value or 0 for cell in one.cells), default=0) or 1
    fields, lines = _varying(one), []
    for cell in one.cells:
        name = " ".join(scalar(cell.setup.get(field)) for field in fields)
        text = cell.impossible or cell.unknown or _value(one, cell.fits_value)
        size = 100 * (cell.fits_value or 0) / highest
        lines.append(BarLine(name, text, (Piece(text, "predicted", size),), is_warning=cell.fits_value is None))
    return Bars(f"{hardware_of(one.server)}: what fits (predicted)", (BarGroup("", tuple(lines)),))


def _largest_table(one: MaxSizeDocument) -> Table:
    titles = [*(spaced(field) for field in SETTINGS), "fits", "model", "allocated", "needed", "tokens/s per GPU",
              "the next one exceeds"]  # fmt: skip
    rows = []
    for cell in one.cells:
        tokens = (cell.time.tokens_per_second_per_gpu if cell.time else None) or None
        rows.append(
            Row(
                (
                    *(setting_cell(cell.setup.get(field)) for field in SETTINGS),
                    Cell(_value(one, cell.fits_value), cell.fits_value),
                    Cell(cell.model or ""),
                    bytes_cell(cell.memory.peak_allocated_bytes if cell.memory else None),
                    bytes_cell(cell.memory.needed_bytes if cell.memory else None),
                    Cell(UNKNOWN) if tokens is None else Cell(f"{tokens:,.0f}", tokens),
                    Cell(cell.impossible or cell.unknown or (cell.limited_by.words if cell.limited_by else "")),
                )
            )
        )
    return table(f"{hardware_of(one.server)} (predicted)", titles, rows, (*NUMBERS, "fits"))
