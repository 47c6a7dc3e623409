"""Text that several modules share: the word for unknown values, hardware as text, lines of a name and a value."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from fsdp_bench.report.terminal import terminal_width
from fsdp_bench.spec.hardware import Hardware

UNKNOWN = "unknown"
_INDENT = 18


def hardware_text(hardware: Hardware | None, world_size: int) -> str:
    """Return the hardware as text: ``2 x p5.48xlarge (16 x H100-SXM)``, GPUs without a server, or ranks on a CPU."""
    if hardware is None:
        return f"{world_size} x CPU"
    gpus = f" ({hardware.world_size} x {hardware.gpu.name})" if hardware.has_server else ""
    return f"{hardware.count(world_size)} x {hardware.name}{gpus}"


def assumed_lines(assumed: Iterable[str]) -> list[str]:
    """Return the second line of an answer, with what is assumed as transformers' Trainer does it; none of nothing."""
    found = dict.fromkeys(assumed)
    return [f"  as transformers' Trainer: {'; '.join(found)}"] if found else []


def fact(name: str, value: str, indent: int = _INDENT) -> str:
    """Return a name and its value as lines; wrap a long value in its column."""
    width = terminal_width() - indent
    lines = textwrap.wrap(value, width, break_on_hyphens=False, break_long_words=False) or [""]
    return "\n".join(f"{start:<{indent}}{line}" for start, line in zip([name, *[""] * len(lines)], lines, strict=False))
