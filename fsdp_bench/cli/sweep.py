"""``fsdp-bench sweep FILE``: train every trial of a sweep file."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import click
from rich.progress import Progress

from fsdp_bench.cli.common.interrupts import forgiving_streams, ignore, time_is_up, watch_time_limit
from fsdp_bench.cli.common.lists import Count
from fsdp_bench.cli.common.options import FILE
from fsdp_bench.cli.common.printing import progress_bar
from fsdp_bench.report.charts.trial_bars import ChartsMeanwhile
from fsdp_bench.report.measured.frontier_text import print_frontier
from fsdp_bench.report.measured.progress_text import ending, needing_gpu_line, search_result, search_status
from fsdp_bench.report.measured.tables import print_table
from fsdp_bench.report.terminal import describe, new_console, note, print_line, print_lines
from fsdp_bench.spec.errors import ExitCode, MachineError
from fsdp_bench.spec.rank_report import Outcome
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.sweep.config.trial import Trial, labels_of
from fsdp_bench.sweep.frontier.cell import SearchedCell, cells_of
from fsdp_bench.sweep.launchers.choose import MOST_NODES, MOST_RANKS_PER_NODE, choose_nodes
from fsdp_bench.sweep.launchers.launcher import NodesLost
from fsdp_bench.sweep.launchers.slurm import SlurmNodes
from fsdp_bench.sweep.launchers.torchrun_nodes import Meeting, follow
from fsdp_bench.sweep.session import SearchSession, Session, SweepResults, TrialSession, Watcher
from fsdp_bench.sweep.start import MOST_EMULATED_RANKS, RETRYABLE, open_session, outcomes

_NODES = ("slurm", "rdzv_endpoint", "nodes", "ranks_per_node")
"""Options that say on which nodes a sweep runs."""
MOST_RESTARTS = 20
"""Requeues of a job after which it is not requeued for a lost node again, if no trial has ended in it."""


@click.command("sweep")
@click.argument("file", type=FILE)
@click.option("--results", default="results", show_default=True, type=FILE, help="Results folder.")
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
@click.option("--slurm", is_flag=True, help="Use all nodes of this Slurm job; submit writes its script.")
@click.option(
    "--rdzv-endpoint",
    metavar="HOST:PORT",
    help="Without Slurm: start the same command on --nodes nodes, which share --results; HOST is the first.",
)
@click.option("--nodes", type=Count(MOST_NODES), metavar="N", help="The number of nodes, with --rdzv-endpoint.")
@click.option(
    "--ranks-per-node",
    type=Count(MOST_RANKS_PER_NODE),
    metavar="N",
    help="Ranks of a trial on each of several nodes; by default one for each GPU.",
)
@click.option("--no-charts", is_flag=True, help="Do not draw the charts at the end.")
@forgiving_streams(OSError, ValueError)  # it goes on where nobody reads what it prints
def command(file: Path, results: Path, list_only: bool, retry: tuple[str, ...], no_charts: bool, **chosen: Any) -> int:
    """Train every trial of a sweep FILE on this machine; record its memory and time.

    If FILE has a table [frontier], search the largest model, depth, batch or sequence of every cell instead.
    The sweep goes on whatever a trial does: running out of memory, a crash or a hang is that trial's outcome.
    Interrupt at any time; the same command resumes and repeats nothing.

    \b
    fsdp-bench sweep sweeps/quick.toml
    fsdp-bench sweep sweeps/gpu.toml --only strategy=FULL_SHARD
    """
    cluster = choose_nodes(file, results, _say, **{name: chosen.pop(name) for name in _NODES})
    if isinstance(cluster, Meeting):
        follow(cluster)
        return ExitCode.DONE
    session = open_session(file, results, cluster=cluster, **chosen)
    again = outcomes(retry)
    if list_only:
        _list_searches(session) if isinstance(session, SearchSession) else _list(session)
        if session.plan.needing_gpu:
            print_lines(needing_gpu_line(session.plan.needing_gpu))
        return ExitCode.DONE
    return _on_nodes(session, lambda: _run(session, again, no_charts))


def _say(line: str) -> None:
    print_line(f"fsdp-bench: {line}", error=True)


def _list(session: TrialSession) -> None:
    plan = session.plan
    for number, (trial, label) in enumerate(zip(plan.cells, labels_of(plan.cells), strict=True), 1):
        status = "recorded" if (session.store.trials / f"{trial.spec.id}.json").exists() else "to run"
        if trial.skip_reason:
            status = f"skipped: {trial.skip_reason}"
        print_lines(f"{number:<4d}  {trial.spec.id}  {label}  {status}")
    runnable = sum(trial.skip_reason is None for trial in plan.cells)
    print_lines(f"{len(plan.cells)} trials, {runnable} to run or recorded, {len(plan.cells) - runnable} skipped")


def _list_searches(session: SearchSession) -> None:
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


def _run(session: TrialSession | SearchSession, retry: frozenset[Outcome], no_charts: bool) -> int:
    """Run the trials or search the cells, print the table and draw the charts, which show all of the file."""
    try:
        with progress_bar(new_console(error=True)) as progress:
            if isinstance(session, SearchSession):
                results = session.run(retry, SearchProgress(session, progress))
            else:
                charts = None if no_charts else ChartsMeanwhile(session.store.folder, session.machine.describe())
                results = session.run(retry, TrialProgress(session, progress, charts))
    except KeyboardInterrupt:
        ended = "cells are done" if isinstance(session, SearchSession) else "trials are recorded"
        return _interrupted(session, f"{session.num_done} of {session.num_total} {ended}")
    if results.frontier is not None:
        print_frontier(results.frontier, new_console())
    else:
        print_table(list(results.records), new_console())
    for what, where in session.kept.items() if isinstance(session, TrialSession) else ():
        print_line(f"{what}s: {where}")
    for path in () if no_charts else _draw(results):
        print_line(f"chart: {path}")
    return ExitCode.CRASHED if results.failed else ExitCode.DONE


def _draw(results: SweepResults) -> list[Path]:
    from fsdp_bench.report.charts.frontier import draw_frontier
    from fsdp_bench.report.charts.trial_bars import draw_all

    if results.whole_frontier is not None:
        return draw_frontier(results.whole_frontier, results.folder)
    return draw_all(list(results.all_records), results.folder, results.machine)


S = TypeVar("S", TrialSession, SearchSession)


class SweepProgress(Watcher, Generic[S]):
    """A progress bar that counts trials, or the cells of a search; without a terminal, one line for each that ends."""

    def __init__(self, session: S, progress: Progress) -> None:
        self._session: S = session
        self._progress = progress
        self._is_terminal = progress.console.is_terminal
        self._task = progress.add_task("", total=session.num_total, visible=False)

    def begins(self, num_recorded: int, notes: Sequence[str]) -> None:
        """Print the notes, and one line about the trials to run or the cells to search."""
        session = self._session
        trials = "" if session.counts == "trials" else " trials"
        resumed = f", {num_recorded}{trials} already recorded" if num_recorded else ""
        for text in notes:
            note(self._progress.console, f"note: {text}", "yellow")
        self._say(
            f"sweep {session.file.name}: {session.num_total} {session.counts} on {session.machine.describe()}{resumed};"
            f" results in {session.store.folder}"
        )
        self._progress.update(self._task, completed=session.num_done, visible=True)

    def _say(self, line: str) -> None:
        note(self._progress.console, line)


class TrialProgress(SweepProgress[TrialSession]):
    """The progress of trials. Charts are drawn meanwhile."""

    def __init__(self, session: TrialSession, progress: Progress, charts: ChartsMeanwhile | None) -> None:
        super().__init__(session, progress)
        self._charts = charts

    def trial(self, trial: Trial, record: TrialRecord | None) -> None:
        """Show the trial that runs, or how it ended."""
        if record is None:
            describe(self._progress, self._task, trial.label)
            return
        session = self._session
        self._progress.advance(self._task)
        if not self._is_terminal or record.outcome not in (Outcome.OK, Outcome.SKIPPED):
            self._say(f"[{session.num_done}/{session.num_total}] {record.id} {trial.label}  {ending(record)}")
        if self._charts is not None:
            self._charts.update(session.records, session.num_total)


class SearchProgress(SweepProgress[SearchSession]):
    """The progress of searches."""

    def search_trial(self, cell: SearchedCell, trial: Trial, record: TrialRecord | None) -> None:
        """Show the trial that runs or how it ended, and the result of a cell's search when it is complete."""
        cells = self._session.cells
        if record is None:
            describe(self._progress, self._task, f"trial {len(cell.records) + 1}: {trial.label}")
            return
        number = f"[{cells.index(cell) + 1}/{len(cells)}]"
        if not self._is_terminal:
            self._say(f"{number} {record.id} {trial.label}  {ending(record)}")
        if cell.next_index is None:
            self._progress.update(self._task, completed=self._session.num_done)
            self._say(f"{number} {cell.search.label}: {search_result(cell)}")


