"""A frontier sweep as a table: the predicted largest value of each cell, and the measured or rehearsed one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fsdp_bench.report import terminal
from fsdp_bench.report.charts.trial_facts import kept_free
from fsdp_bench.report.table import Column, numbers, table_lines, words
from fsdp_bench.spec.frontier import FrontierCell, FrontierRecord, LargestValues
from fsdp_bench.spec.units import format_gib

if TYPE_CHECKING:
    from rich.console import Console

MOST_REASONS = 8
"""Most reasons for skipped cells that are printed; frontier.json has all."""


def print_frontier(record: FrontierRecord, console: Console) -> None:
    """Print a summary, one row per cell, and the reasons for skipped cells."""
    table = list(frontier_columns(record).values())
    reasons = Counter(cell.reason for cell in record.cells if cell.status == "skipped").most_common(MOST_REASONS)
    skipped = [f"skipped {count}: {reason}" for reason, count in reasons]
    title = f"largest that fits ({record.source}) on {record.machine}: {memory_text(record)}"
    terminal.note_lines(console, [summary(record), "", title, *table_lines(table, console.width), *skipped])


def frontier_columns(record: FrontierRecord) -> dict[str, Column]:
    """Return the columns of the searches that ran, by their headers."""
    cells = [cell for cell in record.cells if cell.status != "skipped"]
    columns = {
        "cell": words(cell.label for cell in cells),
        "predicted": _values(cells, "predicted"),
        record.source: _values(cells, "measured"),
        "steps\napart": numbers(
            (cell.steps_apart for cell in cells), lambda steps: f"{steps:+d}" if steps else "same", ""
        ),
        "trials": numbers(len(cell.trials) for cell in cells),
        "out of memory in": words(map(runs_out_in, cells)),
    }
    droppable = ("steps\napart", "trials", "out of memory in")
    return {
        name: replace(column, header=name, drop_priority=droppable.index(name) + 1 if name in droppable else 0)
        for name, column in columns.items()
    }


def _values(cells: Sequence[FrontierCell], name: str) -> Column:
    known: list[LargestValues | None] = [getattr(cell, name) for cell in cells]
    texts = (
        cell.status if name == "measured" and cell.status != "found" else _value(cell, one)
        for cell, one in zip(cells, known, strict=True)
    )
    return Column("", tuple(texts), is_number=True, values=tuple(one.fits if one else None for one in known))


def memory_text(record: FrontierRecord) -> str:
    """Return the memory within which the largest was searched."""
    limit, gpu = record.run.memory_limit_bytes, record.run.rehearsed_on
    if record.device == "cpu":
        return f"a budget of {format_gib(limit or 0)} of live tensors per rank stands for GPU memory"
    if gpu is not None:
        return kept_free(gpu)
    if limit is None:
        return "the whole GPU"
    return f"the GPU limited to {format_gib(limit)}" + (" by --gpu-memory" if record.gpu_is_limited else "")


def _value(cell: FrontierCell, largest: LargestValues | None) -> str:
    if largest is None:
        return "unknown"
    text = cell.quantity.print(largest.fits)
    return text if largest.runs == largest.fits else f"{text} (with retries {cell.quantity.print(largest.runs)})"


def runs_out_in(cell: FrontierCell) -> str:
    """Return the phase in which the next larger value fails, and the memory; or why there is none."""
    if cell.measured is None:
        return cell.reason or ""
    failure = cell.measured.limited_by
    if failure is None:
        return "nothing: no larger one was tried"
    return f"{failure.phase} ({failure.place})" + ", with retries" * (not failure.ran_out)


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
