"""NCCL's communicators as text: their number, their ranks and their GPU memory."""

from __future__ import annotations

from collections import Counter

from fsdp_bench.rates.communicators import Communicator, Communicators, Purpose
from fsdp_bench.rates.nccl_buffers import Bounds
from fsdp_bench.report.text.common import fact
from fsdp_bench.spec.units import format_gib

_PURPOSE_TEXTS = {
    Purpose.SHARD: "to shard",
    Purpose.REPLICATE: "to add gradients up",
    Purpose.BARRIERS: "for barriers",
    Purpose.POST_FORWARD: "to gather in backward, one for each unit",
    Purpose.ACROSS_POST_FORWARD: "unused, of the same meshes",
}


def communicators_fact(found: Communicators | None) -> list[str]:
    """Return the line about NCCL's memory, or no line without a GPU or for one rank."""
    if found is None or not found.each:
        return []
    count = "1 communicator" if len(found.each) == 1 else f"{len(found.each)} communicators"
    each = "; ".join(_times(count) + _described(one) for one, count in Counter(found.each).items())
    total = found.num_bytes
    if total is None:
        why = each if any(one.num_bytes for one in found.each) else found.unknown
        return [fact("NCCL", f"unknown: {why}")]
    return [fact("NCCL", f"{bounds_text(total)} in {count} (predicted from NCCL's source; not measured): {each}")]


def _times(count: int) -> str:
    return "" if count == 1 else f"{count} "


def _described(one: Communicator) -> str:
    start = f"{_PURPOSE_TEXTS[one.purpose]}, {one.num_ranks} ranks"
    if one.num_bytes is None or one.num_channels is None:
        return f"{start}, unknown: {one.unknown}"
    return f"{start}, {_count_text(one.num_channels)} channels, {bounds_text(one.num_bytes)}"


def bounds_text(size: Bounds) -> str:
    """Return bounds as text: ``1.2 GiB`` if they are equal, else ``1.1 to 1.2 GiB`` or ``800.0 MiB to 1.2 GiB``."""
    low, high = format_gib(size.low), format_gib(size.high)
    if low == high:
        return high
    unit = high.rpartition(" ")[2]
    return f"{low.removesuffix(f' {unit}')} to {high}"


def _count_text(count: Bounds) -> str:
    return str(count.high) if count.low == count.high else f"{count.low} to {count.high}"
