"""Terminal output of the commands that run or read trials."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fsdp_bench.report.terminal import note, print_line
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.sweep.results.load import read_records


def read_all_but_broken(folder: Path) -> list[TrialRecord]:
    """Read the records below a folder; leave out each broken record and print one line about it on standard error.

    Raises:
        ResultsError, SpecError: as ``read_records``.
    """
    notes: list[str] = []
    records = read_records(folder, notes)
    for line in notes:
        print_line(f"fsdp-bench: {line}", error=True)
    return records


def progress_bar(console: Console) -> Progress:
    """Return a progress bar with the time left; without a terminal it prints nothing."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    return Progress(*columns, console=console, disable=not console.is_terminal)


def introduce(console: Console, notes: Sequence[str], line: str) -> None:
    """Print notes, and then the line about the sweep that begins."""
    for text in notes:
        note(console, f"note: {text}", "yellow")
    note(console, line)


def say(progress: Progress, text: str) -> None:
    """Print a line above the progress bar, unchanged."""
    note(progress.console, text)
