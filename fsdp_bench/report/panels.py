"""Which records share a picture, how each is labelled, and the conditions that the picture prints.

A panel is one model on one number of ranks of one machine; its rows are grouped by strategy. What differs between
its rows stands on the rows; what does not, in the conditions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from fsdp_bench.spec.codec import to_builtins
from fsdp_bench.spec.record import Outcome, TrialRecord
from fsdp_bench.spec.setup import ShardingStrategy
from fsdp_bench.spec.units import format_gib

MAX_ROWS = 28
"""Rows that a slide of 16 x 9 inches shows legibly."""

ORDER = (
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.HYBRID_SHARD,
    ShardingStrategy.HYBRID_SHARD_ZERO2,
    ShardingStrategy.NO_SHARD,
)

_SPLIT_BY = ("precision", "checkpointing", "offload", "api", "loss", "micro_batch_size", "sequence_length")
_SHOWN_APART = ("strategy", "world_size", "shard_size")
_WORDS = {
    ("checkpointing", "none"): "no checkpointing",
    ("checkpointing", "full"): "full checkpointing",
    ("checkpointing", "selective"): "selective checkpointing",
    ("offload", "none"): "no offload",
    ("offload", "params"): "offload",
}
_FIELD_NAMES = {"micro_batch_size": "batch", "sequence_length": "sequence", "gradient_accumulation_steps": "accumulate"}


@dataclass(frozen=True)
class Row:
    """One trial in a picture."""

    record: TrialRecord
    label: str


@dataclass(frozen=True)
class Panel:
    """One picture's worth of trials."""

    name: str
    """For the file's name: letters, digits, '.' and '-'."""
    title: str
    """Model and ranks."""
    conditions: tuple[str, ...]
    """Lines to print on the picture."""
    groups: tuple[tuple[str, tuple[Row, ...]], ...]
    """Strategy and its rows, in the order of ORDER."""


def panels(records: Iterable[TrialRecord], machine: str) -> list[Panel]:
    """Sort records that ran into panels; skipped ones are left out, kinds of device are never mixed."""
    ran = [record for record in records if record.outcome is not Outcome.SKIPPED]
    keyed: dict[tuple[str, str, int], list[TrialRecord]] = {}
    for record in ran:
        keyed.setdefault((record.device, record.model.describe(), record.setup.world_size), []).append(record)
    devices = {record.device for record in ran}
    made = []
    for (device, _, _), members in keyed.items():
        prefix = f"{device}-" if len(devices) > 1 else ""
        made += [_panel(part, machine, prefix, suffix) for suffix, part in _split(members)]
    return made


def _facts(record: TrialRecord) -> dict[str, str]:
    return {key: str(value) for key, value in to_builtins(record.setup).items() if key not in _SHOWN_APART}


def _varying(records: list[TrialRecord]) -> list[str]:
    facts = [_facts(record) for record in records]
    return [key for key in facts[0] if len({fact[key] for fact in facts}) > 1]


def _split(records: list[TrialRecord]) -> list[tuple[str, list[TrialRecord]]]:
    """Split what is too much for one picture by a field that varies; each part with its place in the name."""
    varying = _varying(records)
    field = next((field for field in _SPLIT_BY if field in varying), None)
    if len(records) <= MAX_ROWS or field is None:
        return [("", records)]
    parts: dict[str, list[TrialRecord]] = {}
    for record in records:
        parts.setdefault(_facts(record)[field], []).append(record)
    return [(f"-{word(field, value)}{rest}", sub) for value, part in parts.items() for rest, sub in _split(part)]


def word(field: str, value: str) -> str:
    """Return a setup's value as a picture says it: ``full checkpointing``, ``batch 2``, ``fsdp1``."""
    if (field, value) in _WORDS:
        return _WORDS[field, value]
    if field in ("api", "precision", "optimizer"):
        return value
    return f"{_FIELD_NAMES.get(field, field)} {value}"


def _panel(records: list[TrialRecord], machine: str, prefix: str, suffix: str) -> Panel:
    first, varying = records[0], _varying(records)
    world = first.setup.world_size
    groups = []
    for strategy in ORDER:
        rows = tuple(Row(r, _label(r, varying)) for r in records if r.setup.strategy is strategy)
        if rows:
            groups.append((strategy.value, rows))
    name = f"{prefix}{first.model.name}-{world}-ranks{suffix}"
    return Panel(
        name=re.sub(r"[^A-Za-z0-9.]+", "-", name),
        title=f"{first.model.describe()}, {world} ranks",
        conditions=_conditions(records, varying, machine),
        groups=tuple(groups),
    )


def _label(record: TrialRecord, varying: list[str]) -> str:
    words = [word(field, value) for field, value in _facts(record).items() if field in varying]
    if record.effective_strategy != record.setup.strategy.value:
        words.append(f"(ran {record.effective_strategy})")
    return ", ".join(words) or "this setup"


def _conditions(records: list[TrialRecord], varying: list[str], machine: str) -> tuple[str, ...]:
    first = records[0]
    facts = _facts(first)
    always = ("micro_batch_size", "sequence_length", "precision", "api", "checkpointing", "offload", "optimizer")
    constant = [word(field, facts[field]) for field in always if field not in varying]
    named = [_FIELD_NAMES.get(field, field) for field in always if field in varying]
    environment = next((rank.environment for rank in first.ranks if rank.environment), {})
    device = "CPU, gloo" if first.device == "cpu" else first.device
    ran = [f"measured on {machine} ({device})", f"torch {environment.get('torch', 'unknown')}"]
    run = first.run
    ran.append(f"{run.warmup_steps} warm-up, {run.steps} measured, {run.communication_steps} profiled steps")
    if first.run.memory_limit_bytes is not None:
        kind = "budget" if first.device == "cpu" else "limit"
        ran.append(f"{kind} of {format_gib(first.run.memory_limit_bytes)} per rank")
    labelled = f"; on the rows: {', '.join(named)}" if named else ""
    return (
        "; ".join(ran),
        f"{first.model.describe()}, {first.setup.world_size} ranks; " + ", ".join(constant) + labelled,
    )
