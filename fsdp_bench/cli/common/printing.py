"""Printing: answers, documents, tables with the options that arrange and write them, progress, charts in files."""

from __future__ import annotations

import gzip
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from fsdp_bench.cli.common.options import FILE, Decorator, taken_together
from fsdp_bench.plan.table import Row, TableOptions, read_table_options
from fsdp_bench.report.terminal import print_answer, print_line, print_lines
from fsdp_bench.report.text.common import UNKNOWN, fact
from fsdp_bench.spec.codec import to_json
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.files import write_atomically
from fsdp_bench.spec.hardware import Source
from fsdp_bench.spec.record import TrialRecord

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from fsdp_bench.report.charts.description import Slide

COLOURS = {True: "green", False: "red", None: "yellow"}
"""The colour of an answer: whether it fits, None if that is unknown."""


def print_json(document: object) -> None:
    """Print one JSON document, and nothing else."""
    sys.stdout.write(to_json(document).decode())


def print_text(text: str, colour: str | None = None) -> None:
    """Print an answer: its first line is what was asked for."""
    first, *lines = text.split("\n")
    print_answer(first, colour)
    print_lines("\n".join(lines))


@dataclass(frozen=True)
class AnswerTable:
    """The table that a command was asked for, and the file that it is written into."""

    columns: Sequence[str]
    """All columns that the table has."""
    options: TableOptions
    csv: Path | None

    @property
    def is_all_output(self) -> bool:
        """Whether the table goes to standard output, so that nothing else does."""
        return str(self.csv) == "-"

    def write(self, rows: Sequence[Row]) -> None:
        """Write rows into the file, whole or not at all, and print its name on standard error; or to standard output.

        Raises SpecError if the file cannot be written.
        """
        from fsdp_bench.report.table import csv_text

        text = csv_text(self.columns, rows)
        if self.is_all_output:
            sys.stdout.write(text)
        elif self.csv is not None:
            write_text(self.csv, text, "csv", "table")


def table_options(known: Sequence[str]) -> Decorator:
    """Add the options of a table with the columns ``known`` to a command, which gets them as ``table``."""

    def read(sort: str | None, only_fits: bool, columns: str | None, csv: Path | None) -> AnswerTable:
        table = AnswerTable(known, read_table_options(known, sort, columns, only_fits), csv)
        is_json = click.get_current_context().params["as_json"]
        if is_json and (table.is_all_output or (table.options.is_given and csv is None)):
            raise SpecError(
                "--json prints all setups in the order of the options; --sort and the like go with --csv FILE"
            )
        if csv is not None and not table.is_all_output:
            check_file(csv, "csv")
        return table

    options = (
        click.option(
            "--sort", metavar="COLUMN,..", help="Sort the table by columns; -COLUMN: the largest value first."
        ),
        click.option("--only-fits", is_flag=True, help="Leave out of the table what does not fit, or may not."),
        click.option("--columns", metavar="a,b,c", help="The table's columns, in this order."),
        click.option(
            "--csv",
            type=FILE,
            metavar="FILE",
            help="Write the table with all columns, bytes and seconds; - for standard output.",
        ),
    )
    return taken_together("table", read, options)


def check_file(path: Path, option: str, endings: tuple[str, ...] = ()) -> None:
    """Refuse a file before anything runs. Raises SpecError for another ending, no folder, or a folder."""
    if endings and not path.name.lower().endswith(endings):
        raise SpecError(f"{option}: {str(path)!r} is not allowed; a file that ends in {' or '.join(endings)}")
    if not path.parent.is_dir():
        raise SpecError(f"{option}: {str(path.parent)!r} is no folder")
    if path.is_dir():
        raise SpecError(f"{option}: {str(path)!r} is a folder; name a file")


def write_text(path: Path, text: str, option: str, what: str) -> None:
    """Write a file whole, compressed for .gz, and name it on standard error. Raises SpecError if it cannot."""
    data = text.encode()
    with _written(option, path, what):
        write_atomically(path, gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write rows of the same columns into a file. Raises SpecError if it cannot be written."""
    from fsdp_bench.report.table import csv_text

    write_text(path, csv_text(list(rows[0]), rows), "csv", "table")


@contextmanager
def _written(option: str, path: Path, what: str) -> Iterator[None]:
    """Print a file's name on standard error once it is written; turn the error of one that cannot be into a line."""
    try:
        yield
    except OSError as error:
        raise SpecError(f"{option}: {str(path)!r} cannot be written: {error.strerror or error}") from error
    print_line(f"{what}: {path}", error=True)


_WIDTH = 90
"""Characters of the line."""


def show_progress(done: int, total: int) -> None:
    """Show how many of all are done on one line of standard error, if that is a terminal; erase the line at the end."""
    if sys.stderr.isatty():
        text = f"{done:,} of {total:,} settings"
        click.echo(f"\r{text:<{_WIDTH}}" if done < total else f"\r{'':<{_WIDTH}}\r", nl=False, err=True)


def progress_bar(console: Console) -> Progress:
    """Return a progress bar with the time left; without a terminal it prints nothing."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    return Progress(*columns, console=console, disable=not console.is_terminal)


def read_all_but_broken(folder: Path) -> list[TrialRecord]:
    """Read records; print a line about a broken one. Raises ResultsError, SpecError as ``read_records``."""
    from fsdp_bench.sweep.results.load import read_records

    notes: list[str] = []
    records = read_records(folder, notes)
    for line in notes:
        print_line(f"fsdp-bench: {line}", error=True)
    return records


T = TypeVar("T")
Fact = tuple[str, str]
_INDENT = 26


def known(value: T | None, text: Callable[[T], str]) -> str:
    """Return a value as text, or ``unknown`` if it is None."""
    return UNKNOWN if value is None else text(value)


def source_facts(source: Source) -> list[Fact]:
    """Return the source of a fact, and its note if there is one, as lines to print under the fact."""
    lines = [("  source", f"{source.title} ({source.date})")]
    return lines + ([("  note", source.note)] if source.note else [])


def print_facts(facts: Sequence[Fact]) -> None:
    """Print one fact per line; wrap long values in their column."""
    print_lines("\n".join(fact(name, value, _INDENT) for name, value in facts))


PICTURES, TRACES = (".png", ".svg"), (".json", ".json.gz")
"""Endings of files."""


def save_chart(slide: Slide, path: Path) -> None:
    """Draw a chart into a file, and name it on standard error. Raises SpecError if it cannot be written."""
    from fsdp_bench.report.charts.slide import draw

    with _written("chart", path, "picture"):
        draw(slide, path)
