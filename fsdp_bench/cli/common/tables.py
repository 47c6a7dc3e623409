"""The options that sort, select and write tables; predict and max-size share them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from fsdp_bench.plan.table import Row, TableOptions, read_table_options
from fsdp_bench.report.terminal import print_line
from fsdp_bench.spec.codec import write_atomically
from fsdp_bench.spec.errors import SpecError

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
