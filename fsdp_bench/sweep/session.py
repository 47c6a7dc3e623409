"""A sweep file on this machine, from reading it to its tables: sweep() in one call, or a session and a watcher.

open_session() reads everything and refuses what cannot be; nothing is written or run before Session.run().
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from fsdp_bench.spec.checked import read
from fsdp_bench.spec.errors import MachineError, SpecError, not_allowed, shown
from fsdp_bench.spec.frontier import FrontierRecord
from fsdp_bench.spec.rank_report import Outcome
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.spec.units import parse_bytes
from fsdp_bench.sweep.config.grid import trials_of
from fsdp_bench.sweep.config.selection import check_words, select, select_part, select_searches
from fsdp_bench.sweep.config.sweep_file import SweepFile, read_file, require_gpu
from fsdp_bench.sweep.config.trial import SweepPlan, Trial, keeping, resolved_text
from fsdp_bench.sweep.frontier.cell import Finding
from fsdp_bench.sweep.frontier.file import FrontierPlan, searches_of
from fsdp_bench.sweep.frontier.search import frontier_record, recall, resolved_searches, run_frontier, set_aside
from fsdp_bench.sweep.machine import Machine, probe_machine, torch_version
from fsdp_bench.sweep.results.flat import flat_row
from fsdp_bench.sweep.results.store import Store, check_folder_name
from fsdp_bench.sweep.run.runner import SweepState, TrialRunner, run_sweep, survey

if TYPE_CHECKING:
    import pandas as pd

RETRYABLE = ("crashed", "timeout", "oom_gpu", "oom_host")
"""Outcomes whose trials can be run again."""

MOST_EMULATED_RANKS = 4096


@dataclass(frozen=True, repr=False)
class SweepResults:
    """What a sweep measured: now, and in earlier runs of the same file."""

    name: str
    folder: Path
    """Where records, tables and charts are."""
    machine: str
    """One line that describes it."""
    records: tuple[TrialRecord, ...]
    """Of the trials that were asked for, in their order."""
    all_records: tuple[TrialRecord, ...]
    """Of all trials of the file that are recorded."""
    frontier: FrontierRecord | None = None
    """The cells that were asked for, where the file has [frontier]."""
    whole_frontier: FrontierRecord | None = None
    """All cells of the file."""

    @property
    def table(self) -> pd.DataFrame:
        """One row a trial, the columns of trials.csv: bytes and seconds, units in the names."""
        import pandas as pd

        return pd.DataFrame([flat_row(record) for record in self.records])

    @property
    def failed(self) -> bool:
        """Whether a trial crashed or timed out, or a cell's search found no answer."""
        if self.frontier is not None:
            return any(cell.status == "unknown" for cell in self.frontier.cells)
        return any(record.outcome in (Outcome.CRASHED, Outcome.TIMEOUT) for record in self.records)

    def __repr__(self) -> str:
        counts = {outcome: sum(record.outcome is outcome for record in self.records) for outcome in Outcome}
        ends = ", ".join(f"{count} {outcome.value}" for outcome, count in counts.items() if count) or "none"
        cells = "" if self.frontier is None else f", {len(self.frontier.cells)} cells"
        return f"SweepResults({self.name}: {len(self.records)} trials{cells}: {ends}; {self.folder})"


class Watcher:
    """Learns how a sweep goes; a subclass overrides what it wants to know."""

    def begins(self, num_recorded: int, notes: Sequence[str]) -> None:
        """So many trials are recorded already; ``notes`` has a line for each record that was set aside, and the like.

        From here on the session's folder exists, and ``Session.num_done`` counts.
        """

    def trial(self, trial: Trial, record: TrialRecord | None) -> None:
        """Begin a trial (None), or end it with its record; of a sweep without [frontier]."""

    def search_trial(self, finding: Finding, trial: Trial, record: TrialRecord | None) -> None:
        """Begin a trial of a cell's search (None), or end it with its record."""


class Session:
    """One sweep file on this machine."""

    def __init__(self, file: SweepFile, store: Store, machine: Machine) -> None:
        self.file = file
        self.store = store
        self.machine = machine

    @property
    def num_done(self) -> int:
        """Trials that are recorded, or cells whose search has ended."""
        raise NotImplementedError

    def run(self, retry: frozenset[Outcome] = frozenset(), watcher: Watcher | None = None) -> SweepResults:
        """Run what is not recorded yet; write every record as soon as it is known, and the tables at the end.

        Raises:
            MachineError: when torch or the GPU is not here.
            ResultsError: when results cannot be written, or another process writes there; what is stored stays.
            KeyboardInterrupt: passed on after the running trial's processes have ended and the tables are written.
        """
        require_torch()
        require_gpu(self.file)
        self.store.open()
        try:
            return self._run(retry, watcher or Watcher())
        finally:
            self.store.close()

    def _run(self, retry: frozenset[Outcome], watcher: Watcher) -> SweepResults:
        raise NotImplementedError