def _on_nodes(session: Session[Any], run: Callable[[], int]) -> int:
    """Run a session. In a job of Slurm, go on in a later one where the time limit is near or a node was lost."""
    cluster = session.cluster
    if not isinstance(cluster, SlurmNodes):
        return run()
    watch_time_limit()
    try:
        return run()
    except NodesLost as lost:
        names = ", ".join(lost.nodes)
        if not session.num_new and (len(lost.nodes) == cluster.num_nodes or cluster.job.restarts >= MOST_RESTARTS):
            raise MachineError(
                f"srun starts no process on {names}, and no trial has ended in this job: it is not requeued;"
                f" {lost.why or 'try srun --overlap --nodes=2 hostname in the job'}"
            ) from None
        return _requeue(cluster, f"the job has lost {names}; {session.num_done} of {session.num_total} are done")


def _interrupted(session: Session[Any], done: str) -> int:
    """Say how an interrupted sweep (``done``: what is recorded) goes on; requeue a job near its limit."""
    if not time_is_up() or not isinstance(session.cluster, SlurmNodes):
        print_line(f"fsdp-bench: interrupted; {done}, the same command resumes", error=True)
        return ExitCode.INTERRUPTED
    if not session.num_new:
        print_line(
            f"fsdp-bench: the job's time limit is near and no trial has ended in it; {done}; submit again with a longer"
            " --time, or set a shorter [run] timeout_seconds",
            error=True,
        )
        return ExitCode.CRASHED
    return _requeue(session.cluster, f"the job's time limit is near; {done}")


def _requeue(cluster: SlurmNodes, why: str) -> int:
    ignore()  # Slurm ends the job with SIGTERM
    print_line(f"fsdp-bench: {why}; job {cluster.job.id} goes back into the queue and will go on", error=True)
    try:
        cluster.job.requeue()
    except MachineError as error:
        print_line(f"fsdp-bench: the job cannot be requeued: {error}; submit it again, which resumes", error=True)
        return ExitCode.INTERRUPTED
    return ExitCode.DONE
