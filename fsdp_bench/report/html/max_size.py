"""The page of the largest that fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from fsdp_bench.plan.max_size import MaxSizeDocument, answers_of, setting_rows
from fsdp_bench.report.charts.description import Bars
from fsdp_bench.report.charts.max_size import setting_bar, size_bars
from fsdp_bench.report.html.blocks import Facts, Page, Section, Table, table
from fsdp_bench.report.text.conditions import assumed_facts, note_facts
from fsdp_bench.report.text.max_size import (
    QUANTITY_TEXTS,
    answer,
    differing,
    place_of,
    setting_facts,
    usual_columns,
    value_text,
)
from fsdp_bench.report.text.prediction_table import ALWAYS, answer_column, setup_columns


def max_size_page(servers: Sequence[MaxSizeDocument]) -> Page:
    """Return the page of the largest values that fit."""
    first = servers[0]
    highest = max((cell.fits_value or 0 for one in servers for cell in one.cells), default=0) or 1
    return Page(
        QUANTITY_TEXTS[first.dial].title,
        first.source,
        "; ".join(map(answer, servers)),
        lead=tuple(_largest_bars(one, highest) for one in servers),
        sections=(
            Section("All settings", tuple(map(_largest_table, servers))),
            Section("Conditions and versions", (_conditions(servers),)),
        ),
    )


def _conditions(servers: Sequence[MaxSizeDocument]) -> Facts:
    facts = []
    for one in servers:
        answers = answers_of(one)
        models = dict.fromkeys(each.model.name for each in answers if each.fits is not None)
        facts += setting_facts(one, answers, [] if one.dial == "num_parameters" else models) if answers else []
        facts += [("rates", each.time.rates) for each in answers if each.time is not None and each.time.rates]
        facts += [*assumed_facts(answers), *note_facts(answers)]
    return Facts((*dict.fromkeys(facts), ("source", f"{servers[0].source}, no GPU was used")))


def _largest_bars(one: MaxSizeDocument, highest: int) -> Bars:
    fields, text = [field for field in differing(one) if field != "strategy"], QUANTITY_TEXTS[one.dial]
    bars = [setting_bar(cell, cell.setup, fields) for cell in one.cells]
    heading = f"{place_of(one)}: what fits (predicted)"
    (found,) = size_bars({heading: bars}, text.axes, fields, partial(value_text, one.dial), text.unit)
    return replace(found, whole=highest)


def _largest_table(one: MaxSizeDocument) -> Table:
    rows = setting_rows(one)
    setups = [cell.setup for cell in one.cells]
    columns = setup_columns(setups, {*differing(one), *ALWAYS}, one.dial)
    columns += [answer_column(name, rows) for name in ("model", *usual_columns(one), "impossible", "unknown")]
    return table(f"{place_of(one)} (predicted)", {column.name: column for column in columns})
