"""Checks of charts, whatever they show."""

import re
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text

SLIDE = (1600, 900)


def assert_is_a_slide(path: Path, *words: str) -> None:
    """Check that a chart has a slide's size and ink in every quarter, or that an SVG contains the words."""
    if path.suffix == ".svg":
        root = ElementTree.fromstring(path.read_text())
        _, _, width, height = map(float, root.attrib["viewBox"].split())
        assert width / height == SLIDE[0] / SLIDE[1]
        written = " ".join(re.findall("<!-- (.*?) -->", path.read_text()))
        assert all(word in written for word in words), written
        return
    assert not words, "pixels have no words"
    pixels = imread(path)[..., :3]
    height, width = pixels.shape[:2]
    assert (width, height) == SLIDE
    is_drawn = abs(pixels - pixels[0, 0]).max(axis=2) > 0.1
    for rows in (slice(0, height // 2), slice(height // 2, height)):
        for columns in (slice(0, width // 2), slice(width // 2, width)):
            assert is_drawn[rows, columns].mean() > 0.002


def texts_of(figure: Figure) -> list[Text]:
    parts = [figure, *figure.subfigs]
    found = [text for part in parts for text in part.texts]
    found += [text for part in parts for legend in part.legends for text in legend.get_texts()]
    for axes in figure.axes:
        found += [*axes.texts, axes.title, axes._left_title, axes.xaxis.label, axes.yaxis.label]
        if axes.axison:
            found += [tick.label1 for axis in (axes.xaxis, axes.yaxis) for tick in axis._update_ticks()]
    return [text for text in found if text.get_text().strip() and text.get_visible()]


def text_of_quantity(figure: Figure) -> str:
    """Return all text of the chart, with single blanks."""
    return " ".join(" ".join(text.get_text() for text in texts_of(figure)).split())


def assert_texts_are_inside_and_apart(figure: Figure) -> None:
    figure.draw_without_rendering()
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts_of(figure)]
    for text, box in boxes:
        assert min(box.x0, box.y0) >= 0, text
        assert box.x1 <= SLIDE[0], text
        assert box.y1 <= SLIDE[1], text
    for (one, first), (other, second) in combinations(boxes, 2):
        wide = min(first.x1, second.x1) - max(first.x0, second.x0)
        high = min(first.y1, second.y1) - max(first.y0, second.y0)
        assert min(wide, high) <= 3.0, f"{one!r} over {other!r}"
