"""Labels of the trade-off picture: each beside its point, inside the axes, and on no other label or marker."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_bench.report.charts.canvas import DPI, text_width
from fsdp_bench.report.charts.trade_off import LABEL_AT, LABEL_FONT, MARKER, label_offsets

LIMITS = (100.0, 100.0, 700.0, 600.0)


def boxes_of(middles: list[tuple[float, float]], texts: list[str]) -> list[tuple[float, float, float, float]]:
    """Where the words themselves are: without the margin that the placement keeps."""
    made = []
    for (x, y), text, (dx, dy) in zip(middles, texts, label_offsets(middles, texts, LIMITS), strict=True):
        width, height = text_width(text, LABEL_FONT) / 2, LABEL_FONT * DPI / 72 / 2
        made.append((x + dx - width, y + dy - height, x + dx + width, y + dy + height))
    return made


def meet(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def check(middles: list[tuple[float, float]]) -> None:
    texts = [str(20 + index) for index in range(len(middles))]
    boxes = boxes_of(middles, texts)
    half = MARKER * DPI / 72 / 2 - 1
    for left, bottom, right, top in boxes:
        assert left >= LIMITS[0]
        assert bottom >= LIMITS[1]
        assert right <= LIMITS[2]
        assert top <= LIMITS[3]
    assert not any(meet(*pair) for pair in itertools.combinations(boxes, 2))
    markers = [(x - half, y - half, x + half, y + half) for x, y in middles]
    assert not any(meet(box, marker) for box in boxes for marker in markers)


def test_labels_of_arrows_at_the_right_end_stay_inside() -> None:
    """Four points at the right end and three in a heap: in the old picture numbers were cut and lay on each other."""
    arrows = [(692.0, 300.0), (692.0, 306.0), (692.0, 312.0), (692.0, 590.0)]
    check([*arrows, (300.0, 400.0), (304.0, 402.0), (298.0, 396.0)])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.floats(110, 690), st.floats(110, 590)), min_size=1, max_size=14))
def test_labels_of_scattered_points_are_apart(middles: list[tuple[float, float]]) -> None:
    check(middles)


def test_a_label_is_near_its_point_where_there_is_room() -> None:
    ((dx, dy),) = label_offsets([(400.0, 300.0)], ["1"], LIMITS)
    assert (dx**2 + dy**2) ** 0.5 <= LABEL_AT[0] + 1e-9
