"""Axes: every value has a place in the chart, larger values are never before smaller ones, ticks are few."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_bench.report.charts.axis import Axis, around, from_zero

values = st.lists(st.floats(1e-9, 1e18), min_size=1, max_size=8)


@given(values, st.booleans())
def test_every_value_has_its_place(found: list[float], may_be_log: bool) -> None:
    for scale in (from_zero("", found), around("", found, may_be_log)):
        assert scale.low <= min(found)
        assert scale.high >= max(found)
        places = [scale.at(value) for value in sorted(found)]
        assert places == sorted(places)
        assert 0 <= places[0] <= places[-1] <= 100
        ticks = scale.ticks()
        assert 1 <= len(ticks) <= 18
        assert all(0 <= scale.at(tick.value) <= 100 for tick in ticks)


def test_an_axis_says_where_it_does_not_begin_at_zero() -> None:
    assert around("", [90.0, 100.0]).remark
    assert not around("", [10.0, 100.0]).remark


def test_a_logarithmic_axis_has_equal_factors_at_equal_distances() -> None:
    scale = Axis("", 1.0, 100.0, is_log=True)
    assert scale.at(10.0) == pytest.approx(50)
    assert [tick.text for tick in scale.ticks()] == ["1", "2", "5", "10", "20", "50", "100"]


def test_large_numbers_are_short() -> None:
    assert [tick.text for tick in Axis("", 0.0, 300_000.0).ticks()][-2:] == ["250k", "300k"]
