"""Runs a sweep's trials one after another. A crash or a hang is the outcome of its trial and ends no other trial."""

import contextlib
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

import msgspec

from fsdp_bench.catalog.loader import gpu_by_product_name
from fsdp_bench.spec.codec import from_json, to_json
from fsdp_bench.spec.errors import ResultsError
from fsdp_bench.spec.rank_report import Outcome, RankReport
from fsdp_bench.spec.record import SCHEMA_VERSION, TrialRecord, TrialSpec
from fsdp_bench.sweep.config.trial import Trial
from fsdp_bench.sweep.launchers.launcher import Cluster, Launched, Launcher, LauncherError, NodesLost, RankExit
from fsdp_bench.sweep.launchers.one_node import ForkServer, Torchrun
from fsdp_bench.sweep.launchers.processes import cut_down, end_marked, last_lines, mark_of
from fsdp_bench.sweep.machine import oom_kills, probe_machine
from fsdp_bench.sweep.results.store import Store
from fsdp_bench.sweep.run.outcome import OutOfMemoryKill, RankEnd, TrialEnd, decide_outcome, lost_nodes_end

GRACE_SECONDS = 3.0
"""After a rank failed, how long the other ranks may take to write their reports before they are ended."""
POLL_SECONDS = 0.2
STDERR_TAIL_LINES = 30

FILES_OF_A_RANK = 5
"""Its log, its node, its phase, its report, and the report under its temporary name."""
RANKS_CHECKED = 16
"""Ranks for whose files space is looked for after a crash: more take long on a shared file system."""

MOST_REPORT_BYTES = 64 * 1024**2
MOST_STAGE_BYTES = 100


class TrialRunner:
    """Runs one trial after another with one launcher, and closes it at the end."""

    def __init__(
        self,
        sweep: str,
        launcher: str,
        store: Store,
        environment: Mapping[str, str] = {},
        cluster: Cluster | None = None,
    ) -> None:
        """Prepare to start trials.

        ``launcher`` is one of LAUNCHERS (config/sweep_file.py); ``environment`` is what the ranks' environment has
        beside this process's. Without a cluster all ranks are on this node. Raises MachineError if a node is not there.
        """
        self._lost_nodes: tuple[str, ...] = ()
        self._sweep = sweep
        self._store = store
        self._log = store.folder / ".server.log"
        mark = mark_of(store.folder)
        end_marked(mark)  # whatever a killed manager left: it had the lock that this one has now
        local: Launcher = (
            Torchrun(mark, environment) if launcher == "torchrun" else ForkServer(self._log, mark, environment)
        )
        if cluster is not None:
            cluster.begin(local, mark, environment)
        self._launcher = cluster or local

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._launcher.close()
        self._log.unlink(missing_ok=True)

    def run(self, trial: Trial) -> TrialRecord:
        """Run a trial, or skip it if it has a skip_reason. Its record is stored when this returns.

        Raises:
            ResultsError: if results cannot be written. Stored records stay.
            KeyboardInterrupt: raised again after the trial's processes have ended. The trial has no record.
        """
        if trial.skip_reason is not None:
            end = TrialEnd(outcome=Outcome.SKIPPED, reason=trial.skip_reason)
            record = _record(trial.spec, self._sweep, end, started_at=_now(), wall_seconds=0.0)
        else:
            run = TrialRun(trial.spec, self._sweep, self._store)
            record = run.run(self._launcher)
            self._lost_nodes = run.lost_nodes
        self._store.write_record(record)
        return record

    def check_nodes(self) -> None:
        """Raise NodesLost if the last trial lost some nodes. Its record is stored."""
        if self._lost_nodes:
            raise NodesLost(self._lost_nodes)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _record(spec: TrialSpec, sweep: str, verdict: TrialEnd, **fields: object) -> TrialRecord:
    return TrialRecord(
        schema_version=SCHEMA_VERSION,
        id=spec.id,
        sweep=sweep,
        source="rehearsed" if spec.run.rehearsed_on else "measured",
        device=spec.run.alone or spec.device,
        emulated_on=spec.device if spec.run.emulate else None,
        model=spec.model,
        num_parameters=spec.model.num_parameters,
        setup=spec.setup,
        run=spec.run,
        outcome=verdict.outcome,
        reason=verdict.reason,
        **{"effective_strategy": spec.setup.effective_strategy.value, **fields},  # type: ignore[arg-type]
    )


