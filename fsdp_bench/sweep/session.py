"""Session: runs a file's trials or searches once ``run`` is called. Watcher: is called for each trial."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

from fsdp_bench.spec.codec import to_json
from fsdp_bench.spec.errors import MachineError, install_hint
from fsdp_bench.spec.frontier import FrontierRecord
from fsdp_bench.spec.rank_report import Outcome
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.sweep.config.sweep_file import require_gpu
from fsdp_bench.sweep.config.trial import SweepPlan, Trial, labels_of
from fsdp_bench.sweep.frontier.cell import SearchedCell, cells_of, frontier_record
from fsdp_bench.sweep.frontier.file import Search
from fsdp_bench.sweep.launchers.launcher import Cluster
from fsdp_bench.sweep.machine import Machine, torch_version
from fsdp_bench.sweep.progress import PROGRESS, Progress
from fsdp_bench.sweep.results.flat import flat_row
from fsdp_bench.sweep.results.store import Store
from fsdp_bench.sweep.run.rehearsed import stand_in_environment
from fsdp_bench.sweep.run.runner import TrialRunner

if TYPE_CHECKING:
    import pandas as pd


T = TypeVar("T")
Key = TypeVar("Key")


@dataclass(frozen=True, repr=False)
class SweepResults:
    """The results of a sweep, of this run and of earlier runs of the same file."""

    name: str
    folder: Path
    """The folder of records, tables and charts."""
    machine: str
    """One line that describes the machine."""
    records: tuple[TrialRecord, ...]
    """Records of the trials that were asked for, in their order."""
    all_records: tuple[TrialRecord, ...]
    """Records of all trials of the file."""
    frontier: FrontierRecord | None = None
    """The cells that were asked for, if the file has [frontier]."""
    whole_frontier: FrontierRecord | None = None
    """All cells of the file, if it has [frontier]."""

    @property
    def table(self) -> pd.DataFrame:
        """One row for each trial, the columns of trials.csv. Column names contain the unit."""
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
    """Callbacks of a running sweep. A subclass overrides the methods that it needs."""

    def begins(self, num_recorded: int, notes: Sequence[str]) -> None:
        """Called before the first trial, once the session's folder exists and ``Session.num_done`` is valid.

        ``num_recorded`` trials are recorded already; ``notes`` are for the user, as of records that were set aside.
        """

    def trial(self, trial: Trial, record: TrialRecord | None) -> None:
        """Called when a trial begins (with None) and ends (with its record), in a sweep without [frontier]."""

    def search_trial(self, cell: SearchedCell, trial: Trial, record: TrialRecord | None) -> None:
        """Called when a trial of a cell's search begins (with None) and ends (with its record)."""


class Session(Generic[T]):
    """The run of one sweep file on this machine."""

    counts: Literal["trials", "cells"]
    """The unit that progress.json counts."""

    def __init__(
        self, store: Store, machine: Machine, whole: SweepPlan[T], plan: SweepPlan[T], cluster: Cluster | None = None
    ) -> None:
        self.file = plan.file
        self.store = store
        self.machine = machine
        self.whole = whole
        self.plan = plan
        """The part of ``whole`` that was asked for."""
        self.cluster = cluster
        """The nodes over which ranks are spread; None if all are on this machine."""
        self.environment: Mapping[str, str] = {}
        """The ranks' environment variables beside this process's: the stand-in, if trials are rehearsed."""
        self.num_new = 0
        """The number of trials that this process has recorded."""

    @property
    def num_done(self) -> int:
        """The number of recorded trials, or of cells whose search has ended."""
        raise NotImplementedError

    @property
    def num_total(self) -> int:
        """The number of trials, or of cells, that were asked for."""
        return len(self.plan.cells)

    @property
    def num_to_run(self) -> int | None:
        """The number of trials that are still to be run. None where searches decide it."""
        return None

    def run(self, retry: frozenset[Outcome] = frozenset(), watcher: Watcher | None = None) -> SweepResults:
        """Run the trials that are not recorded yet. Write each record when its trial ends, and the tables at the end.

        Raises:
            MachineError: if torch is not installed, this machine lacks the GPU, or it cannot rehearse.
            ResultsError: if results cannot be written, or another process writes there. Stored records stay.
            KeyboardInterrupt: raised again after the running trial's processes have ended and the tables are written.
                That trial has no record.
        """
        require_torch()
        require_gpu(self.file)
        if self.file.run.rehearsed_on is not None:
            self.environment = stand_in_environment(self.file.run.rehearsed_on)
        self.store.open()
        try:
            return self._run(retry, watcher or Watcher())
        finally:
            self.store.close()

    def _run(self, retry: frozenset[Outcome], watcher: Watcher) -> SweepResults:
        raise NotImplementedError

    def _begin(self, num_recorded: int, notes: Sequence[str], listed: Sequence[str], watcher: Watcher) -> TrialRunner:
        """Write what is known before the first trial; return what runs the trials.

        The sweep file is written with ``listed``, what it became on this machine, as comments at its end.
        """
        self.store.write("machine.json", to_json(self.machine))
        resolved = f"Resolved on {self.machine.describe()}, device {self.file.device}:"
        lines = [self.file.text.rstrip(), "", *(f"# {line}" for line in (resolved, *listed))]
        self.store.write("sweep.toml", ("\n".join(lines) + "\n").encode())
        watcher.begins(num_recorded, notes)
        return TrialRunner(self.file.name, self.file.launcher, self.store, self.environment, self.cluster)

    def _run_trial(
        self,
        runner: TrialRunner,
        trial: Trial,
        records: dict[Key, TrialRecord],
        key: Key,
        watch: Callable[[TrialRecord | None], None],
    ) -> None:
        """Run a trial, and put its record among ``records``. It is stored as soon as the trial has ended."""
        self._write_progress(trial)
        watch(None)
        records[key] = runner.run(trial)
        self.num_new += 1
        watch(records[key])
        runner.check_nodes()

    def _write_progress(self, trial: Trial | None, has_ended: bool = False) -> None:
        progress = Progress(
            what=self.counts,
            total=self.num_total,
            done=self.num_done,
            to_run=self.num_to_run,
            running=None if trial is None else trial.label,
            running_id=None if trial is None else trial.spec.id,
            running_since=None if trial is None else time.time(),
            job=os.environ.get("SLURM_JOB_ID"),
            has_ended=has_ended,
        )
        self.store.write(PROGRESS, to_json(progress))

    def _results(
        self, records: Sequence[TrialRecord], everything: Sequence[TrialRecord], **frontier: FrontierRecord
    ) -> SweepResults:
        self._write_progress(None, has_ended=True)
        return SweepResults(
            name=self.file.name,
            folder=self.store.folder,
            machine=self.machine.describe(),
            records=tuple(records),
            all_records=tuple(everything),
            **frontier,
        )


