"""What both kinds of sweep share at the terminal."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fsdp_bench.report.terminal import note
from fsdp_bench.spec.errors import MachineError
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.sweep.machine import torch_version


def require_torch() -> None:
    """Refuse to begin what cannot run.

    Raises:
        MachineError: when torch is not installed.
    """
    if torch_version() is None:
        raise MachineError("this needs torch, which is not installed; pip install 'fsdp-bench[train]'")


def interrupt_on_sigterm() -> None:
    """Treat SIGTERM as an interrupt at the keyboard."""
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def needing_gpu_line(needs: Sequence[str]) -> str:
    """Return the line of a list about what depends on a GPU that is not here."""
    return f"not listed, because their sizes depend on the GPU, which is not here: {'; '.join(needs)}"


def progress_bar(console: Console) -> Progress:
    """Return a bar with the time left; silent where there is no terminal."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    return Progress(*columns, console=console, disable=not console.is_terminal)


def ending(record: TrialRecord) -> str:
    """Return how a trial ended, for a progress line."""
    reason = f": {record.reason}" if record.reason else ""
    return f"{record.outcome.value} {record.wall_seconds:.1f} s{reason}"


def say(progress: Progress, text: str) -> None:
    """Print a line above the bar, as it is."""
    note(progress.console, text)
