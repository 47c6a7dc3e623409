"""Setups on a page: columns of tables for what they differ in, names in sentences, conditions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fsdp_bench.plan.setup_text import (
    FIELDS,
    NUMBERS,
    PLACES,
    SELDOM,
    spaced,
    strategy_text,
    value_text,
)
from fsdp_bench.plan.table import Row as TableRow
from fsdp_bench.report.html.blocks import Cell, Column, words
from fsdp_bench.report.text.prediction_table import cell_text, is_number

ALWAYS = ("strategy", *(field for field in FIELDS if field not in SELDOM), "loss")
"""Fields that a table has in any case: a column, or a line above it where all rows have the same value."""
_TITLES = {"num_nodes": "nodes", "gpus_per_node": "GPUs per node", "world_size": "GPUs", "lora": "LoRA"}
_MOST_NAMED = 3
"""If there are more models or servers, their number is named."""


def setting_columns(
    setups: Sequence[Mapping[str, Any]], varying: Sequence[str], without: str | None = None
) -> dict[str, Column]:
    """Return a column for each field that setups differ in and for each of ALWAYS, without one that is searched."""
    fields = (field for field in (*PLACES, "strategy", *FIELDS) if field in varying or field in ALWAYS)
    return {_TITLES.get(field, spaced(field)): _column(field, setups) for field in fields if field != without}


def _column(field: str, setups: Sequence[Mapping[str, Any]]) -> Column:
    if field == "strategy":
        return words(map(strategy_text, setups))
    texts = (value_text(field, one[field]) if field in one else "" for one in setups)
    if field not in NUMBERS:
        return words(texts)
    values = (one.get(field) for one in setups)
    known = (float(value) if isinstance(value, int | float) else None for value in values)
    return Column(tuple(map(Cell, texts, known)), is_number=True)


def answer_column(name: str, rows: Sequence[TableRow]) -> Column:
    """Return a column of answers, with the texts of the terminal."""
    if name in ("impossible", "unknown"):
        return words(row[name] or "" for row in rows)
    cells = (
        Cell(cell_text(name, row), row[name] if is_number(name) else None, name == "fits" and row[name] is False)
        for row in rows
    )
    return Column(tuple(cells), is_number(name))


def listed(names: Iterable[str], what: str) -> str:
    """Return different names as text: ``a and b``; of many how many there are."""
    different = list(dict.fromkeys(names))
    if len(different) > _MOST_NAMED:
        return f"{len(different)} {what}"
    *others, last = different
    return f"{', '.join(others)} and {last}" if others else last