class TrialRun:
    """One trial, from its scratch folder to its record."""

    def __init__(self, spec: TrialSpec, sweep: str, store: Store) -> None:
        self._spec = spec
        self._sweep = sweep
        self._store = store
        self._scratch = store.make_scratch(spec.id)
        self._exits: dict[int, RankExit] = {}
        self._timed_out = False
        self.lost_nodes: tuple[str, ...] = ()
        """Nodes that were lost while the trial ran."""
        self._suspect = ["allocations were recorded, which slows the host down"] if spec.keep_snapshot else []

    def run(self, launcher: Launcher) -> TrialRecord:
        """Run the trial and return its record. Its processes have ended when this returns or raises.

        Raises:
            ResultsError: if the trial's input cannot be written.
            MachineError: if the ranks cannot be started.
            NodesLost: if a node was lost before a rank ran there. The trial has no record.
        """
        begin, started_at, kills = time.monotonic(), _now(), oom_kills()
        trial_file = self._scratch / "trial.json"
        self._note_foreign_processes("before")
        workers_seconds = 0.0
        try:
            with self._store.writing():
                trial_file.write_bytes(to_json(self._spec))
                workers_seconds, launched = self._supervise(launcher, trial_file)
                verdict = self._verdict(oom_kills().since(kills))
                if verdict.outcome is not Outcome.OK:
                    verdict = self._after_lost_nodes(launched.lost_nodes(), verdict)
        except LauncherError as error:
            launcher.close()
            verdict = TrialEnd(outcome=Outcome.CRASHED, reason=str(error))
        self._note_foreign_processes("after")
        if verdict.outcome is Outcome.CRASHED:
            self._check_disk()
        self._store.keep_files(self._spec.id, self._scratch)
        reports = [report for report in map(self._report, self._ranks()) if report is not None]
        stderr_tail = None if verdict.outcome is Outcome.OK else self._stderr_tail(verdict.rank)
        self._store.remove_scratch(self._scratch)
        wall_seconds = time.monotonic() - begin
        return _record(
            self._spec,
            self._sweep,
            verdict,
            ranks=tuple(reports),
            suspect=tuple(self._suspect),
            stderr_tail=stderr_tail,
            started_at=started_at,
            wall_seconds=wall_seconds,
            overhead_seconds=wall_seconds - workers_seconds,
            **self._reported(reports),
        )

    def _check_disk(self) -> None:
        """Raise ResultsError if there is no space for all of the ranks' files, while they are there.

        A full disk crashes ranks, too, and is not the trial's outcome.
        """
        try:
            self._store.check_writable(FILES_OF_A_RANK * min(self._spec.num_processes, RANKS_CHECKED))
        except ResultsError:
            self._store.remove_scratch(self._scratch)
            raise

    def _supervise(self, launcher: Launcher, trial_file: Path) -> tuple[float, Launched]:
        """Start the ranks; end all at the time limit or after a failure. Return seconds, and the ended trial."""
        launched = launcher.start(trial_file, self._scratch, self._spec.num_processes)
        begin, limit = time.monotonic(), TimeLimit(self._spec.run.timeout_seconds)
        failed = False
        try:
            while True:
                for end in launched.wait(POLL_SECONDS):
                    self._exits[-1 if end.rank is None else end.rank] = end
                    left_no_report = end.rank is not None and self._report(end.rank) is None
                    if (end.exit_code != 0 or left_no_report) and not failed:
                        failed = True
                        limit.stop_within(GRACE_SECONDS)
                if launched.finished or limit.has_run_out():
                    break
                cut_down(self._scratch)
            self._timed_out = not launched.finished and not failed
        finally:
            if not launched.finished:
                launched.kill()
            launcher.end_leftovers()
        return time.monotonic() - begin, launched

    def _after_lost_nodes(self, lost: tuple[str, ...], verdict: TrialEnd) -> TrialEnd:
        """Return the outcome of a trial that lost nodes. Raises NodesLost if no rank had begun on them."""
        self.lost_nodes = lost
        ranks = [rank for rank in self._ranks() if self._node(rank) in lost]
        if not lost or verdict.outcome.is_oom:
            return verdict
        if not ranks:
            raise NodesLost(lost)
        return lost_nodes_end(lost, [self._end(rank) for rank in ranks])

    def _node(self, rank: int) -> str | None:
        """Return the name of the node on which a rank began; None if it did not, or there is one node."""
        with contextlib.suppress(OSError):
            return (self._scratch / f"rank-{rank}.node").read_text(errors="replace")
        return None

    def _ranks(self) -> range:
        return range(self._spec.num_processes)

    def _verdict(self, oom_killed: OutOfMemoryKill) -> TrialEnd:
        return decide_outcome(
            [self._end(rank) for rank in self._ranks()],
            timed_out=self._timed_out,
            oom_killed=oom_killed,
            timeout_seconds=self._spec.run.timeout_seconds,
        )

    def _end(self, rank: int) -> RankEnd:
        end = self._exits.get(rank) or self._exits.get(-1)
        stage = b""
        with contextlib.suppress(OSError), open(self._scratch / f"rank-{rank}.phase", "rb") as file:
            stage = file.read(MOST_STAGE_BYTES)
        return RankEnd(
            rank=rank,
            report=self._report(rank),
            exit_code=end.exit_code if end else None,
            signal=end.signal if end else None,
            is_of_torchrun=end is not None and end.rank is None,
            stage=" ".join(stage.decode(errors="replace").split()) or "start",
        )

    def _report(self, rank: int) -> RankReport | None:
        try:
            with open(self._scratch / f"rank-{rank}.json", "rb") as file:
                data = file.read(MOST_REPORT_BYTES + 1)
            report = from_json(data, RankReport) if len(data) <= MOST_REPORT_BYTES else None
        except (OSError, msgspec.DecodeError):
            return None
        return report if report is None or self._spec.run.rehearsed_on is None else report.without_times()

    def _stderr_tail(self, rank: int | None) -> str | None:
        """Return the last lines of the log of the rank that caused the outcome. torchrun's ranks share one log."""
        of_node = [f"{node}.log"] if (node := self._node(rank or 0)) is not None else []
        for name in (f"rank-{rank or 0}.log", *of_node, "rank-0.log"):
            lines = last_lines(self._scratch / name, STDERR_TAIL_LINES)
            if lines:
                return "\n".join(lines)
        return None

    def _note_foreign_processes(self, when: str) -> None:
        """Note processes on the GPUs before or after a trial, when this sweep has none there."""
        if self._spec.device != "cuda" or self._spec.run.rehearsed_on is not None:
            return
        for device in probe_machine().gpus[: self._spec.num_processes]:
            if device.processes:
                numbers = ", ".join(map(str, device.processes))
                self._suspect.append(f"another process ({numbers}) was on GPU {device.index} {when} the trial")

    def _reported(self, reports: list[RankReport]) -> dict[str, object]:
        """Return the strategy that ran, and the GPU's dense peak for the compute dtype if the catalogue has it."""
        effective = next((report.effective for report in reports if report.effective), None)
        fields: dict[str, object] = {"effective_strategy": effective.strategy} if effective else {}
        if self._spec.device != "cuda" or self._spec.run.rehearsed_on is not None or not reports:
            return fields
        gpu, dtype = gpu_by_product_name(reports[0].device_name), self._spec.setup.precision.compute
        if gpu is not None and (peak := gpu.peak_flops_per_second(dtype)) is not None:
            fields["peak_flops_per_second"] = peak
            fields["peak_flops_source"] = f"{gpu.name} {dtype}: {gpu.source.title}, {gpu.source.date}"
        return fields


MOST_SECONDS_BETWEEN_LOOKS = 2.0
"""The runner checks its limit several times a second. A longer time between two checks means that it was stopped."""


class TimeLimit:
    """A time limit that counts the time in which this process runs, not the time in which it is stopped.

    While this process is stopped (Ctrl-Z, a suspended laptop) the ranks may go on. Their reports are read before the
    limit is checked.
    """

    def __init__(self, seconds: float) -> None:
        self._left = seconds
        self._last = time.monotonic()

    def has_run_out(self) -> bool:
        """Return whether no time is left. Call this at every check for ended ranks."""
        now = time.monotonic()
        self._left -= min(now - self._last, MOST_SECONDS_BETWEEN_LOOKS)
        self._last = now
        return self._left <= 0

    def stop_within(self, seconds: float) -> None:
        """Shorten the time that is left to at most ``seconds``."""
        self._left = min(self._left, seconds)
