"""Words and lines that several texts share."""

from __future__ import annotations

import textwrap

UNKNOWN = "unknown"
_INDENT = 18
_WIDTH = 120


def fact(name: str, value: str) -> str:
    """Return a fact on a line, a long one wrapped under itself."""
    lines = textwrap.wrap(value, _WIDTH - _INDENT, break_on_hyphens=False) or [""]
    return "\n".join(
        f"{start:<{_INDENT}}{line}" for start, line in zip([name, *[""] * len(lines)], lines, strict=False)
    )
