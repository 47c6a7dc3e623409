"""The paper of every picture: its size, its texts, and the pixels that they take."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_bench.report.charts.axis import FONT, INK
from fsdp_bench.spec.text import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT, DPI = 1600, 900, 120
"""Pixels, and pixels an inch: on a slide of 13.3 x 7.5 inches a point of a font here is a point there."""

EDGE = 30.0
"""Pixels between the picture's edge and its texts."""
FAILURE = "#A61C00"


def new_figure() -> Figure:
    """Return an empty picture, without pyplot and its global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH / DPI, HEIGHT / DPI), dpi=DPI)
    FigureCanvasAgg(figure)
    return figure


def write_figure(figure: Figure, path: Path) -> None:
    """Write a picture as PNG or SVG, by the file's suffix; an SVG without its date, so that it is the same again.

    Raises:
        OSError: when the file cannot be written.
    """
    figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)


def write(figure: Figure, y: float, text: str, size: float, color: str = INK, weight: str = "normal") -> None:
    """Write a line at the left edge, its middle so many pixels over the lower edge."""
    figure.text(EDGE / WIDTH, y / HEIGHT, printable(text), fontsize=size, color=color, weight=weight, va="center")


@lru_cache(maxsize=4096)
def text_width(text: str, size: float, bold: bool = False) -> float:
    """Return a line's width in pixels of the picture."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    if not text.strip():
        return 0.0
    font = FontProperties(weight="bold" if bold else "normal")
    return float(TextPath((0, 0), text, size=size, prop=font).get_extents().width) * DPI / 72


def wrap(parts: Sequence[str], width: float) -> list[str]:
    """Join facts with semicolons into lines that are not wider than that; a fact that is, is broken at blanks."""
    words: list[str] = []
    for part in parts:
        whole = text_width(part, FONT) <= width
        words += [f"{part};"] if whole else f"{part};".split(" ")
    words[-1] = words[-1].removesuffix(";")
    lines = [""]
    for word in words:
        candidate = f"{lines[-1]} {word}".strip()
        if text_width(candidate, FONT) <= width:
            lines[-1] = candidate
        else:
            lines.append(word)
    return lines


def shorten(text: str) -> str:
    """Cut a text to one line of the picture."""
    text = text if len(text) <= 240 else f"{text[:240]}..."
    while text_width(text, FONT) > WIDTH - 2 * EDGE:
        text = text[:-12].rstrip(" .") + "..."
    return text


def scale_axis(axes: Axes) -> None:
    """Give the vertical axis round numbers and level lines, and nothing else."""
    from matplotlib.ticker import MaxNLocator

    axes.yaxis.set_major_locator(MaxNLocator(min(6, max(2, int(axes.bbox.height / 40))), steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.tick_params(axis="y", labelsize=12, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
