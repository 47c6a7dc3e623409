"""A frontier sweep as a table on the terminal: predicted and measured largest model, cell by cell."""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.table import Table

from fsdp_bench.report import terminal
from fsdp_bench.spec.frontier import FrontierCell, FrontierRecord, LargestValues
from fsdp_bench.spec.units import format_gib

COLUMNS = ("cell", "predicted", "measured", "steps apart", "trials", "full in")
MOST_REASONS = 8
"""Kinds of reasons that are printed; frontier.json has every cell's."""


def print_frontier(record: FrontierRecord, console: Console) -> None:
    """Print one row a cell that was searched, what was skipped, and the sum of it."""
    table = Table(header_style="bold", box=None, padding=(0, 1))
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("cell", "full in") else "right", no_wrap=True)
    for cell in record.cells:
        if cell.status != "skipped":
            terminal.add_row(table, _row(cell))
    terminal.note(console, _title(record))
    terminal.print_table(table, console, 180)
    _print_reasons(record, console)
    terminal.note(console, summary(record))


def _title(record: FrontierRecord) -> str:
    limit = record.run.memory_limit_bytes
    if record.device == "cpu":
        memory = f"a budget of {format_gib(limit or 0)} of live tensors per rank stands for the card"
    elif limit is None:
        memory = "the whole card"
    else:
        memory = f"the card limited to {format_gib(limit)}" + (" by --gpu-memory" if record.card_is_limited else "")
    return f"largest that fits (measured) on {record.machine}: {memory}"


def _row(cell: FrontierCell) -> list[str]:
    measured = _value(cell, cell.measured) if cell.status == "found" else cell.status
    apart = "" if cell.steps_apart is None else "same" if cell.steps_apart == 0 else f"{cell.steps_apart:+d}"
    return [cell.label, _value(cell, cell.predicted), measured, apart, str(len(cell.trials)), _why(cell)]


def _value(cell: FrontierCell, reached: LargestValues | None) -> str:
    if reached is None:
        return "unknown"
    text = cell.dial.print(reached.fits)
    return text if reached.runs == reached.fits else f"{text} (with retries {cell.dial.print(reached.runs)})"


def _why(cell: FrontierCell) -> str:
    if cell.measured is None:
        return cell.reason or ""
    failure = cell.measured.limited_by
    if failure is None:
        return "nothing: the dial ends"
    return f"{failure.phase} ({failure.place})" + ("" if failure.ran_out else ", with retries")


def _print_reasons(record: FrontierRecord, console: Console) -> None:
    reasons = Counter(cell.reason for cell in record.cells if cell.status == "skipped")
    for reason, count in reasons.most_common(MOST_REASONS):
        terminal.note(console, f"skipped {count}: {reason}")


def at_an_end(cell: FrontierCell) -> bool:
    """Whether nothing fits, or everything: then the limit lies beyond the dial, and agreement is no evidence."""
    return cell.measured is not None and (cell.measured.fits in (0, cell.dial.largest))


def summary(record: FrontierRecord) -> str:
    """Return the sum of a frontier in one line."""
    searched = [cell for cell in record.cells if cell.status != "skipped"]
    found = [cell for cell in searched if cell.status == "found"]
    text = f"{len(found)} of {len(searched)} cells found"
    compared = [cell.steps_apart for cell in found if cell.steps_apart is not None and not at_an_end(cell)]
    ended = sum(at_an_end(cell) for cell in found)
    if compared:
        same, one = compared.count(0), sum(abs(steps) == 1 for steps in compared)
        text += f"; predicted and measured are the same step in {same} of {len(compared)}, one apart in {one}"
        text += f", more in {len(compared) - same - one}"
    if ended:
        text += f"; {ended} at an end of the dial, which tell less"
    if found:
        trials = [len(cell.trials) for cell in found]
        text += f"; {sum(trials) / len(trials):.1f} trials a cell, at most {max(trials)}"
    return text
