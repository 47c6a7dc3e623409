"""Trials and searches as text, for the progress of a sweep and for ``sweep --list``."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.sweep.frontier.cell import SearchedCell


def needing_gpu_line(needs: Sequence[str]) -> str:
    """Return the line about entries that are not listed because they depend on a GPU that is missing here."""
    return f"not listed, because their sizes depend on the GPU, which is not here: {'; '.join(needs)}"


def ending(record: TrialRecord) -> str:
    """Return the outcome of a trial with its time and reason: ``ok 1.2 s``."""
    reason = f": {record.reason}" if record.reason else ""
    return f"{record.outcome.value} {record.wall_seconds:.1f} s{reason}"


def search_status(cell: SearchedCell, lacks_gpu: bool) -> str:
    """Return the status of a search before it runs: skipped, found, or the range and the start."""
    if cell.status == "skipped":
        return f"skipped: {cell.reason}"
    if cell.status == "found":
        text = f"found: {cell.print(cell.fits)}"
    else:
        values = cell.quantity_range
        ends = f"{values.print(values.smallest)} to {values.print(values.largest)}"
        start = "where it begins depends on the GPU" if lacks_gpu else cell.start
        text = f"searches {values.num_steps} steps, {ends}, {start}"
    return f"{text}; {cell.reason}" if cell.reason and cell.records else text


def search_result(cell: SearchedCell) -> str:
    """Return the result of a search, and the prediction."""
    if cell.status != "found":
        return f"{cell.status}: {cell.reason}"
    predicted = cell.predicted.fits
    text = "unknown" if predicted is None else cell.print(predicted)
    count = len(cell.records)
    return f"{cell.print(cell.fits)} fits, predicted {text}, {count} trial{'' if count == 1 else 's'}"
