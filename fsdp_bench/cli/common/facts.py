"""Facts of the catalogue: one a line, and ``unknown`` where a value is not documented."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from fsdp_bench.report.terminal import print_lines
from fsdp_bench.report.text.common import UNKNOWN, fact
from fsdp_bench.spec.hardware import Source

T = TypeVar("T")
Fact = tuple[str, str]
_INDENT = 26


def known(value: T | None, text: Callable[[T], str]) -> str:
    """Return a value as text, or ``unknown`` when it is absent."""
    return UNKNOWN if value is None else text(value)


def rate(bytes_per_second: float | None) -> str:
    """Return a bandwidth in decimal GB/s, as vendors print it."""
    return known(bytes_per_second, lambda value: f"{value / 1e9:g} GB/s")


def source_facts(source: Source) -> list[Fact]:
    """Return where a fact was read, as lines under it."""
    lines = [("  source", f"{source.title} ({source.date})")]
    return lines + ([("  note", source.note)] if source.note else [])


def print_facts(facts: Sequence[Fact]) -> None:
    """Print one fact a line, long ones wrapped under themselves."""
    print_lines("\n".join(fact(name, value, _INDENT) for name, value in facts))
