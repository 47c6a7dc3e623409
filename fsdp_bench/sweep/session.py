"""A sweep file on this machine: a session runs its trials or searches, a watcher follows them.

open_session() (start.py) makes a session. Nothing is written or run before Session.run().
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_bench.spec.errors import MachineError
from fsdp_bench.spec.frontier import FrontierRecord
from fsdp_bench.spec.rank_report import Outcome
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.sweep.config.sweep_file import SweepFile, require_gpu
from fsdp_bench.sweep.config.trial import SweepPlan, Trial, resolved_text
from fsdp_bench.sweep.frontier.cell import SearchedCell
from fsdp_bench.sweep.frontier.file import FrontierPlan
from fsdp_bench.sweep.frontier.search import cells_of, frontier_record, resolved_searches, run_frontier, set_aside
from fsdp_bench.sweep.machine import Machine, torch_version
from fsdp_bench.sweep.results.flat import flat_row
from fsdp_bench.sweep.results.store import Store
from fsdp_bench.sweep.run.runner import TrialRunner, run_sweep
from fsdp_bench.sweep.run.survey import SweepState, survey

if TYPE_CHECKING:
    import pandas as pd


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
    """Is called as a sweep goes on; a subclass overrides the calls that it needs."""

    def begins(self, num_recorded: int, notes: Sequence[str]) -> None:
        """So many trials are recorded already; ``notes`` has a line for each record that was set aside, and the like.

        From here on the session's folder exists, and ``Session.num_done`` counts.
        """

    def trial(self, trial: Trial, record: TrialRecord | None) -> None:
        """Begin a trial (None), or end it with its record; of a sweep without [frontier]."""

    def search_trial(self, cell: SearchedCell, trial: Trial, record: TrialRecord | None) -> None:
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
        self.cells: list[SearchedCell] = []

    @property
    def num_done(self) -> int:
        """Cells whose search has ended."""
        return sum(cell.status in ("found", "skipped") for cell in self.cells)

    def _run(self, retry: frozenset[Outcome], watcher: Watcher) -> SweepResults:
        records, notes = self.store.read_all()
        cells = self.cells = cells_of(self.plan, records)
        notes += set_aside(cells, self.store, retry)
        self.store.write_machine(self.machine)
        self.store.write("sweep.toml", resolved_searches(self.whole, self.machine).encode())
        watcher.begins(sum(len(cell.records) for cell in cells), notes)
        try:
            with TrialRunner(self.plan.name, self.plan.launcher, self.store, self.machine) as runner:
                run_frontier(cells, runner, watcher.search_trial)
        finally:
            everything = cells_of(self.whole, self.store.peek_all())
            whole = frontier_record(self.whole, everything, self.machine.describe())
            self.store.write_frontier(whole)
            self.store.write_table(_tried(everything))
        return SweepResults(
            name=self.plan.name,
            folder=self.store.folder,
            machine=self.machine.describe(),
            records=tuple(_tried(cells)),
            all_records=tuple(_tried(everything)),
            frontier=frontier_record(self.plan, cells, self.machine.describe()),
            whole_frontier=whole,
        )


def require_torch() -> None:
    """Refuse to begin what cannot run.

    Raises:
        MachineError: when torch is not installed.
    """
    if torch_version() is None:
        raise MachineError("this needs torch, which is not installed; pip install 'fsdp-bench[train]'")


def _recorded(plan: SweepPlan, state: SweepState) -> list[TrialRecord]:
    """Return what is recorded, in the order of the trials."""
    return [state.records[trial.spec.id] for trial in plan.trials if trial.spec.id in state.records]


def _tried(cells: Sequence[SearchedCell]) -> list[TrialRecord]:
    """Return what is recorded of cells, each in the order of its candidates."""
    return [cell.records[index] for cell in cells for index in sorted(cell.records)]