class TrialSession(Session):
    """A file without [frontier]: its trials are run one after another."""

    def __init__(self, file: SweepFile, store: Store, machine: Machine, whole: SweepPlan, plan: SweepPlan) -> None:
        super().__init__(file, store, machine)
        self.whole = whole
        self.plan = plan
        """The part of ``whole`` that was asked for."""
        self._state = SweepState(records={}, pending=[], notes=[])

    @property
    def num_done(self) -> int:
        """Trials that are recorded."""
        return len(self._state.records)

    @property
    def records(self) -> list[TrialRecord]:
        """What is recorded so far, in the order of the trials."""
        return _recorded(self.plan, self._state)

    @property
    def kept(self) -> dict[str, str]:
        """What trials keep in files, and where to look at it."""
        kept = {}
        if any(trial.spec.keep_trace for trial in self.plan.trials):
            kept["trace"] = f"{self.store.traces}, one a rank; open them in ui.perfetto.dev"
        if any(trial.spec.keep_snapshot for trial in self.plan.trials):
            kept["snapshot"] = f"{self.store.snapshots}, one a rank; open them in pytorch.org/memory_viz"
        return kept

    def _run(self, retry: frozenset[Outcome], watcher: Watcher) -> SweepResults:
        state = self._state = survey(self.plan, self.store, retry)
        recorded = len(state.records)
        without = [f"{recorded} trials are recorded already and get no {what}" for what in self.kept if recorded]
        self.store.write_machine(self.machine)
        self.store.write("sweep.toml", resolved_text(self.whole, self.machine).encode())
        watcher.begins(recorded, [*state.notes, *without])
        try:
            run_sweep(self.plan, self.store, self.machine, state, watcher.trial)
        finally:
            everything = _recorded(self.whole, survey(self.whole, self.store))
            self.store.write_table(everything)
        return SweepResults(
            name=self.plan.name,
            folder=self.store.folder,
            machine=self.machine.describe(),
            records=tuple(self.records),
            all_records=tuple(everything),
        )


class SearchSession(Session):
    """A file with [frontier]: the largest that fits is searched in every cell."""

    def __init__(
        self, file: SweepFile, store: Store, machine: Machine, whole: FrontierPlan, plan: FrontierPlan
    ) -> None:
        super().__init__(file, store, machine)
        self.whole = whole
        self.plan = plan
        """The part of ``whole`` that was asked for."""
        self.findings: list[Finding] = []

    @property
    def num_done(self) -> int:
        """Cells whose search has ended."""
        return sum(finding.status in ("found", "skipped") for finding in self.findings)

    def _run(self, retry: frozenset[Outcome], watcher: Watcher) -> SweepResults:
        records, notes = self.store.read_all()
        findings = self.findings = recall(self.plan, records)
        notes += set_aside(findings, self.store, retry)
        self.store.write_machine(self.machine)
        self.store.write("sweep.toml", resolved_searches(self.whole, self.machine).encode())
        watcher.begins(sum(len(finding.records) for finding in findings), notes)
        try:
            with TrialRunner(self.plan.name, self.plan.launcher, self.store, self.machine) as runner:
                run_frontier(findings, runner, watcher.search_trial)
        finally:
            everything = recall(self.whole, self.store.peek_all())
            whole = frontier_record(self.whole, everything, self.machine.describe())
            self.store.write_frontier(whole)
            self.store.write_table(_tried(everything))
        return SweepResults(
            name=self.plan.name,
            folder=self.store.folder,
            machine=self.machine.describe(),
            records=tuple(_tried(findings)),
            all_records=tuple(_tried(everything)),
            frontier=frontier_record(self.plan, findings, self.machine.describe()),
            whole_frontier=whole,
        )


