"""The ranges beside planned speeds are the errors that validate shows."""

from __future__ import annotations

import pytest

from fsdp_bench.catalog.loader import BUILT_IN
from fsdp_bench.plan.purchase.ranges import peak_range, prediction_errors, range_of
from fsdp_bench.validate.published.ranges import errors_of_predictions


def test_the_file_holds_what_validate_shows() -> None:
    assert prediction_errors() == errors_of_predictions()


def test_a_range_is_what_published_runs_reached_and_none_where_nothing_was_compared() -> None:
    found = range_of(BUILT_IN.gpu("H100-SXM"), compiled=False)
    assert found is not None
    errors = prediction_errors().speed["H100 eager"]
    assert found.slowest * (1 + errors.highest) == pytest.approx(1)
    assert found.fastest * (1 + errors.lowest) == pytest.approx(1)
    assert found.slowest < found.fastest < 1  # every prediction was too fast
    assert "too fast in 8 published H100 eager runs" in found.because
    for name in ("B200", "MI300X", "H100-PCIe", "H100-NVL", "A10G"):
        assert range_of(BUILT_IN.gpu(name), compiled=False) is None


def test_a_peak_has_the_range_of_published_peaks() -> None:
    found = peak_range(compiled=False)
    assert found is not None
    assert found.lowest <= 1 < found.highest
    assert "published eager peaks" in found.because
