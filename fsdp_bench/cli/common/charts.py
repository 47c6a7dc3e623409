"""Functions that write charts into the files that the user names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_bench.report.terminal import print_line
from fsdp_bench.spec.errors import SpecError

if TYPE_CHECKING:
    from fsdp_bench.plan.question import Question
    from fsdp_bench.report.charts.description import Slide


def check_chart(path: Path) -> None:
    """Refuse a file for a chart that cannot be written, before anything is predicted.

    Raises:
        SpecError: if the suffix is neither .png nor .svg, or if the folder does not exist.
    """
    if path.suffix.lower() not in (".png", ".svg"):
        raise SpecError(f"chart: {str(path)!r} is not allowed; a file that ends in .png or .svg")
    if not path.parent.is_dir():
        raise SpecError(f"chart: {str(path.parent)!r} is no folder")


def refuse_unlike(questions: Sequence[Question]) -> None:
    """Refuse setups that one picture cannot show.

    Raises:
        SpecError: for several models, or several servers or numbers of GPUs.
    """
    from fsdp_bench.report.text.setups import PLACES, varying_fields

    if several := [field for field in varying_fields(questions) if field in PLACES]:
        raise SpecError(
            f"chart: the setups differ in {several[0].replace('_', ' ').replace('num ', '')}; a picture is of one"
        )


def save_chart(slide: Slide, path: Path) -> None:
    """Draw a chart into a file, and print the file's name on standard error.

    Raises:
        SpecError: if the file cannot be written.
    """
    from fsdp_bench.report.charts.slide import draw

    try:
        draw(slide, path)
    except OSError as error:
        raise SpecError(f"chart: {str(path)!r} cannot be written: {error.strerror or error}") from error
    print_line(f"picture: {path}", error=True)
