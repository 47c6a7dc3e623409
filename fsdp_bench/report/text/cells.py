"""Cells and headers of tables of rows (plan/table/rows.py), for every column that --columns can name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsdp_bench.plan.table.columns import Row
from fsdp_bench.plan.table.rows import SETUP_FIELDS
from fsdp_bench.report.text.common import UNKNOWN
from fsdp_bench.report.text.setups import NUMBERS, header_of, spaced, value_text
from fsdp_bench.report.text.speed import percent, step_text
from fsdp_bench.spec.units import format_gib

_HEADERS = {
    "peak_allocated_bytes": "peak\nallocated",
    "peak_phase": "in phase",
    "needed_bytes": "needs",
    "headroom_bytes": "left",
    "largest_category": "mostly",
    "step_seconds": "step",
    "exposed_fraction": "exposed",
    "tokens_per_second_per_gpu": "tokens/s\nper GPU",
    "mfu": "MFU",
    "hfu": "HFU",
}
_FITS = {"fits": "yes", "runs_with_retries": "NO: retries", "does_not_fit": "NO"}
_OF_TIME = ("step_seconds", "exposed_fraction", "tokens_per_second_per_gpu", "mfu", "hfu")
"""Columns that are left empty where a setup does not fit."""


def column_header(name: str) -> str:
    """Return the header of a column."""
    if name in _HEADERS:
        return _HEADERS[name]
    if name in (*SETUP_FIELDS, "num_nodes", "world_size"):
        return header_of(name)
    return name.removesuffix("_bytes").removesuffix("_seconds").replace("_", "\n")


def is_number(name: str) -> bool:
    """Whether a column is aligned on the right."""
    ends = ("_bytes", "_seconds", "_value", "per_node")
    return name.endswith(ends) or name in (*_OF_TIME, *NUMBERS, "num_parameters", "num_hidden_layers", "hidden_size")


def cell_text(name: str, row: Row) -> str:
    """Return a cell as text."""
    value = row[name]
    if name in _TEXTS:
        return _TEXTS[name](row)
    if name in SETUP_FIELDS:
        return value_text(name, value)
    if value is None:
        return "-" if row["fits"] is not None or row["impossible"] else UNKNOWN
    if name in _OF_TIME and row["fits"] is False:
        return "-"
    return _value_text(name, value)


def _value_text(name: str, value: Any) -> str:
    if name.endswith("_bytes"):
        return format_gib(value)
    if name.endswith("_seconds"):
        return step_text(value)
    if name in ("mfu", "hfu", "exposed_fraction"):
        return percent(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,.0f}" if isinstance(value, int | float) else spaced(value) if name == "verdict" else str(value)


def _fits(row: Row) -> str:
    if row["verdict"] is None:
        return UNKNOWN if row["fits"] is None else "NO"
    return "NO: host memory" if row["exceeds"] == "host" else _FITS[row["verdict"]]


def _mostly(row: Row) -> str:
    largest = row["largest_category"]
    if largest is None:
        return "-"
    return f"{spaced(largest)} {row[f'{largest}_at_peak_bytes'] / row['peak_allocated_bytes']:.0%}"


_TEXTS: dict[str, Callable[[Row], str]] = {"fits": _fits, "largest_category": _mostly}
