"""Axes of charts, and places on a page, worked out by hand from a description in the units of its axes."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_bench.report.charts.axis import Axis, around, from_zero
from fsdp_bench.report.charts.colors import PALETTE, Style
from fsdp_bench.report.charts.description import Key, Line, Plot, Point, stacked
from fsdp_bench.report.html.errors import against
from fsdp_bench.report.html.write import area_path, boxes, line_path, palette
from fsdp_bench.spec.units import format_seconds

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


BLUE, RED = Style("blue"), Style("red")
PLOT = Plot("", Axis("", 0.0, 2.0), Axis("", 0.0, 4.0))


def test_a_value_of_a_stack_holds_until_the_next_moment() -> None:
    """From 0 to 1 the layers are 1 and 1 high, then 2 and 1; the plot is 2 wide and 4 high, of 1000 each."""
    (lower, upper), outline = stacked((0.0, 1.0, 2.0), [(BLUE, (1.0, 2.0, 2.0)), (RED, (1.0, 1.0, 1.0))])
    assert area_path(lower, PLOT) == "M0.0 750.0H500.0V500.0H1000.0V500.0L1000.0 1000.0V1000.0H500.0V1000.0H0.0Z"
    assert area_path(upper, PLOT) == "M0.0 500.0H500.0V250.0H1000.0V250.0L1000.0 500.0V500.0H500.0V750.0H0.0Z"
    assert line_path(outline, PLOT) == "M0.0 500.0H500.0V250.0H1000.0V250.0"
    assert line_path(Line(BLUE, (0.0, 2.0), (0.0, 4.0)), PLOT) == "M0.0 1000.0L1000.0 0.0"


def test_an_interval_too_short_to_be_seen_is_widened() -> None:
    first, second = re.findall(r"M([\d.]+) 0H([\d.]+)", boxes([(0.0, 1.0), (1.5, 1.5)], PLOT.x))
    assert first == ("0.00", "500.00")
    assert float(second[1]) > float(second[0]) == 750.0


def test_points_that_overlap_share_a_box_in_the_first_style_of_the_legend() -> None:
    points = (Point(RED, 1.0, 1.0, 1, "one"), Point(BLUE, 1.01, 1.01, 2, "two"), Point(RED, 9.0, 3.0, 3, "three"))
    plot = Plot("", PLOT.x, PLOT.y, points=points, legend=(Key(BLUE, "best"), Key(RED, "others")))
    marks = {mark.text: mark for mark in plot.marks()}
    assert {text: mark.style for text, mark in marks.items()} == {"1,2": BLUE, "3": RED}
    assert marks["1,2"].title == "1: one; 2: two"
    assert marks["3"].is_beyond
    assert marks["3"].x < 100


def test_every_colour_is_in_the_style_sheet_for_light_and_dark_pages() -> None:
    for name, (light, dark) in PALETTE.items():
        assert f"--c-{name}:{light};" in palette()
        assert f"--c-{name}:{dark};" in palette()


def test_step_times_are_drawn_in_the_unit_of_their_axis() -> None:
    """Steps of 10 and 20 milliseconds lie between ticks of 0 and 20 to 30."""
    plot = against("", [(1, 0.010, 0.012), (2, 0.020, 0.018)], "measured", (1e-3, "ms"), format_seconds)
    assert "ms" in plot.x.title
    labels = [float(tick.text) for tick in plot.x.ticks()]
    assert 20 <= max(labels) <= 30
