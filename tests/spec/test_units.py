"""Sizes, counts and times in and out."""

from __future__ import annotations

import pytest

from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.units import format_count, format_gib, format_seconds, parse_bytes, parse_count


@pytest.mark.parametrize(
    ("text", "size"), [("24GiB", 24 * 2**30), ("1.5 MiB", 3 * 2**19), ("80GB", 80 * 10**9), (7, 7), ("7 b", 7)]
)
def test_sizes_are_read(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["24", "GiB", "-1GiB", "0GiB", 0, True, None, 1.5, "24 gallons"])
def test_sizes_without_a_unit_or_a_value_are_refused(text: object) -> None:
    with pytest.raises(SpecError, match="memory"):
        parse_bytes(text, "memory")  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "count"), [("7B", 7 * 10**9), ("124M", 124 * 10**6), ("1.5t", 15 * 10**11), (5, 5)])
def test_counts_are_read(text: str | int, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["7 Q", "", "B", "-7B", 0, False])
def test_counts_that_are_none_are_refused(text: object) -> None:
    with pytest.raises(SpecError):
        parse_count(text)  # type: ignore[arg-type]


def test_printing() -> None:
    assert format_gib(24 * 2**30) == "24.0 GiB"
    assert format_gib(3 * 2**19) == "1.5 MiB"
    assert format_gib(2**20) == "1.0 MiB"
    assert format_gib(3 * 2**9) == "1.5 KiB"
    assert format_gib(-(2**19)) == "-512.0 KiB"
    assert (format_gib(4), format_gib(0)) == ("4 B", "0 B")
    assert format_count(6_738_415_616) == "6.74B"
    assert format_count(999_999_999) == "1B"
    assert format_count(12) == "12"
    assert format_seconds(0.0123) == "12.3 ms"
    assert format_seconds(4.2) == "4.2 s"
    assert format_seconds(200) == "3 min 20 s"
