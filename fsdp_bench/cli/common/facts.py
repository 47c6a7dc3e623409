"""Prints facts of the catalogue: aligned columns, and ``unknown`` where nobody documents a value."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import TypeVar

from fsdp_bench.report.terminal import print_line
from fsdp_bench.spec.hardware import Source

T = TypeVar("T")
Fact = tuple[str, str]

UNKNOWN = "unknown"
_WIDTH = 120
_INDENT = 26


def known(value: T | None, text: Callable[[T], str]) -> str:
    """Print a value, or ``unknown`` when it is absent."""
    return UNKNOWN if value is None else text(value)


def rate(bytes_per_second: float | None) -> str:
    """Print a bandwidth in decimal GB/s, as vendors do."""
    return known(bytes_per_second, lambda value: f"{value / 1e9:g} GB/s")


def source_facts(source: Source) -> list[Fact]:
    """Return where a fact was read, as lines under it."""
    lines = [("  source", f"{source.title} ({source.date})")]
    return lines + ([("  note", source.note)] if source.note else [])


def print_facts(facts: Sequence[Fact]) -> None:
    """Print one fact a line, long ones wrapped under themselves."""
    for name, value in facts:
        lines = textwrap.wrap(value, _WIDTH - _INDENT, break_on_hyphens=False) or [""]
        print_line(f"{name:<{_INDENT}}{lines[0]}")
        for line in lines[1:]:
            print_line(" " * _INDENT + line)


def columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Align rows under a header, without trailing blanks."""
    table = [header, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in table)
