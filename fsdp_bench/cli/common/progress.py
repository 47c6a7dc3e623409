"""The progress of many predictions on one line of the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable

import click

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
