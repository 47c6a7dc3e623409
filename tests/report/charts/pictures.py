"""What a picture that was written must be, whatever it shows."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

from matplotlib.image import imread

SLIDE = (1600, 900)


def assert_is_a_slide(path: Path, *words: str) -> None:
    """Check that a picture has a slide's size and is drawn on in every quarter; of an SVG, that it has these words."""
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
