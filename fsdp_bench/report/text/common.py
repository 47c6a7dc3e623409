"""Text that several modules share: unknown values, NCCL's memory, exported files, lines of a fact."""

import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp_bench.rates.communicators import Communicator, Communicators, Purpose
from fsdp_bench.rates.nccl_buffers import Bounds
from fsdp_bench.report.terminal import terminal_width
from fsdp_bench.spec.units import format_gib

UNKNOWN = "unknown"
_INDENT = 18
Fact = tuple[str, str]
"""A name and a value."""


def assumed_lines(assumed: Iterable[str]) -> list[str]:
    """Return the second line of an answer, with what is assumed as transformers' Trainer does it; none of nothing."""
    found = dict.fromkeys(assumed)
    return [f"  as transformers' Trainer: {'; '.join(found)}"] if found else []


def fact(name: str, value: str, indent: int = _INDENT) -> str:
    """Return a name and its value as lines; wrap a long value in its column."""
    start, rest = f"{name:<{indent}}", " " * indent
    lines = textwrap.wrap(
        value,
        terminal_width(),
        initial_indent=start,
        subsequent_indent=rest,
        break_on_hyphens=False,
        break_long_words=False,
    )
    return "\n".join(lines or [start])


def exports_text(written: Sequence[Mapping[str, Any]], folder: Path) -> str:
    """Return the files of plan.export.document as lines; commands are started in their ``folder``."""
    where = "the current folder" if str(folder) == "." else str(folder)
    names = ", ".join(Path(file["path"]).name for file in written)
    lines = ["", fact("exported", f"{names} into {where}, where they are started")]
    lines += [fact("start", command) for command in dict.fromkeys(file["start"] for file in written) if command]
    notes = dict.fromkeys(note for file in written for note in file["notes"])
    return "\n".join([*lines, *(fact("note", note) for note in notes)])


_PURPOSE_TEXTS = {
    Purpose.SHARD: "to shard",
    Purpose.REPLICATE: "to add gradients up",
    Purpose.BARRIERS: "for barriers",
    Purpose.POST_FORWARD: "to gather in backward, one for each unit",
    Purpose.ACROSS_POST_FORWARD: "unused, of the same meshes",
}


def communicators_fact(found: Communicators | None) -> list[Fact]:
    """Return the fact about NCCL's memory, or none without a GPU or for one rank."""
    if found is None or not found.each:
        return []
    count = "1 communicator" if len(found.each) == 1 else f"{len(found.each)} communicators"
    several = Counter(found.each).items()
    each = "; ".join(("" if number == 1 else f"{number} ") + _described(one) for one, number in several)
    total = found.num_bytes
    if total is None:
        why = each if any(one.num_bytes for one in found.each) else found.unknown
        return [("NCCL", f"unknown: {why}")]
    return [("NCCL", f"{bounds_text(total)} in {count} (predicted from NCCL's source; not measured): {each}")]


def _described(one: Communicator) -> str:
    start = f"{_PURPOSE_TEXTS[one.purpose]}, {one.num_ranks} ranks"
    if one.num_bytes is None or one.num_channels is None:
        return f"{start}, unknown: {one.unknown}"
    low, high = one.num_channels.low, one.num_channels.high
    return f"{start}, {high if low == high else f'{low} to {high}'} channels, {bounds_text(one.num_bytes)}"


def bounds_text(size: Bounds) -> str:
    """Return bounds as text: ``1.2 GiB`` if they are equal, else ``1.1 to 1.2 GiB`` or ``800.0 MiB to 1.2 GiB``."""
    low, high = format_gib(size.low), format_gib(size.high)
    return high if low == high else f"{low.removesuffix(' ' + high.rpartition(' ')[2])} to {high}"
