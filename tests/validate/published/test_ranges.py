"""The ranges beside planned speeds are the errors that validate shows."""

from __future__ import annotations

from fsdp_bench.catalog.loader import BUILT_IN
from fsdp_bench.plan.purchase.ranges import range_of, speed_errors
from fsdp_bench.validate.published.ranges import errors_by_generation


def test_the_file_holds_what_validate_shows() -> None:
    assert speed_errors() == errors_by_generation()


def test_a_range_contains_the_prediction_and_is_none_where_nothing_was_compared() -> None:
    found = range_of(BUILT_IN.gpu("H100-SXM"), compiled=False)
    assert found is not None
    assert found.slowest < 1 <= found.fastest
    assert "too fast in 8 published H100 eager runs" in found.because
    for name in ("B200", "MI300X", "H100-PCIe", "A10G"):
        assert range_of(BUILT_IN.gpu(name), compiled=False) is None
