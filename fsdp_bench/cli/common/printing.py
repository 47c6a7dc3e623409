"""Printing: tables with the options that sort, select and write them; progress; facts; charts in files."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from fsdp_bench.plan.table import Row, TableOptions, read_table_options
from fsdp_bench.report.terminal import print_line, print_lines
from fsdp_bench.report.text.common import UNKNOWN, fact
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.files import write_atomically
from fsdp_bench.spec.hardware import Source

if TYPE_CHECKING:
    from fsdp_bench.plan.question import Question
    from fsdp_bench.report.charts.description import Slide


_OPTIONS = (
    click.option("--sort", metavar="COLUMN,..", help="Sort the table by columns; -COLUMN: the largest value first."),
    click.option("--only-fits", is_flag=True, help="Leave out of the table what does not fit, or may not."),
    click.option("--columns", metavar="a,b,c", help="The table's columns, in this order."),
    click.option(
        "--csv",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Write the table with all columns, bytes and seconds; - for standard output.",
    ),
)


def table_options(function: Callable[..., int]) -> Callable[..., int]:
    """Add the options of a table to a command, which gets them as ``sort``, ``only_fits``, ``columns`` and ``csv``."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def read_table(
    known: Sequence[str], sort: str | None, columns: str | None, only_fits: bool, csv: Path | None, as_json: bool
) -> TableOptions:
    """Read the options of a table.

    Raises:
        SpecError: for an unknown column, and for options that contradict --json.
    """
    table = read_table_options(known, sort, columns, only_fits)
    if as_json and (str(csv) == "-" or (table.is_given and csv is None)):
        raise SpecError("--json prints all setups in the order of the options; --sort and the like go with --csv FILE")
    return table


def check_csv(path: Path | None) -> None:
    """Refuse a file that cannot be written, before anything is predicted.

    Raises:
        SpecError: if its folder does not exist, or if it is a folder.
    """
    if path is None or str(path) == "-":
        return
    if not path.parent.is_dir():
        raise SpecError(f"csv: {str(path.parent)!r} is no folder")
    if path.is_dir():
        raise SpecError(f"csv: {str(path)!r} is a folder; name a file")


def write_csv(path: Path, columns: Sequence[str], rows: Sequence[Row]) -> None:
    """Write rows into a file, whole or not at all, and print its name on standard error; or to standard output.

    Raises:
        SpecError: if the file cannot be written.
    """
    from fsdp_bench.report.table import csv_text

    text = csv_text(columns, rows)
    if str(path) == "-":
        sys.stdout.write(text)
        return
    try:
        write_atomically(path, text.encode())
    except OSError as error:
        raise SpecError(f"csv: {str(path)!r} cannot be written: {error.strerror or error}") from error
    print_line(f"table: {path}", error=True)


_WIDTH = 90
"""Characters of the line."""
_FEW = 20
"""Up to so many predictions are shown without progress: they take a second or two."""


def show_progress(done: int, total: int, what: str, note: str = "") -> None:
    """Show how many of all are done on one line of standard error; erase the line at the end."""
    text = f"{done:,} of {total:,} {what}{note}"
    click.echo(f"\r{text:<{_WIDTH}}" if done < total else f"\r{'':<{_WIDTH}}\r", nl=False, err=True)


def progress_line(what: str, total: int) -> Callable[[int], None]:
    """Return a function that shows how many are done; it shows nothing for few, or without a terminal."""
    if total <= _FEW or not sys.stderr.isatty():
        return lambda _done: None
    return lambda done: show_progress(done, total, what)


T = TypeVar("T")
Fact = tuple[str, str]
_INDENT = 26


def known(value: T | None, text: Callable[[T], str]) -> str:
    """Return a value as text, or ``unknown`` if it is None."""
    return UNKNOWN if value is None else text(value)


def rate(bytes_per_second: float | None) -> str:
    """Return a bandwidth in decimal GB/s, as vendors print it."""
    return known(bytes_per_second, lambda value: f"{value / 1e9:g} GB/s")


def source_facts(source: Source) -> list[Fact]:
    """Return the source of a fact, and its note if there is one, as lines to print under the fact."""
    lines = [("  source", f"{source.title} ({source.date})")]
    return lines + ([("  note", source.note)] if source.note else [])


def print_facts(facts: Sequence[Fact]) -> None:
    """Print one fact per line; wrap long values in their column."""
    print_lines("\n".join(fact(name, value, _INDENT) for name, value in facts))


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
