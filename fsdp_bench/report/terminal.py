"""Printing. Everything that is printed goes through here, because names, paths and messages come from outside.

Nothing in a text is obeyed: rich's markup and emoji codes are plain text, and control characters are shown as escapes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, TextIO

import click

from fsdp_bench.spec.text import printable, printable_lines

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table


def print_line(text: object, error: bool = False) -> None:
    """Print one line, on standard error if asked for."""
    _print(printable(str(text)), sys.stderr if error else sys.stdout)


def print_answer(text: str, colour: str | None) -> None:
    """Print the line that everything else explains: bold, and in colour where the output is a terminal."""
    line = printable(text)
    if sys.stdout is not None and sys.stdout.isatty():
        line = click.style(line, fg=colour, bold=True)
    _print(line, sys.stdout)


def print_lines(text: str, error: bool = False) -> None:
    """Print a text of several lines."""
    _print(printable_lines(text), sys.stderr if error else sys.stdout)


def _print(text: str, stream: TextIO | None) -> None:
    if stream is not None:  # it is None where it was closed before Python started
        print(text, file=stream)


def new_console(error: bool = False, width: int | None = None) -> Console:
    """Return rich's console for standard output, or for standard error if asked for, to which markup is plain text."""
    from rich.console import Console

    return Console(stderr=error, width=width, markup=False, emoji=False, highlight=False)


WIDE = 150
"""Columns of a terminal that a table is fitted into."""


def print_table(table: Table, console: Console, width: int) -> None:
    """Print a table; into a file or a terminal that is not wide, in at least ``width`` columns."""
    from rich.console import Console

    if not console.is_terminal or console.width < WIDE:
        console = Console(
            file=console.file, width=max(console.width, width), no_color=not console.is_terminal,
            markup=False, emoji=False,
        )  # fmt: skip
    console.print(table)


def add_row(table: Table, cells: Iterable[str]) -> None:
    """Add a row to a table."""
    from rich.text import Text

    table.add_row(*(Text(printable(cell)) for cell in cells))


def note(console: Console, text: str, style: str | None = None) -> None:
    """Print one line, which the terminal may break, beside a table or above a progress bar."""
    console.print(printable(text), style=style, highlight=False, markup=False, emoji=False, soft_wrap=True)


def describe(progress: Progress, task: int, text: str) -> None:
    """Say what a progress bar's task is doing."""
    from rich.progress import TaskID

    progress.update(TaskID(task), description=printable(text))
