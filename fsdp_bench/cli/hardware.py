"""Reads where to look: servers or GPUs, several of each, and a card's memory from the command line."""

from __future__ import annotations

from datetime import date

from msgspec.structs import replace

from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import Cluster, Gpu, Source
from fsdp_bench.spec.units import GIB, format_gib, parse_bytes


def sized(hardware: Cluster | Gpu | None, gpu_memory: str | None) -> Cluster | Gpu:
    """Return hardware whose card's usable memory is known: documented, or as the command line says.

    Raises:
        SpecError: where none is named, nobody documents the memory, or the card has less than is said.
    """
    if hardware is None:
        raise SpecError("no GPU is named; --server NAME or --gpu NAME")
    gpu = hardware.gpu if isinstance(hardware, Cluster) else hardware
    if gpu_memory is None:
        if gpu.usable_memory_bytes is None:
            raise SpecError(
                f"gpu: nobody documents how much memory a process can use on {gpu.name};"
                f" say it with --gpu-memory, below its {gpu.memory_gib:g} GiB"
            )
        return hardware
    size = parse_bytes(gpu_memory, "gpu-memory")
    if size > gpu.memory_gib * GIB:
        raise SpecError(f"gpu-memory: {format_gib(size)} is not allowed; {gpu.name} has {gpu.memory_gib:g} GiB")
    source = Source(title="the command line, --gpu-memory", date=date.today().isoformat())
    told = replace(gpu, usable_memory_bytes=size, usable_memory_source=source)
    return replace(hardware, gpu=told) if isinstance(hardware, Cluster) else told
