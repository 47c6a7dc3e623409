"""``fsdp-bench sweep FILE`` where FILE has [frontier]: cells are searched, not run."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from fsdp_bench.cli.sweeping import ending, interrupt_on_sigterm, needing_gpu_line, progress_bar, require_torch, say
from fsdp_bench.report.frontier_text import print_frontier
from fsdp_bench.report.terminal import describe, new_console, note, print_line
from fsdp_bench.spec.frontier import FrontierRecord
from fsdp_bench.spec.record import Outcome, TrialRecord
from fsdp_bench.sweep.finding import Finding
from fsdp_bench.sweep.frontier import frontier_record, recall, resolved_searches, run_frontier, set_aside
from fsdp_bench.sweep.frontier_file import FrontierPlan
from fsdp_bench.sweep.machine import Machine
from fsdp_bench.sweep.runner import TrialRunner
from fsdp_bench.sweep.store import Store
from fsdp_bench.sweep.trial import Trial


def list_searches(plan: FrontierPlan, store: Store) -> None:
    """Print each cell, where its search begins and what is known of it; writes nothing."""
    findings = recall(plan, store.peek_all())
    for number, finding in enumerate(findings, 1):
        emulated = " emulated" if plan.run.emulate else ""
        print_line(f"{number:4d}  {finding.search.label}{emulated}  {_known(finding, plan.lacks_gpu)}")
    searched = [finding for finding in findings if finding.status != "skipped"]
    found = sum(finding.status == "found" for finding in searched)
    print_line(
        f"{len(findings)} cells, {len(searched)} to search, {found} of them found,"
        f" {len(findings) - len(searched)} skipped"
    )
    if plan.needing_gpu:
        print_line(needing_gpu_line(plan.needing_gpu))


def _known(finding: Finding, lacks_gpu: bool) -> str:
    if finding.status == "skipped":
        return f"skipped: {finding.reason}"
    if finding.status == "found":
        text = f"found: {finding.print(finding.fits)}"
    else:
        dial = finding.dial_range
        ends = f"{dial.print(dial.smallest)} to {dial.print(dial.largest)}"
        start = "where it begins depends on the GPU" if lacks_gpu else finding.start
        text = f"searches {dial.num_steps} steps, {ends}, {start}"
    return f"{text}; {finding.reason}" if finding.reason and finding.records else text


def search(
    whole: FrontierPlan,
    plan: FrontierPlan,
    store: Store,
    machine: Machine,
    retry: frozenset[Outcome],
    no_charts: bool,
) -> int:
    """Search the plan's cells, print the table and draw the charts; frontier.json and charts are of the whole."""
    require_torch()
    interrupt_on_sigterm()
    console = new_console(error=True)
    store.open()
    try:
        records, notes = store.read_all()
        findings = recall(plan, records)
        for text in notes + set_aside(findings, store, retry):
            note(console, f"note: {text}", "yellow")
        store.write_machine(machine)
        store.write("sweep.toml", resolved_searches(whole, machine).encode())
        note(console, _introduction(plan, machine, findings, store))
        try:
            _run(plan, findings, store, machine, console)
        except KeyboardInterrupt:
            done = f"{_num_found(findings)} of {len(findings)} cells are done"
            print_line(f"fsdp-bench: interrupted; {done}, the same command resumes", error=True)
            return 130
        finally:
            _write(whole, store, machine)
        print_frontier(_record(plan, findings, machine), new_console())
        if not no_charts:
            _draw(_record(whole, recall(whole, store.peek_all()), machine), store)
    finally:
        store.close()
    return 1 if any(finding.status == "unknown" for finding in findings) else 0


def _draw(record: FrontierRecord, store: Store) -> None:
    from fsdp_bench.report.frontier_chart import draw_frontier

    for path in draw_frontier(record, store.folder):
        print_line(f"chart: {path}")


def _num_found(findings: Sequence[Finding]) -> int:
    return sum(finding.status in ("found", "skipped") for finding in findings)


def _introduction(plan: FrontierPlan, machine: Machine, findings: Sequence[Finding], store: Store) -> str:
    trials = sum(len(finding.records) for finding in findings)
    resumed = f", {trials} trials already recorded" if trials else ""
    return f"sweep {plan.name}: {len(findings)} cells on {machine.describe()}{resumed}; results in {store.folder}"


def _record(plan: FrontierPlan, findings: Sequence[Finding], machine: Machine) -> FrontierRecord:
    return frontier_record(plan, findings, machine.describe())


def _write(whole: FrontierPlan, store: Store, machine: Machine) -> None:
    """Rebuild the tables of the whole sweep from what is recorded."""
    everything = recall(whole, store.peek_all())
    store.write_frontier(_record(whole, everything, machine))
    store.write_table([finding.records[index] for finding in everything for index in sorted(finding.records)])


def _run(plan: FrontierPlan, findings: Sequence[Finding], store: Store, machine: Machine, console: Console) -> None:
    """Search under a progress bar that counts cells; without a terminal, one line a trial and one a cell."""
    with (
        progress_bar(console) as progress,
        TrialRunner(plan.name, plan.launcher, store, machine) as runner,
    ):
        task = progress.add_task("", total=len(findings), completed=_num_found(findings))

        def observe(finding: Finding, trial: Trial, record: TrialRecord | None) -> None:
            if record is None:
                describe(progress, task, f"trial {len(finding.records) + 1}: {trial.label}")
                return
            number = f"[{findings.index(finding) + 1}/{len(findings)}]"
            if not console.is_terminal:
                say(progress, f"{number} {record.id} {trial.label}  {ending(record)}")
            if finding.next_index is None:
                progress.update(task, completed=_num_found(findings))
                say(progress, f"{number} {finding.search.label}: {_answer(finding)}")

        run_frontier(findings, runner, observe)


def _answer(finding: Finding) -> str:
    if finding.status != "found":
        return f"{finding.status}: {finding.reason}"
    predicted = finding.predicted.fits
    text = "unknown" if predicted is None else finding.print(predicted)
    count = len(finding.records)
    return f"{finding.print(finding.fits)} fits, predicted {text}, {count} trial{'' if count == 1 else 's'}"
