"""Facts of the catalogue as lines: a name and a value, or ``unknown`` if the value is not documented."""

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
    """Return a value as text, or ``unknown`` if it is None."""
    return UNKNOWN if value is None else text(value)


def rate(bytes_per_second: float | None) -> str:
    """Return a bandwidth in decimal GB/s, as vendors print it."""
    return known(bytes_per_second, lambda value: f"{value / 1e9:g} GB/s")


def source_facts(source: Source) -> list[Fact]:
    """Return the source of a fact, and its note if there is one, as lines to print under the fact."""
    lines = [("  source", f"{source.title} ({source.date})")]
    return lines + ([("  note", source.note)] if source.note else [])


def print_facts(facts: Sequence[Fact]) -> None:
    """Print one fact per line; wrap long values in their column."""
    print_lines("\n".join(fact(name, value, _INDENT) for name, value in facts))
