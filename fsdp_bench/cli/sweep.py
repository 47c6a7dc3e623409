"""``fsdp-bench sweep FILE``: train every trial of a sweep file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
from rich.progress import Progress

from fsdp_bench.cli.common.cluster import interrupted, node_options, on_nodes
from fsdp_bench.cli.common.interrupts import prints_if_it_can
from fsdp_bench.cli.common.lists import Count
from fsdp_bench.cli.common.sweeping import introduce, progress_bar, say
from fsdp_bench.report.charts.trial_bars import ChartsMeanwhile
from fsdp_bench.report.measured.frontier_text import print_frontier
from fsdp_bench.report.measured.progress_text import ending, needing_gpu_line, search_result, search_status
from fsdp_bench.report.measured.tables import print_table
from fsdp_bench.report.terminal import describe, new_console, print_line, print_lines
from fsdp_bench.spec.errors import ExitCode
from fsdp_bench.spec.frontier import FrontierRecord
from fsdp_bench.spec.rank_report import Outcome
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.sweep.config.trial import Trial, labels_of
from fsdp_bench.sweep.frontier.cell import SearchedCell, cells_of
from fsdp_bench.sweep.launchers.choose import choose_nodes
from fsdp_bench.sweep.launchers.torchrun_nodes import Meeting, follow
from fsdp_bench.sweep.session import SearchSession, SweepResults, TrialSession, Watcher
from fsdp_bench.sweep.start import MOST_EMULATED_RANKS, RETRYABLE, open_session, outcomes


@click.command("sweep")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--results", default="results", show_default=True, type=click.Path(path_type=Path), help="Results folder."
)
@click.option("--machine", "machine_name", help="Name of this machine's folder in the results folder.")
@click.option("--list", "list_only", is_flag=True, help="Show the trials in their order; run nothing.")
@click.option(
    "--only", multiple=True, metavar="ID|FIELD=VALUE", help="Run only matching trials; several must all match."
)
@click.option("--part", metavar="2/4", help="Run only the second quarter of the trials (2/4), and so on.")
@click.option("--retry", multiple=True, type=click.Choice(RETRYABLE), help="Run trials with this outcome again.")
@click.option(
    "--gpu-memory", metavar="SIZE", help="Cap torch's GPU memory to emulate a smaller GPU, for example 22GiB."
)
@click.option(
    "--emulate-world",
    type=Count(MOST_EMULATED_RANKS),
    metavar="N",
    help="Run every trial as rank 0 of N ranks on one device: memory and compute without communication.",
)
@click.option(
    "--rehearse",
    metavar="GPU",
    help="Run rank 0 of every trial on this GPU of the catalogue, which need not be there: memory, no times.",
)
@click.option("--trace", is_flag=True, help="Keep a profiled step of every rank as a trace for Perfetto.")
@click.option(
    "--memory-snapshot",
    "snapshot",
    is_flag=True,
    help="Keep torch's memory snapshot of every rank, also where memory runs out.",
)
@node_options
@click.option("--no-charts", is_flag=True, help="Do not draw the charts at the end.")
@prints_if_it_can
def command(
    file: Path,
    results: Path,
    machine_name: str | None,
    list_only: bool,
    only: tuple[str, ...],
    part: str | None,
    retry: tuple[str, ...],
    gpu_memory: str | None,
    emulate_world: int | None,
    rehearse: str | None,
    trace: bool,
    snapshot: bool,
    slurm: bool,
    rdzv_endpoint: str | None,
    nodes: int | None,
    ranks_per_node: int | None,
    no_charts: bool,
) -> int:
    """Train every trial of a sweep FILE on this machine; record its memory and time.

    If FILE has a table [frontier], search the largest model, depth, batch or sequence of every cell instead.
    The sweep goes on whatever a trial does: running out of memory, a crash or a hang is that trial's outcome.
    Interrupt at any time; the same command resumes and repeats nothing.

    \b
    fsdp-bench sweep sweeps/quick.toml
    fsdp-bench sweep sweeps/gpu.toml --only strategy=FULL_SHARD
    """
    cluster = choose_nodes(
        file, results, _say, slurm=slurm, rdzv_endpoint=rdzv_endpoint, nodes=nodes, ranks_per_node=ranks_per_node
    )
    if isinstance(cluster, Meeting):
        follow(cluster)
        return ExitCode.DONE
    session = open_session(
        file, results, machine_name, only, part, gpu_memory, emulate_world, trace, snapshot, rehearse, cluster
    )
    again = outcomes(retry)
    if isinstance(session, SearchSession):
        searches = session
        return list_searches(searches) if list_only else on_nodes(session, lambda: search(searches, again, no_charts))
    trials = session
    return _list(trials) if list_only else on_nodes(session, lambda: _run(trials, again, no_charts))


def _say(line: str) -> None:
    print_line(f"fsdp-bench: {line}", error=True)


class TrialProgress(Watcher):
    """A progress bar; without a terminal, one line per trial."""

    def __init__(self, session: TrialSession, progress: Progress, charts: ChartsMeanwhile | None) -> None:
        self._session = session
        self._progress = progress
        self._charts = charts
        self._task = progress.add_task("", total=len(session.plan.cells), visible=False)

    def begins(self, num_recorded: int, notes: Sequence[str]) -> None:
        """Print the notes, and one line about the trials to run."""
        session = self._session
        resumed = f", {num_recorded} already recorded" if num_recorded else ""
        introduce(
            self._progress.console,
            notes,
            f"sweep {session.file.name}: {len(session.plan.cells)} trials on {session.machine.describe()}{resumed};"
            f" results in {session.store.folder}",
        )
        self._progress.update(self._task, completed=num_recorded, visible=True)

    def trial(self, trial: Trial, record: TrialRecord | None) -> None:
        """Show the trial that runs, or how it ended."""
        if record is None:
            describe(self._progress, self._task, trial.label)
            return
        self._progress.advance(self._task)
        if not self._progress.console.is_terminal or record.outcome not in (Outcome.OK, Outcome.SKIPPED):
            done = f"[{self._session.num_done}/{len(self._session.plan.cells)}]"
            say(self._progress, f"{done} {record.id} {trial.label}  {ending(record)}")
        if self._charts is not None:
            self._charts.update(self._session.records, len(self._session.plan.cells))


def _run(session: TrialSession, retry: frozenset[Outcome], no_charts: bool) -> int:
    """Run the pending trials, print the table and draw the charts."""
    charts = None if no_charts else ChartsMeanwhile(session.store.folder, session.machine.describe())
    try:
        with progress_bar(new_console(error=True)) as progress:
            results = session.run(retry, TrialProgress(session, progress, charts))
    except KeyboardInterrupt:
        done = f"{session.num_done} of {len(session.plan.cells)} trials are recorded"
        return interrupted(session, done)
    print_table(list(results.records), new_console())
    for what, where in session.kept.items():
        print_line(f"{what}s: {where}")
    if not no_charts:
        _draw(results)
    return ExitCode.CRASHED if results.failed else ExitCode.DONE


def _list(session: TrialSession) -> int:
    """Print the trials in order, each with its status; write no file."""
    plan = session.plan
    for number, (trial, label) in enumerate(zip(plan.cells, labels_of(plan.cells), strict=True), 1):
        recorded = (session.store.trials / f"{trial.spec.id}.json").exists()
        status = "recorded" if recorded else "to run"
        if trial.skip_reason:
            status = f"skipped: {trial.skip_reason}"
        print_lines(f"{number:<4d}  {trial.spec.id}  {label}  {status}")
    runnable = sum(trial.skip_reason is None for trial in plan.cells)
    print_lines(f"{len(plan.cells)} trials, {runnable} to run or recorded, {len(plan.cells) - runnable} skipped")
    if plan.needing_gpu:
        print_lines(needing_gpu_line(plan.needing_gpu))
    return ExitCode.DONE


def _draw(results: SweepResults) -> None:
    from fsdp_bench.report.charts.trial_bars import draw_all

    for path in draw_all(list(results.all_records), results.folder, results.machine):
        print_line(f"chart: {path}")


def list_searches(session: SearchSession) -> int:
    """Print each cell, where its search begins and what is already known of it; write no file."""
    plan = session.plan
    cells = cells_of(plan, session.store.peek_all())
    for number, cell in enumerate(cells, 1):
        label = f"{cell.search.label} {session.file.run.alone}".rstrip()
        print_lines(f"{number:<4d}  {label}  {search_status(cell, session.file.lacks_gpu)}")
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
        self._task = progress.add_task("", total=len(session.plan.cells), visible=False)

    def begins(self, num_recorded: int, notes: Sequence[str]) -> None:
        """Print the notes, and one line about the cells to search."""
        session = self._session
        resumed = f", {num_recorded} trials already recorded" if num_recorded else ""
        introduce(
            self._progress.console,
            notes,
            f"sweep {session.file.name}: {len(session.cells)} cells on {session.machine.describe()}{resumed};"
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
        done = f"{session.num_done} of {len(session.plan.cells)} cells are done"
        return interrupted(session, done)
    assert results.frontier is not None
    assert results.whole_frontier is not None
    print_frontier(results.frontier, new_console())
    if not no_charts:
        _draw_frontier(results.whole_frontier, results.folder)
    return ExitCode.CRASHED if results.failed else ExitCode.DONE


def _draw_frontier(record: FrontierRecord, folder: Path) -> None:
    from fsdp_bench.report.charts.frontier import draw_frontier

    for path in draw_frontier(record, folder):
        print_line(f"chart: {path}")
