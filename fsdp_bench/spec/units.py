"""Parsing and printing of sizes, counts and times. Bytes are integers; GiB is only for printing."""

import re

from fsdp_bench.spec.errors import SpecError, shown

KIB, MIB, GIB, TIB = 1024, 1024**2, 1024**3, 1024**4

LARGEST = 2**63 - 1
"""The largest number of bytes, count, or integer in any stored file: 64 bits."""

_BYTE_UNITS = {
    "b": 1,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": TIB,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_NUMBER = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*$")


def parse_bytes(value: str | int, field: str = "size") -> int:
    """Read ``"24GiB"``, ``"512 MiB"``, ``"80GB"`` (decimal) or a number of bytes; return bytes.

    Raises SpecError for anything else, and for sizes that are not positive.
    """
    no_unit = "has no unit of bytes; one of B, KiB, MiB, GiB, TiB, kB, MB, GB, TB"
    return _parse(value, field, "size", "'24GiB'", _BYTE_UNITS, no_unit)


def parse_count(value: str | int, field: str = "count") -> int:
    """Read ``"7B"``, ``"124M"``, ``"1.5T"`` or a plain number; return the count.

    Raises SpecError for anything else, and for counts that are not positive.
    """
    no_unit = "has an unknown suffix; one of K, M, B, T"
    return _parse(value, field, "count", "'7B' or '124M'", _COUNT_UNITS, no_unit)


def parse_watts(value: str | float, field: str = "power") -> float:
    """Read ``"500W"``, ``"0.5kW"`` or a number of watts; return watts.

    Raises SpecError for anything else, and for power that is not positive.
    """
    whole = round(value) if isinstance(value, float) else value
    return _parse(whole, field, "power", "'500W'", {"w": 1, "kw": 1000}, "has no unit of power; W or kW")


def _parse(value: str | int, field: str, what: str, example: str, units: dict[str, int], no_unit: str) -> int:
    size: float
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str) and (found := _NUMBER.match(value)) is not None:
        if (unit := found[2].lower()) not in units:
            raise SpecError(f"{field}: {shown(value)} {no_unit}")
        size = float(found[1]) * units[unit]
    else:
        raise SpecError(f"{field}: {shown(value)} is not a {what}; write it like {example}")
    if size > LARGEST:
        raise SpecError(f"{field}: {shown(value)} is too large")
    if round(size) <= 0:
        raise SpecError(f"{field}: {shown(value)} is not a positive {what}")
    return round(size)


def format_gib(size_bytes: float) -> str:
    """Return bytes as text in GiB with one decimal. Below 1 GiB in MiB, KiB or B, so that no size prints as 0.0."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(size_bytes) >= size:
            return f"{size_bytes / size:.1f} {unit}"
    return f"{size_bytes:.0f} B"


def format_count(count: float) -> str:
    """Return a count as text with three digits and a suffix: ``6738415616`` as ``6.74B``."""
    for suffix, unit in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= 0.9995 * unit:  # what rounds to 1000 of one unit is 1 of the next
            return f"{count / unit:.3g}{suffix}"
    return f"{count:.0f}"


def format_seconds(seconds: float) -> str:
    """Return a duration as text: ``0.8 ms``, ``12.3 ms``, ``4.2 s``, ``3 min 20 s``."""
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{int(seconds // 60)} min {int(seconds % 60)} s"
