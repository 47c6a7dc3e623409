"""All printing: outside text is never interpreted (rich's markup, emoji), and control characters are escaped."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING, TextIO

import click

from fsdp_bench.spec.errors import printable, printable_lines

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


def terminal_width() -> int:
    """Return the width for printing: COLUMNS if it is set, else the terminal's width, else 80."""
    return max(shutil.get_terminal_size((80, 24)).columns, 40)


def wrapped(line: str, width: int | None = None) -> list[str]:
    """Break a line at blanks if it is wider than the terminal; never break within a word or a path."""
    width = width or terminal_width()
    if len(line) <= width:
        return [line]
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.wrap(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, replace_whitespace=False
    )


def print_line(text: object, error: bool = False) -> None:
    """Print one line without wrapping, on standard output or standard error."""
    _print(printable(str(text)), sys.stderr if error else sys.stdout)


def print_answer(text: str, colour: str | None) -> None:
    """Print the answer of a command: bold and in colour if the output is a terminal."""
    for line in wrapped(printable(text)):
        is_terminal = sys.stdout is not None and sys.stdout.isatty()
        _print(click.style(line, fg=colour, bold=True) if is_terminal else line, sys.stdout)


def print_lines(text: str) -> None:
    """Print several lines; break lines that are too long for the terminal at blanks."""
    _print("\n".join(part for line in printable_lines(text).split("\n") for part in wrapped(line)), sys.stdout)


def print_unwrapped(text: str) -> None:
    """Print several lines as they are, such as Markdown."""
    _print(printable_lines(text), sys.stdout)


def _print(text: str, stream: TextIO | None) -> None:
    if stream is not None:  # None if it was closed before Python started
        print(text, file=stream)


def new_console(error: bool = False) -> Console:
    """Return a rich console for standard output or standard error that treats markup as plain text."""
    from rich.console import Console

    return Console(stderr=error, width=None if error else terminal_width(), markup=False, emoji=False, highlight=False)


def note(console: Console, text: str, style: str | None = None) -> None:
    """Print one line without wrapping on a rich console, for example above a progress bar."""
    console.print(printable(text), style=style, highlight=False, markup=False, emoji=False, soft_wrap=True)


def note_lines(console: Console, lines: Iterable[str]) -> None:
    """Print lines; break lines that are wider than the console at blanks."""
    for line in lines:
        for part in wrapped(printable(line), console.width):
            note(console, part)


def describe(progress: Progress, task: int, text: str) -> None:
    """Set the description of a progress bar's task."""
    from rich.progress import TaskID

    progress.update(TaskID(task), description=printable(text))
