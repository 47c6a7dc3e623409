"""What setups on a page are and what they differ in: columns of tables, names in sentences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fsdp_bench.plan.document import HardwareDocument, ModelDocument
from fsdp_bench.report.html.blocks import Cell
from fsdp_bench.report.text.setups import FIELDS, PLACES, SELDOM, named_values, spaced, value_text
from fsdp_bench.report.text.setups import NUMBERS as FIELDS_OF_NUMBERS

ALWAYS = ("strategy", *(field for field in FIELDS if field not in SELDOM), "loss")
"""Fields that a table has in any case: a column, or a line above it where all rows have the same value."""
_TITLES = {"num_nodes": "nodes", "gpus_per_node": "GPUs per node", "world_size": "GPUs", "lora": "LoRA"}
_MOST_NAMED = 3
"""Of more models or servers their number is named."""


def values_of(
    setup: Mapping[str, Any], server: HardwareDocument | None = None, model: ModelDocument | None = None
) -> dict[str, Any]:
    """Return what a setup may differ in from others, by field; what it runs on and its model where they are given."""
    values = dict(setup)
    if server is not None:
        values |= {"server": server.name, "gpu": server.gpu}
        values |= {"num_nodes": server.num_nodes, "gpus_per_node": server.gpus_per_node}
    if model is not None:
        values |= {"model": model.name, "code": model.code, "lora": model.lora and model.lora.text()}
    return values


def title_of(field: str) -> str:
    """Return the title of a field's column."""
    return _TITLES.get(field, spaced(field))


NUMBERS = (
    *map(title_of, FIELDS_OF_NUMBERS),
    *("#", "allocated", "needed", "headroom", "step", "exposed", "tokens/s per GPU", "MFU"),
)
"""Titles of columns of numbers."""


def fields_shown(varying: Sequence[str]) -> list[str]:
    """Return the fields of a table: what setups differ in, and ALWAYS."""
    return [field for field in (*PLACES, "strategy", *FIELDS) if field in varying or field in ALWAYS]


def cell_of(field: str, values: Mapping[str, Any]) -> Cell:
    """Return the value of a field as a cell."""
    value = values.get(field)
    if field == "strategy":
        return Cell(strategy_of(values))
    number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
    return Cell("" if field not in values else value_text(field, value), number)


def strategy_of(values: Mapping[str, Any]) -> str:
    """Return a setup's strategy, with the size of its shard groups and what runs instead, if that is another."""
    name, runs = str(values.get("strategy")), values.get("effective_strategy")
    shard, ranks = values.get("shard_size"), values.get("world_size")
    if isinstance(shard, int) and isinstance(ranks, int) and 1 < shard < ranks:
        name += f" ({shard})"
    return name if runs in (None, values.get("strategy")) else f"{name} (runs {runs})"


def name_of(values: Mapping[str, Any], varying: Iterable[str]) -> str:
    """Return the name of a setup in a sentence: its strategy, and what it differs in from others."""
    return ", ".join([strategy_of(values), *named_values(values, varying)])


def hardware_of(server: HardwareDocument, num_gpus: Any = None) -> str:
    """Return the hardware as text, a lone GPU with how many of them there are where that is given."""
    if server.name is not None:
        nodes = f"{server.num_nodes} x {server.name}"
        return f"{nodes} ({(server.num_nodes or 1) * (server.gpus_per_node or 1)} {server.gpu})"
    if server.gpu is None:
        return "no hardware named"
    return f"{num_gpus} x {server.gpu}" if isinstance(num_gpus, int) else server.gpu


def listed(names: Iterable[str], what: str) -> str:
    """Return different names as text: ``a and b``; of many how many there are."""
    different = list(dict.fromkeys(names))
    if len(different) > _MOST_NAMED:
        return f"{len(different)} {what}"
    *others, last = different
    return f"{', '.join(others)} and {last}" if others else last
