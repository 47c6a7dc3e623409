"""The measured largest model: every cell of a frontier sweep is searched with real trials, from its prediction on.

A cell's trials are ordinary records in trials/, and the state of a search is read from them. So no trial is repeated,
and no value is tried that is larger than one that ran out of memory, in this run or an earlier one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fsdp_bench.spec.frontier import FRONTIER_SCHEMA_VERSION, FrontierRecord
from fsdp_bench.spec.rank_report import Outcome
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.sweep.config.trial import Trial
from fsdp_bench.sweep.frontier.cell import SearchedCell, forecast
from fsdp_bench.sweep.frontier.file import FrontierPlan, Search
from fsdp_bench.sweep.machine import Machine
from fsdp_bench.sweep.results.store import Store
from fsdp_bench.sweep.run.remaining_trials import look_up
from fsdp_bench.sweep.run.runner import TrialRunner

Observer = Callable[[SearchedCell, Trial, TrialRecord | None], None]
"""Called twice for each trial: with None when it starts, and with its record when it has ended."""


def cells_of(plan: FrontierPlan, records: Sequence[TrialRecord]) -> list[SearchedCell]:
    """Return every cell with its prediction and its records."""
    return [SearchedCell(search, forecast(search), _recorded(search, records)) for search in plan.searches]


def _recorded(search: Search, records: Sequence[TrialRecord]) -> dict[int, TrialRecord]:
    """Return the records of a cell's trials, by the index of their candidate."""
    indices = {value: index for index, value in enumerate(search.quantity.values)}
    found: dict[int, TrialRecord] = {}
    for record in records:
        index = indices.get(search.value_of(record.model, record.setup))
        if index is not None and search.trial(index).spec.id == record.id:
            found[index] = record
    return found


def set_aside(cells: Sequence[SearchedCell], store: Store, retry: frozenset[Outcome]) -> list[str]:
    """Move the records whose trials are to run again to set-aside/; return one line for each.

    Raises:
        ResultsError: if a record cannot be moved.
    """
    notes: list[str] = []
    for cell in cells:
        for index in list(cell.records):
            if look_up(cell.search.trial(index), store, retry, notes) is None:
                del cell.records[index]
    return notes


def run_frontier(cells: Sequence[SearchedCell], runner: TrialRunner, observe: Observer) -> None:
    """Search every cell to its end. Store each record as soon as its trial has ended.

    Raises:
        ResultsError: if results cannot be written. Stored records stay.
        KeyboardInterrupt: raised again after the running trial's processes have ended. That trial has no record.
    """
    for cell in cells:
        while (index := cell.next_index) is not None:
            trial = cell.search.trial(index)
            observe(cell, trial, None)
            cell.records[index] = record = runner.run(trial)
            observe(cell, trial, record)
            runner.check_nodes()


def frontier_record(plan: FrontierPlan, cells: Sequence[SearchedCell], machine: str) -> FrontierRecord:
    """Return the record of a frontier sweep, frontier.json."""
    return FrontierRecord(
        schema_version=FRONTIER_SCHEMA_VERSION,
        sweep=plan.name,
        source="rehearsed" if plan.run.rehearsed_on else "measured",
        device=plan.run.alone if plan.run.alone == "rehearsed" else plan.device,
        machine=machine,
        run=plan.run,
        gpu_is_limited=plan.gpu_is_limited,
        cells=tuple(cell.record() for cell in cells),
    )


def resolved_searches(plan: FrontierPlan, machine: Machine) -> str:
    """Return the sweep file's text. Comments at its end list the cells that it became on a machine."""
    lines = [plan.source.rstrip(), "", f"# Resolved on {machine.describe()}, device {plan.device}:"]
    for search in plan.searches:
        lines.append(f"# {search.label}" + (f"; skipped: {search.skip_reason}" if search.skip_reason else ""))
    return "\n".join(lines) + "\n"
