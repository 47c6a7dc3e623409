"""The page of the largest that fits."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from fsdp_bench.plan.max_size import MaxSizeDocument, SettingDocument
from fsdp_bench.plan.setup_text import PLACES, named_values, setup_line, spaced, strategy_text, title, varying
from fsdp_bench.report.charts.description import Bars
from fsdp_bench.report.charts.max_size import CANNOT_RUN, NONE_FITS, MaxSizeBar, size_bars
from fsdp_bench.report.html.blocks import Cell, Column, Facts, Page, Section, Table, table, words
from fsdp_bench.report.html.settings import (
    hardware_of,
    listed,
    place_facts,
    setting_columns,
)
from fsdp_bench.report.text.common import UNKNOWN, sizes_by_source
from fsdp_bench.report.text.max_size import QUANTITY_TEXTS, value_text
from fsdp_bench.spec.units import format_gib


def max_size_page(servers: Sequence[MaxSizeDocument]) -> Page:
    """Return the page of the largest values that fit."""
    first = servers[0]
    known = [cell for one in servers for cell in one.cells if cell.fits_value is not None]
    return Page(
        QUANTITY_TEXTS[first.dial].title if first.dial in QUANTITY_TEXTS else spaced(first.dial),
        first.source,
        _answer(servers),
        lead=tuple(_largest_bars(one, max((cell.fits_value or 0 for cell in known), default=1)) for one in servers),
        sections=(
            Section("All settings", tuple(_largest_table(one) for one in servers)),
            Section("Conditions and versions", (_conditions(servers),)),
        ),
    )


def _answer(servers: Sequence[MaxSizeDocument]) -> str:
    """Return the largest value, or the fewest GPUs: those of a plan, where it needs fewer than any setting here."""
    first = servers[0]
    found = [
        (one, cell.fits_value, title(cell.setup, _varying(one)))
        for one in servers
        for cell in one.cells
        if cell.fits_value is not None
    ]
    fewest = ((one, one.on_fewest) for one in servers if one.on_fewest is not None)
    named = ("api", "checkpointing", "loss", "offload")
    for one, answer in fewest:
        gpus = answer.setup.get("world_size")
        segments = ", expandable segments" * bool(answer.expandable_segments)
        found.append((one, gpus if isinstance(gpus, int) else 0, title(answer.setup, named) + segments))
    if found:
        one, value, setting = (min if first.dial == "world_size" else max)(found, key=lambda each: each[1])
        if first.dial != "world_size":
            return f"{_value(one, value)} with {setting}, on {_hardware(one)} ({one.source})"
        listed_here = min((cell.fits_value for cell in one.cells if cell.fits_value is not None), default=None)
        others = "" if listed_here == value else f"; in the settings below {listed_here or 'none'}"
        return f"{_value(one, value)} of {one.server.name or one.server.gpu} with {setting} ({one.source}){others}"
    unanswered = any(cell.unknown for one in servers for cell in one.cells)
    return f"It is {UNKNOWN} what fits" if unanswered else "Nothing fits"


def _conditions(servers: Sequence[MaxSizeDocument]) -> Facts:
    first, cells = servers[0], [(one, cell) for one in servers for cell in one.cells]
    models = [cell.model for _, cell in cells if cell.model and cell.fits_value is not None]
    notes = [note for _, cell in cells for note in cell.notes or ()]
    kept = sizes_by_source((cell.required_headroom_bytes, cell.required_headroom_source) for _, cell in cells)
    facts = [
        ("model", listed(models, "models") if models and first.dial != "num_parameters" else ""),
        *(("setup", setup_line(cell.setup, _varying(one), one.dial)) for one, cell in cells),
        *(fact for one in servers for fact in (("hardware", _hardware(one)), *place_facts(one.server))),
        ("fits", "no allocation retries, with what is kept free, and within the host's memory where that is known"),
        *(("kept free", f"{sizes} of each GPU, {source or UNKNOWN}") for sizes, source in kept),
        ("load", "" if first.load in (None, "meta") else f"the model is built in host memory first, by {first.load}"),
        ("allocator", "expandable segments" if first.expandable_segments else ""),
        *(("rates", cell.time.rates or "") for _, cell in cells if cell.time is not None),
        ("as the Trainer", "; ".join(dict.fromkeys(each for _, cell in cells for each in cell.assumptions))),
        ("PyTorch", f"{first.torch or UNKNOWN}, as modelled"),
        ("source", f"{first.source}, no GPU was used"),
        *(("note", note) for note in notes),
    ]
    return Facts(tuple(dict.fromkeys(fact for fact in facts if fact[1])))


def _hardware(one: MaxSizeDocument) -> str:
    searched = one.dial == "world_size"
    world_size = None if searched or not one.cells else one.cells[0].setup.get("world_size")
    return "up to " * (searched and one.server.name is not None) + hardware_of(one.server, world_size)


def _value(one: MaxSizeDocument, value: int | None) -> str:
    if value is None:
        return "none"
    unit = re.sub(r"s\b", "", _unit(one), count=1) if value == 1 else _unit(one)
    return f"{value_text(one.dial, value)} {unit}"


def _unit(one: MaxSizeDocument) -> str:
    return QUANTITY_TEXTS[one.dial].unit if one.dial in QUANTITY_TEXTS else spaced(one.dial)


def _varying(one: MaxSizeDocument) -> list[str]:
    """Return what the settings differ in, without what is searched."""
    found = varying([cell.setup for cell in one.cells])
    return [field for field in found if field not in (*PLACES, one.dial)]


def _largest_bars(one: MaxSizeDocument, highest: int) -> Bars:
    fields, text = [one for one in _varying(one) if one != "strategy"], QUANTITY_TEXTS.get(one.dial)
    bars = []
    for cell in one.cells:
        note = CANNOT_RUN if cell.impossible else UNKNOWN if cell.unknown else NONE_FITS
        labels = tuple(named_values(cell.setup, fields))
        bars.append(
            MaxSizeBar(strategy_text(cell.setup), labels, cell.fits_value, with_retries=cell.runs_value, note=note)
        )
    heading = f"{_hardware(one)}: what fits (predicted)"
    (found,) = size_bars(
        {heading: bars}, text.axes if text else ((1.0, ""),), (), partial(value_text, one.dial), _unit(one)
    )
    return replace(found, whole=highest)


def _largest_table(one: MaxSizeDocument) -> Table:
    cells, memories = one.cells, [cell.memory for cell in one.cells]
    fits = [Cell(_value(one, cell.fits_value), cell.fits_value) for cell in cells]
    tokens = [cell.time and cell.time.tokens_per_second_per_gpu for cell in cells]
    next_one = (cell.impossible or cell.unknown or (cell.limited_by.words if cell.limited_by else "") for cell in cells)
    columns = {
        **setting_columns([cell.setup for cell in cells], _varying(one), one.dial),
        "fits": Column(tuple(fits), is_number=True),
        "model": words(cell.model or "" for cell in cells),
        "peak allocated": _known(cells, [one.peak_allocated_bytes if one else None for one in memories], format_gib),
        "needs": _known(cells, [one.needed_bytes if one else None for one in memories], format_gib),
        "tokens/s per GPU": _known(cells, [speed or None for speed in tokens], "{:,.0f}".format),
        "the next one exceeds": words(next_one),
    }
    return table(f"{_hardware(one)} (predicted)", columns)


def _known(cells: Sequence[SettingDocument], values: Sequence[float | None], text: Callable[[float], str]) -> Column:
    """Return a column of numbers: unknown ones, where something fits or that is not known, have another mark."""
    without = (UNKNOWN if cell.unknown or cell.fits_value is not None else "-" for cell in cells)
    shown = (Cell(none) if one is None else Cell(text(one), one) for none, one in zip(without, values, strict=True))
    return Column(tuple(shown), is_number=True)
