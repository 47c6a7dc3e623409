"""Writes pictures where the user wants them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_bench.report.terminal import print_line
from fsdp_bench.spec.errors import SpecError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_picture(chart: Path) -> None:
    """Refuse a picture that cannot be written before anything is predicted.

    Raises:
        SpecError: for another suffix than .png and .svg, and for a folder that does not exist.
    """
    if chart.suffix.lower() not in (".png", ".svg"):
        raise SpecError(f"chart: {str(chart)!r} is not allowed; a file that ends in .png or .svg")
    if not chart.parent.is_dir():
        raise SpecError(f"chart: {str(chart.parent)!r} is no folder")


def save_picture(draw: Callable[[Path], None], chart: Path) -> None:
    """Draw into a file, and say so on standard error.

    Raises:
        SpecError: when it cannot be written.
    """
    try:
        draw(chart)
    except OSError as error:
        raise SpecError(f"chart: {str(chart)!r} cannot be written: {error.strerror or error}") from error
    print_line(f"picture: {chart}", error=True)


def save_figure(figure: Figure, chart: Path) -> None:
    """Write a picture that is drawn, and say so on standard error.

    Raises:
        SpecError: when it cannot be written.
    """
    from fsdp_bench.report.charts.figure import save

    save_picture(lambda path: save(figure, path), chart)
