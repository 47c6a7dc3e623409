"""Words and lines that several texts share."""

from __future__ import annotations

import textwrap

from fsdp_bench.spec.hardware import Cluster, Gpu

UNKNOWN = "unknown"
_INDENT = 18
_WIDTH = 120


def hardware_words(hardware: Cluster | Gpu | None, world_size: int) -> str:
    """Return what a picture was predicted for: servers and their GPUs, GPUs alone, or ranks on a CPU."""
    if isinstance(hardware, Cluster):
        gpus = f"{hardware.gpus_per_node} x {hardware.gpu.name} each"
        return f"{hardware.num_nodes} x {hardware.server.name}, {gpus}"
    return f"{world_size} x {hardware.name if hardware else 'CPU'}"


def fact(name: str, value: str) -> str:
    """Return a fact on a line, a long one wrapped under itself."""
    lines = textwrap.wrap(value, _WIDTH - _INDENT, break_on_hyphens=False) or [""]
    return "\n".join(
        f"{start:<{_INDENT}}{line}" for start, line in zip([name, *[""] * len(lines)], lines, strict=False)
    )
