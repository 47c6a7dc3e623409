"""Sizes, counts and times in and out."""

import pytest

from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.units import format_count, format_gib, format_seconds, parse_bytes, parse_count


def test_sizes_and_counts_are_read() -> None:
    sizes = {"24GiB": 24 * 2**30, "1.5 MiB": 3 * 2**19, "80GB": 80 * 10**9, 7: 7, "7 b": 7}
    assert {text: parse_bytes(text) for text in sizes} == sizes
    counts = {"7B": 7 * 10**9, "124M": 124 * 10**6, "1.5t": 15 * 10**11, 5: 5}
    assert {text: parse_count(text) for text in counts} == counts


@pytest.mark.parametrize("text", ["24", "GiB", "-1GiB", "0GiB", 0, True, None, 1.5, "24 gallons"])
def test_sizes_without_a_unit_or_a_value_are_refused(text: object) -> None:
    with pytest.raises(SpecError, match="memory"):
        parse_bytes(text, "memory")  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["7 Q", "", "B", "-7B", 0, False])
def test_counts_that_are_none_are_refused(text: object) -> None:
    with pytest.raises(SpecError):
        parse_count(text)  # type: ignore[arg-type]


def test_printing() -> None:
    sizes = {24 * 2**30: "24.0 GiB", 3 * 2**19: "1.5 MiB", 2**20: "1.0 MiB", 3 * 2**9: "1.5 KiB", 4: "4 B", 0: "0 B"}
    assert {size: format_gib(size) for size in sizes} == sizes
    assert format_gib(-(2**19)) == "-512.0 KiB"
    assert [format_count(count) for count in (6_738_415_616, 999_999_999, 12)] == ["6.74B", "1B", "12"]
    assert [format_seconds(each) for each in (0.0123, 4.2, 200)] == ["12.3 ms", "4.2 s", "3 min 20 s"]