def sweep(
    file: str | Path,
    *,
    results: str | Path = "results",
    machine: str | None = None,
    only: str | Sequence[str] = (),
    part: str | None = None,
    retry: str | Sequence[str] = (),
    gpu_memory: str | int | None = None,
    emulate_world: int | None = None,
    trace: bool = False,
    memory_snapshot: bool = False,
    watcher: Watcher | None = None,
) -> SweepResults:
    """Train every trial of a sweep file on this machine and record what it took; resume what was interrupted.

    Needs torch. Trials run in processes of their own: running out of memory, a crash or a hang is that trial's outcome.
    What is recorded is not repeated. Charts are not drawn; ``fsdp-bench chart`` does.

    Args:
        file: a sweep file, ``sweeps/quick.toml`` for example.
        results: the results folder; records go to RESULTS/MACHINE/SWEEP.
        machine: the name of this machine's folder there.
        only: run only trials that match: the beginning of an ID, or ``"FIELD=VALUE"``; several must all match.
        part: run only a piece of the trials, in their order: ``"2/4"`` is the second quarter.
        retry: outcomes whose trials run again: ``crashed``, ``timeout``, ``oom_gpu`` or ``oom_host``.
        gpu_memory: leave torch this much of each GPU, ``"22GiB"`` or bytes.
        emulate_world: run every trial as rank 0 of so many ranks, alone on one device.
        trace: keep a profiled step of every rank, for Perfetto.
        memory_snapshot: record every allocation on the GPU, and keep it.
        watcher: learns how it goes.

    Raises:
        SweepFileError: one line: the file, the place in it, what is allowed.
        SpecError: for other arguments that are not allowed.
        MachineError: when torch, or the GPU that the file asks for, is not here.
        ResultsError: when results cannot be read or written; what is stored stays.
    """
    again = outcomes(retry)
    session = open_session(file, results, machine, only, part, gpu_memory, emulate_world, trace, memory_snapshot)
    return session.run(again, watcher)


def outcomes(retry: str | Sequence[str]) -> frozenset[Outcome]:
    """Read the outcomes whose trials run again.

    Raises:
        SpecError: for one that has no trial to repeat.
    """
    words = _texts("retry", retry)
    for word in words:
        if word not in RETRYABLE:
            raise not_allowed("retry", word, RETRYABLE)
    return frozenset(map(Outcome, words))


def open_session(
    file: str | Path,
    results: str | Path = "results",
    machine_name: str | None = None,
    only: str | Sequence[str] = (),
    part: str | None = None,
    gpu_memory: str | int | None = None,
    emulate_world: int | None = None,
    trace: bool = False,
    snapshot: bool = False,
) -> TrialSession | SearchSession:
    """Read a sweep file and what of it to run; the arguments are those of ``sweep``. Writes and runs nothing.

    Raises:
        SweepFileError, SpecError: as ``sweep``.
        MachineError: when all sizes of the file depend on a GPU that is not here.
    """
    if not isinstance(file, str | Path) or not isinstance(results, str | Path):
        wrong = results if isinstance(file, str | Path) else file
        raise SpecError(f"{'file' if wrong is file else 'results'}: {shown(wrong)} is not allowed; a path")
    machine = probe_machine()
    limit = None if gpu_memory is None else parse_bytes(gpu_memory, "--gpu-memory")
    world = read(Annotated[int, Meta(ge=1, le=MOST_EMULATED_RANKS)] | None, emulate_world, "emulate-world")
    found = read_file(Path(file), machine, limit, world)
    selections = _texts("only", only)
    check_words(selections, part)
    if machine_name is not None:
        check_folder_name(machine_name, "--machine")
    store = Store(Path(results) / (machine_name or machine.name) / found.name)
    _check_kept(found, trace, snapshot)
    if found.has_frontier:
        if part is not None:
            raise SpecError(
                "--part cuts a sweep's trials, and a file with [frontier] has cells; --only chooses among them"
            )
        whole = searches_of(found)
        return SearchSession(found, store, machine, whole, select_searches(whole, selections))
    trials = trials_of(found)
    chosen = keeping(select_part(select(trials, selections), part), trace, snapshot)
    return TrialSession(found, store, machine, trials, chosen)


def require_torch() -> None:
    """Refuse to begin what cannot run.

    Raises:
        MachineError: when torch is not installed.
    """
    if torch_version() is None:
        raise MachineError("this needs torch, which is not installed; pip install 'fsdp-bench[train]'")


def _texts(field: str, value: str | Sequence[str]) -> tuple[str, ...]:
    texts: tuple[str, ...] = read(tuple[str, ...], (value,) if isinstance(value, str) else value, field)
    return texts


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


def _recorded(plan: SweepPlan, state: SweepState) -> list[TrialRecord]:
    """Return what is recorded, in the order of the trials."""
    return [state.records[trial.spec.id] for trial in plan.trials if trial.spec.id in state.records]


def _tried(findings: Sequence[Finding]) -> list[TrialRecord]:
    """Return what is recorded of cells, each in the order of its dial."""
    return [finding.records[index] for finding in findings for index in sorted(finding.records)]
