"""Reads where to look: a card's memory from the command line, and what a calibration says of it."""

from __future__ import annotations

from fsdp_bench.predict.usable_memory import sized, without_context
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import Cluster, Gpu
from fsdp_bench.spec.units import format_gib, parse_bytes

__all__ = ["sized", "stated_headroom", "without_context"]


def stated_headroom(text: str | None, hardware: Cluster | Gpu | None) -> int | None:
    """Return what --headroom says is kept free of each GPU; None where it is not given.

    Raises:
        SpecError: for what is no size, and for as much as a process can use or more.
    """
    if text is None:
        return None
    size = parse_bytes(text, "headroom")
    gpu = hardware.gpu if isinstance(hardware, Cluster) else hardware
    usable = gpu.usable_memory_bytes if gpu is not None else None
    if usable is not None and size >= usable:
        raise SpecError(
            f"headroom: {format_gib(size)} is not allowed; a process can use {format_gib(usable)} of the GPU"
        )
    return size
