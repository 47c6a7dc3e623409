"""``fsdp-bench sweep FILE``."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from fsdp_bench.cli.frontier import list_searches, search
from fsdp_bench.cli.options import Count
from fsdp_bench.cli.sweeping import ending, interrupt_on_sigterm, needing_gpu_line, progress_bar, require_torch, say
from fsdp_bench.report.tables import print_table
from fsdp_bench.report.terminal import describe, new_console, note, print_line
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.record import Outcome, TrialRecord
from fsdp_bench.spec.units import parse_bytes
from fsdp_bench.sweep.frontier_file import searches_of
from fsdp_bench.sweep.grid import trials_of
from fsdp_bench.sweep.machine import Machine, probe_machine
from fsdp_bench.sweep.runner import SweepState, run_sweep, survey
from fsdp_bench.sweep.selection import check_words, select, select_part, select_searches
from fsdp_bench.sweep.store import Store
from fsdp_bench.sweep.sweep_file import SweepFile, read_file, require_gpu
from fsdp_bench.sweep.trial import SweepPlan, Trial, keeping, resolved_text

RETRYABLE = ("crashed", "timeout", "oom_gpu", "oom_host")


@click.command("sweep")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--results", default="results", show_default=True, type=click.Path(path_type=Path), help="Results folder."
)
@click.option("--machine", "machine_name", help="Name of this machine's folder there.")
@click.option("--list", "list_only", is_flag=True, help="Show the trials in their order; run nothing.")
@click.option(
    "--only", multiple=True, metavar="ID|FIELD=VALUE", help="Run only matching trials; several must all match."
)
@click.option("--part", metavar="2/4", help="Run only this piece of the trials, in their order.")
@click.option("--retry", multiple=True, type=click.Choice(RETRYABLE), help="Run trials with this outcome again.")
@click.option(
    "--gpu-memory", metavar="SIZE", help="Leave torch this much of each GPU, as a smaller one would, for example 22GiB."
)
@click.option(
    "--emulate-world",
    type=Count(4096),
    metavar="N",
    help="Run every trial as rank 0 of N ranks, alone on one device: its memory and compute, without communication.",
)
@click.option(
    "--trace", is_flag=True, help="Keep a profiled step of every rank of the trials that run now, for Perfetto."
)
@click.option(
    "--memory-snapshot",
    "snapshot",
    is_flag=True,
    help="Record every allocation on the GPU from the start; keep it at the end and where memory runs out.",
)
@click.option("--no-charts", is_flag=True, help="Do not draw the charts at the end.")
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
    trace: bool,
    snapshot: bool,
    no_charts: bool,
) -> int:
    """Train every trial of a sweep FILE on this machine and record what it took.

    Where FILE has a table [frontier], search the largest model, depth, batch or sequence of every cell instead.
    Whatever a trial does, the sweep goes on: running out of memory, a crash or a hang is that trial's outcome.
    Interrupt at any time; the same command resumes and repeats nothing.
    """
    machine = probe_machine()
    limit = None if gpu_memory is None else parse_bytes(gpu_memory, "--gpu-memory")
    read = read_file(file, machine, limit, emulate_world)
    check_words(only, part)
    store = Store(results / (machine_name or machine.name) / read.name)
    outcomes = frozenset(map(Outcome, retry))
    _check_kept(read, trace, snapshot)
    if part is not None and read.has_frontier:
        raise SpecError("--part cuts a sweep's trials, and a file with [frontier] has cells; --only chooses among them")
    if not read.has_frontier:
        trials = trials_of(read)
        chosen = keeping(select_part(select(trials, only), part), trace, snapshot)
        if list_only:
            _list(chosen, store)
            return 0
        require_gpu(read)
        return _sweep(trials, chosen, store, machine, outcomes, no_charts)
    whole = searches_of(read)
    plan = select_searches(whole, only)
    if list_only:
        list_searches(plan, store)
        return 0
    require_gpu(read)
    return search(whole, plan, store, machine, outcomes, no_charts)


def _check_kept(file: SweepFile, trace: bool, snapshot: bool) -> None:
    """Refuse to keep what there will not be."""
    if trace and (file.has_frontier or not file.run.communication_steps):
        what = "a file with [frontier]" if file.has_frontier else "communication_steps = 0"
        raise SpecError(f"--trace keeps profiled steps, and {what} has none")
    if snapshot and file.device != "cuda":
        raise SpecError("--memory-snapshot records the allocator of a GPU, and this sweep runs on a CPU")
    if snapshot and file.has_frontier:
        raise SpecError(
            "--memory-snapshot is for single trials, and a file with [frontier] searches; give the trial a file"
        )


def _sweep(
    whole: SweepPlan,
    plan: SweepPlan,
    store: Store,
    machine: Machine,
    retry: frozenset[Outcome],
    no_charts: bool,
) -> int:
    """Run the chosen trials of a file without [frontier]."""
    require_torch()
    interrupt_on_sigterm()
    store.open()
    try:
        return _run_and_tell(whole, plan, store, machine, retry, no_charts)
    finally:
        store.close()


def _run_and_tell(
    whole: SweepPlan, plan: SweepPlan, store: Store, machine: Machine, retry: frozenset[Outcome], no_charts: bool
) -> int:
    """Run what is pending of a plan, which is a part of the whole; print the table, draw the charts."""
    console, kept = new_console(error=True), _kept(plan, store)
    state = survey(plan, store, retry)
    state.notes += [
        f"{len(state.records)} trials are recorded already and get no {what}" for what in kept if state.records
    ]
    for text in state.notes:
        note(console, f"note: {text}", "yellow")
    store.write_machine(machine)
    store.write("sweep.toml", resolved_text(whole, machine).encode())
    note(console, _introduction(plan, machine, state, store))
    try:
        _run(plan, store, machine, state, console)
    except KeyboardInterrupt:
        done = f"{len(state.records)} of {len(plan.trials)} trials are recorded"
        print_line(f"fsdp-bench: interrupted; {done}, the same command resumes", error=True)
        return 130
    finally:
        everything = _recorded(whole, survey(whole, store))
        store.write_table(everything)
    records = _recorded(plan, state)
    print_table(records, new_console())
    for what, where in kept.items():
        print_line(f"{what}s: {where}")
    if not no_charts:
        _draw(everything, store, machine)
    failed = any(record.outcome in (Outcome.CRASHED, Outcome.TIMEOUT) for record in records)
    return 1 if failed else 0


def _kept(plan: SweepPlan, store: Store) -> dict[str, str]:
    """Return what trials keep in files, and where to look at it."""
    kept = {}
    if any(trial.spec.keep_trace for trial in plan.trials):
        kept["trace"] = f"{store.traces}, one a rank; open them in ui.perfetto.dev"
    if any(trial.spec.keep_snapshot for trial in plan.trials):
        kept["snapshot"] = f"{store.snapshots}, one a rank; open them in pytorch.org/memory_viz"
    return kept


def _recorded(plan: SweepPlan, state: SweepState) -> list[TrialRecord]:
    """Return what is recorded, in the order of the trials."""
    return [state.records[trial.spec.id] for trial in plan.trials if trial.spec.id in state.records]


def _introduction(plan: SweepPlan, machine: Machine, state: SweepState, store: Store) -> str:
    done = len(state.records)
    resumed = f", {done} already recorded" if done else ""
    return f"sweep {plan.name}: {len(plan.trials)} trials on {machine.describe()}{resumed}; results in {store.folder}"


def _run(plan: SweepPlan, store: Store, machine: Machine, state: SweepState, console: Console) -> None:
    """Run what is pending under a progress bar; without a terminal, one line a trial."""
    with progress_bar(console) as progress:
        task = progress.add_task("", total=len(plan.trials), completed=len(plan.trials) - len(state.pending))

        def observe(trial: Trial, record: TrialRecord | None) -> None:
            if record is None:
                describe(progress, task, trial.label)
                return
            progress.advance(task)
            if not console.is_terminal or record.outcome not in (Outcome.OK, Outcome.SKIPPED):
                done = f"[{len(state.records)}/{len(plan.trials)}]"
                say(progress, f"{done} {record.id} {trial.label}  {ending(record)}")

        run_sweep(plan, store, machine, state, observe)


def _list(plan: SweepPlan, store: Store) -> None:
    """Print the trials in their order, and what is known of each; writes nothing."""
    for number, (trial, label) in enumerate(zip(plan.trials, plan.labels, strict=True), 1):
        recorded = (store.trials / f"{trial.spec.id}.json").exists()
        status = "recorded" if recorded else "to run"
        if trial.skip_reason:
            status = f"skipped: {trial.skip_reason}"
        print_line(f"{number:4d}  {trial.spec.id}  {label}  {status}")
    runnable = sum(trial.skip_reason is None for trial in plan.trials)
    print_line(f"{len(plan.trials)} trials, {runnable} to run or recorded, {len(plan.trials) - runnable} skipped")
    if plan.needing_gpu:
        print_line(needing_gpu_line(plan.needing_gpu))


def _draw(records: list[TrialRecord], store: Store, machine: Machine) -> None:
    from fsdp_bench.report.charts import draw_all

    for path in draw_all(records, store.folder, machine.describe()):
        print_line(f"chart: {path}")