class TrialSession(Session[Trial]):
    """The run of a file without [frontier]: its trials, one after another."""

    counts = "trials"

    _recorded: Mapping[str, TrialRecord] = {}

    @property
    def num_done(self) -> int:
        """The number of recorded trials."""
        return len(self._recorded)

    @property
    def num_to_run(self) -> int:
        """The number of trials that are still to be run."""
        return sum(trial.skip_reason is None and trial.spec.id not in self._recorded for trial in self.plan.cells)

    @property
    def records(self) -> list[TrialRecord]:
        """The records so far, in the order of the trials."""
        return [self._recorded[trial.spec.id] for trial in self.plan.cells if trial.spec.id in self._recorded]

    @property
    def kept(self) -> dict[str, str]:
        """The kinds of files that trials keep (trace, snapshot), each with its folder and viewer as text."""
        kept = {}
        if any(trial.spec.keep_trace for trial in self.plan.cells):
            kept["trace"] = f"{self.store.traces}, one a rank; open them in ui.perfetto.dev"
        if any(trial.spec.keep_snapshot for trial in self.plan.cells):
            kept["snapshot"] = f"{self.store.snapshots}, one a rank; open them in pytorch.org/memory_viz"
        return kept

    def _run(self, retry: frozenset[Outcome], watcher: Watcher) -> SweepResults:
        notes: list[str] = []
        recorded = self._recorded = _look_up(self.plan, self.store, retry, notes)
        pending = [trial for trial in self.plan.cells if trial.spec.id not in recorded]
        num_recorded = len(recorded)
        notes += [f"{num_recorded} trials are recorded already and get no {what}" for what in self.kept if recorded]
        trials = self.whole.cells
        listed = list(dict.fromkeys(trial.spec.model.describe() for trial in trials))
        listed += [
            f"{trial.spec.id} {label}{_skipped(trial)}" for trial, label in zip(trials, labels_of(trials), strict=True)
        ]
        try:
            with self._begin(num_recorded, notes, listed, watcher) as runner:
                for trial in pending:
                    self._run_trial(runner, trial, recorded, trial.spec.id, partial(watcher.trial, trial))
        finally:
            everything = list(_look_up(self.whole, self.store, frozenset(), []).values())
            self.store.write_table(everything)
            self._write_progress(None)
        return self._results(self.records, everything)


class SearchSession(Session[Search]):
    """The run of a file with [frontier]: a search in every cell."""

    counts = "cells"

    cells: Sequence[SearchedCell] = ()

    @property
    def num_done(self) -> int:
        """The number of cells whose search has ended."""
        return sum(cell.status in ("found", "skipped") for cell in self.cells)

    def _run(self, retry: frozenset[Outcome], watcher: Watcher) -> SweepResults:
        records, notes = self.store.read_all()
        cells = self.cells = cells_of(self.plan, records)
        for cell in cells:
            for again in list(cell.records):
                if self.store.look_up(cell.search.trial(again), retry, notes) is None:
                    del cell.records[again]
        listed = [f"{search.label}{_skipped(search)}" for search in self.whole.cells]
        try:
            with self._begin(len(_tried(cells)), notes, listed, watcher) as runner:
                for cell in cells:
                    while (index := cell.next_index) is not None:
                        trial = cell.search.trial(index)
                        watch = partial(watcher.search_trial, cell, trial)
                        self._run_trial(runner, trial, cell.records, index, watch)
        finally:
            everything = cells_of(self.whole, self.store.peek_all())
            whole = frontier_record(self.file, everything, self.machine.describe())
            self.store.write_frontier(whole)
            self.store.write_table(_tried(everything))
            self._write_progress(None)
        asked = frontier_record(self.file, cells, self.machine.describe())
        return self._results(_tried(cells), _tried(everything), frontier=asked, whole_frontier=whole)


def require_torch() -> None:
    """Raise MachineError if torch is not installed."""
    if torch_version() is None:
        raise MachineError(f"this needs torch, which is not installed; {install_hint('train')}")


def _look_up(
    plan: SweepPlan[Trial], store: Store, retry: frozenset[Outcome], notes: list[str]
) -> dict[str, TrialRecord]:
    found = {trial.spec.id: store.look_up(trial, retry, notes) for trial in plan.cells}
    return {trial_id: record for trial_id, record in found.items() if record is not None}


def _skipped(cell: Trial | Search) -> str:
    return f"; skipped: {cell.skip_reason}" if cell.skip_reason else ""


def _tried(cells: Sequence[SearchedCell]) -> list[TrialRecord]:
    return [cell.records[index] for cell in cells for index in sorted(cell.records)]
