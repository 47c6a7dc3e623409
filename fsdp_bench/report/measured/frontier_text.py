"""A frontier sweep as a table: the predicted largest value of each cell, and the measured or rehearsed one."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from fsdp_bench.report import terminal
from fsdp_bench.report.table import table_columns, table_lines
from fsdp_bench.spec.frontier import FrontierCell, FrontierRecord, LargestValues
from fsdp_bench.spec.units import format_gib

if TYPE_CHECKING:
    from rich.console import Console

MOST_REASONS = 8
"""Most reasons for skipped cells that are printed; frontier.json has all."""


def print_frontier(record: FrontierRecord, console: Console) -> None:
    """Print a summary, one row per cell, and the reasons for skipped cells."""
    rows = [
        [
            cell.label,
            _value(cell, cell.predicted),
            _value(cell, cell.measured) if cell.status == "found" else cell.status,
            "" if cell.steps_apart is None else f"{cell.steps_apart:+d}" if cell.steps_apart else "same",
            str(len(cell.trials)),
            runs_out_in(cell, says_retries=True),
        ]
        for cell in record.cells
        if cell.status != "skipped"
    ]
    headers = ("cell", "predicted", record.source, "steps\napart", "trials", "out of memory in")
    table = table_columns(headers, rows, headers[1:5], ("out of memory in", "trials", "steps\napart"))
    reasons = Counter(cell.reason for cell in record.cells if cell.status == "skipped").most_common(MOST_REASONS)
    skipped = [f"skipped {count}: {reason}" for reason, count in reasons]
    terminal.note_lines(console, [summary(record), "", _title(record), *table_lines(table, console.width), *skipped])


def _title(record: FrontierRecord) -> str:
    limit = record.run.memory_limit_bytes
    if record.device == "cpu":
        memory = f"a budget of {format_gib(limit or 0)} of live tensors per rank stands for GPU memory"
    elif (gpu := record.run.rehearsed_on) is not None:
        memory = f"{format_gib(record.run.gpu_limit_bytes or 0)} for torch, {format_gib(gpu.kept_free_bytes)} kept free"
    elif limit is None:
        memory = "the whole GPU"
    else:
        memory = f"the GPU limited to {format_gib(limit)}" + (" by --gpu-memory" if record.gpu_is_limited else "")
    return f"largest that fits ({record.source}) on {record.machine}: {memory}"


def _value(cell: FrontierCell, largest: LargestValues | None) -> str:
    if largest is None:
        return "unknown"
    text = cell.quantity.print(largest.fits)
    return text if largest.runs == largest.fits else f"{text} (with retries {cell.quantity.print(largest.runs)})"


def runs_out_in(cell: FrontierCell, says_retries: bool = False) -> str:
    """Return the phase in which the next larger value fails, and the memory; or why there is none."""
    if cell.measured is None:
        return cell.reason or ""
    failure = cell.measured.limited_by
    if failure is None:
        return "nothing: no larger one was tried"
    return f"{failure.phase} ({failure.place})" + ", with retries" * (says_retries and not failure.ran_out)


def at_an_end(cell: FrontierCell) -> bool:
    """Whether nothing or everything fits, so that the limit is outside of the searched range."""
    return cell.measured is not None and (cell.measured.fits in (0, cell.quantity.largest))


def summary(record: FrontierRecord) -> str:
    """Return a summary of a frontier sweep in one line."""
    searched = [cell for cell in record.cells if cell.status != "skipped"]
    found = [cell for cell in searched if cell.status == "found"]
    text = f"{len(found)} of {len(searched)} cells found"
    compared = [cell.steps_apart for cell in found if cell.steps_apart is not None and not at_an_end(cell)]
    ended = sum(at_an_end(cell) for cell in found)
    if compared:
        same, one = compared.count(0), sum(abs(steps) == 1 for steps in compared)
        text += f"; predicted and {record.source} are the same step in {same} of {len(compared)}, one apart in {one}"
        text += f", more in {len(compared) - same - one}"
    if ended:
        text += f"; {ended} at an end of the search, which say less"
    if found:
        trials = [len(cell.trials) for cell in found]
        text += f"; {sum(trials) / len(trials):.1f} trials a cell, at most {max(trials)}"
    return text
