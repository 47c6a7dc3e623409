"""Text that several modules share: the word for unknown values, hardware as text, lines of a name and a value."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from fsdp_bench.report.terminal import terminal_width
from fsdp_bench.spec.hardware import Cluster, Gpu

UNKNOWN = "unknown"
_INDENT = 18


def hardware_text(hardware: Cluster | Gpu | None, world_size: int) -> str:
    """Return the hardware as text: ``2 x p5.48xlarge (16 x H100-SXM)``, GPUs without a server, or ranks on a CPU."""
    if isinstance(hardware, Cluster):
        gpus = f"{hardware.num_nodes * hardware.gpus_per_node} x {hardware.gpu.name}"
        return f"{hardware.num_nodes} x {hardware.server.name} ({gpus})"
    return f"{world_size} x {hardware.name if hardware else 'CPU'}"


def assumed_lines(assumed: Iterable[str]) -> list[str]:
    """Return the second line of an answer, with what is assumed as transformers' Trainer does it; none of nothing."""
    found = dict.fromkeys(assumed)
    return [f"  as transformers' Trainer: {'; '.join(found)}"] if found else []


def fact(name: str, value: str, indent: int = _INDENT) -> str:
    """Return a name and its value as lines; wrap a long value in its column."""
    width = terminal_width() - indent
    lines = textwrap.wrap(value, width, break_on_hyphens=False, break_long_words=False) or [""]
    return "\n".join(f"{start:<{indent}}{line}" for start, line in zip([name, *[""] * len(lines)], lines, strict=False))
