"""``fsdp-bench sweep FILE`` for a FILE with [frontier]: each cell is searched for the largest value that fits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.progress import Progress

from fsdp_bench.cli.common.cluster import interrupted
from fsdp_bench.cli.common.sweeping import introduce, progress_bar, say
from fsdp_bench.report.measured.frontier_text import print_frontier
from fsdp_bench.report.measured.progress_text import ending, needing_gpu_line, search_result, search_status
from fsdp_bench.report.terminal import describe, new_console, print_line, print_lines
from fsdp_bench.spec.errors import ExitCode
from fsdp_bench.spec.frontier import FrontierRecord
from fsdp_bench.spec.rank_report import Outcome
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.sweep.config.trial import Trial
from fsdp_bench.sweep.frontier.cell import SearchedCell
from fsdp_bench.sweep.frontier.search import cells_of
from fsdp_bench.sweep.session import SearchSession, Watcher


def list_searches(session: SearchSession) -> int:
    """Print each cell, where its search begins and what is already known of it; write no file."""
    plan = session.plan
    cells = cells_of(plan, session.store.peek_all())
    for number, cell in enumerate(cells, 1):
        label = f"{cell.search.label} {plan.run.alone}".rstrip()
        print_lines(f"{number:<4d}  {label}  {search_status(cell, plan.lacks_gpu)}")
    searched = [cell for cell in cells if cell.status != "skipped"]
    found = sum(cell.status == "found" for cell in searched)
    print_lines(
        f"{len(cells)} cells, {len(searched)} to search, {found} of them found, {len(cells) - len(searched)} skipped"
    )
    if plan.needing_gpu:
        print_lines(needing_gpu_line(plan.needing_gpu))
    return ExitCode.DONE


class SearchProgress(Watcher):
    """A progress bar that counts cells; without a terminal, one line per trial and one per cell."""

    def __init__(self, session: SearchSession, progress: Progress) -> None:
        self._session = session
        self._progress = progress
        self._task = progress.add_task("", total=len(session.plan.searches), visible=False)

    def begins(self, num_recorded: int, notes: Sequence[str]) -> None:
        """Print the notes, and one line about the cells to search."""
        session = self._session
        resumed = f", {num_recorded} trials already recorded" if num_recorded else ""
        introduce(
            self._progress.console,
            notes,
            f"sweep {session.plan.name}: {len(session.cells)} cells on {session.machine.describe()}{resumed};"
            f" results in {session.store.folder}",
        )
        self._progress.update(self._task, completed=session.num_done, visible=True)

    def search_trial(self, cell: SearchedCell, trial: Trial, record: TrialRecord | None) -> None:
        """Show the trial that runs or how it ended, and the result of a cell's search when it is complete."""
        progress, cells = self._progress, self._session.cells
        if record is None:
            describe(progress, self._task, f"trial {len(cell.records) + 1}: {trial.label}")
            return
        number = f"[{cells.index(cell) + 1}/{len(cells)}]"
        if not progress.console.is_terminal:
            say(progress, f"{number} {record.id} {trial.label}  {ending(record)}")
        if cell.next_index is None:
            progress.update(self._task, completed=self._session.num_done)
            say(progress, f"{number} {cell.search.label}: {search_result(cell)}")


def search(session: SearchSession, retry: frozenset[Outcome], no_charts: bool) -> int:
    """Search the cells, print the table and draw the charts; charts show all cells of the file."""
    try:
        with progress_bar(new_console(error=True)) as progress:
            results = session.run(retry, SearchProgress(session, progress))
    except KeyboardInterrupt:
        done = f"{session.num_done} of {len(session.plan.searches)} cells are done"
        return interrupted(session, done)
    assert results.frontier is not None
    assert results.whole_frontier is not None
    print_frontier(results.frontier, new_console())
    if not no_charts:
        _draw(results.whole_frontier, results.folder)
    return ExitCode.CRASHED if results.failed else ExitCode.DONE


def _draw(record: FrontierRecord, folder: Path) -> None:
    from fsdp_bench.report.charts.frontier import draw_frontier

    for path in draw_frontier(record, folder):
        print_line(f"chart: {path}")
