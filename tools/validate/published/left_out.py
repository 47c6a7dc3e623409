"""The assumptions of a comparison, and the rows that it leaves out, grouped by assumption or reason."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from fsdp_bench.report.terminal import terminal_width


def wrapped(text: str, indent: int, hanging: int = 4) -> list[str]:
    """Wrap a paragraph; indent all lines but the first further."""
    first, rest = " " * indent, " " * (indent + hanging)
    return textwrap.wrap(
        text,
        terminal_width(),
        initial_indent=first,
        subsequent_indent=rest,
        break_on_hyphens=False,
        break_long_words=False,
    )


def taken(rows: Iterable[tuple[str, Sequence[str]]]) -> list[str]:
    """Return each assumption with the names of its rows, from pairs of a row's name and its assumptions."""
    found: dict[str, dict[str, None]] = {}
    for name, assumptions in rows:
        for fact in assumptions:
            found.setdefault(fact, {})[name] = None
    return ["taken:", *(line for fact, names in found.items() for line in wrapped(f"{', '.join(names)}: {fact}", 2))]


def left_out(reasons: Iterable[tuple[str, str | None]]) -> list[str]:
    """Return the number of rows left out per reason, the most frequent first, from pairs of case and reason."""
    grouped: dict[str, list[str]] = {}
    for case, reason in reasons:
        if reason is not None:
            grouped.setdefault(reason, []).append(case)
    if not grouped:
        return ["left out: none"]
    total = sum(len(cases) for cases in grouped.values())
    lines = [f"left out: {total} (which ones: --json)"]
    for reason, cases in sorted(grouped.items(), key=lambda pair: -len(pair[1])):
        named = f": {cases[0]}" if len(cases) == 1 else ""
        lines += wrapped(f"{len(cases):>3}  {reason}{named}", 2, 5)
    return lines
