"""The comparison of published throughput with predictions, made once for all tests of a worker."""

from __future__ import annotations

import pytest

from tools.validate.published.speed import SpeedRow, SpeedSummary, compare_speed


@pytest.fixture(scope="session")
def compared() -> tuple[list[SpeedRow], SpeedSummary]:
    """Every published row with its prediction, and the summary."""
    return compare_speed()
