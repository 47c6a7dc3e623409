"""Ranks that leave processes, print or write too much: bounded, cleaned up, and harmless for the manager.

The ranks are small programs without torch, started and watched as torchrun is.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fsdp_bench.spec.errors import ResultsError
from fsdp_bench.spec.rank_report import Outcome
from fsdp_bench.spec.record import RunPlan, TrialRecord, TrialSpec
from fsdp_bench.spec.setup import TrainSetup
from fsdp_bench.sweep.launchers import processes
from fsdp_bench.sweep.launchers.launcher import RankExit
from fsdp_bench.sweep.launchers.one_node import Torchrun, TorchrunTrial
from fsdp_bench.sweep.launchers.processes import MARK, mark_of, worker_environment
from fsdp_bench.sweep.machine import GpuDevice
from fsdp_bench.sweep.results.store import Store
from fsdp_bench.sweep.run import runner
from fsdp_bench.sweep.run.runner import TimeLimit, TrialRun
from tests.processes import processes_with, wait_until_gone
from tests.sweep.config.test_grid import machine
from tests.sweep.frontier.test_cell import SHAPE as MODEL

OK = '{"rank": 0, "outcome": "ok"}'


class Program(Torchrun):
    """Runs a program as the trial's one rank."""

    def __init__(self, mark: str, code: str) -> None:
        super().__init__(mark)
        self._code = code

    def start(self, trial: Path, scratch: Path, world_size: int) -> TorchrunTrial:
        with open(scratch / "rank-0.log", "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", self._code],
                stdout=log,
                stderr=log,
                cwd=scratch,
                env=worker_environment(self._mark),
                start_new_session=True,
            )
        return TorchrunTrial(process)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "results")
    store.open()
    yield store
    store.close()


def trial(store: Store, seconds: float = 30.0, world_size: int = 1, device: str = "cpu") -> TrialRun:
    plan = RunPlan(timeout_seconds=seconds, communication_steps=0)
    setup = TrainSetup(world_size=world_size)
    return TrialRun(TrialSpec(id="0" * 12, model=MODEL, setup=setup, run=plan, device=device), "s", store)


def run(store: Store, code: str, seconds: float = 30.0) -> TrialRecord:
    return trial(store, seconds).run(Program(mark_of(store.folder), code))


def writing(report: str, then: str = "") -> str:
    return f"open('rank-0.json', 'w').write({report})\n{then}"


LEAVE = {
    "in its group": "subprocess.Popen(['sleep', '1000'])",
    "in a session of its own": "subprocess.Popen(['sleep', '1000'], start_new_session=True)",
    "after its parent's death": "subprocess.Popen('setsid sleep 1000 & exit', shell=True).wait()",
}


@pytest.mark.parametrize("leave", LEAVE.values(), ids=LEAVE)
def test_processes_left_by_a_rank_that_succeeded_are_ended(store: Store, tmp_path: Path, leave: str) -> None:
    assert run(store, f"import subprocess\n{leave}\n" + writing(repr(OK))).outcome is Outcome.OK
    assert not processes_with(MARK, mark_of(store.folder))


def test_a_ranks_output_is_bounded_in_memory_and_in_the_record(store: Store) -> None:
    record = run(store, "import sys\nfor _ in range(50): sys.stderr.write('x' * 1_000_000)\nsys.exit(3)")
    assert record.outcome is Outcome.CRASHED
    assert 0 < len(record.stderr_tail) < 1000
    many = run(store, "for number in range(100_000): print(number, 'y' * 200)\nraise SystemExit(3)")
    assert many.stderr_tail.splitlines()[-1].startswith("99999 ")
    assert len(many.stderr_tail) < 30 * 600
    assert not store.scratch.exists() or not list(store.scratch.iterdir())  # its log went with it


def test_a_log_that_grows_is_cut_down_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "MOST_LOG_BYTES", 100_000)
    with open(tmp_path / "rank-0.log", "ab") as log:
        for number in range(20_000):
            log.write(b"line %d\n" % number)
        log.flush()
        processes.cut_down(tmp_path)
        log.write(b"after\n")
    assert (tmp_path / "rank-0.log").stat().st_size < 100_000
    assert processes.last_lines(tmp_path / "rank-0.log", 2) == ["line 19999", "after"]


ODD = {
    "a report nested too deeply": ("'[' * 200_000", "", Outcome.CRASHED),
    "a report that is not UTF-8": ("'x'", "open('rank-0.json', 'wb').write(b'\\xff')", Outcome.CRASHED),
    "a report that is too large": ("' ' * 70_000_000", "", Outcome.CRASHED),
    "a stage that is not UTF-8": (repr(OK), "open('rank-0.phase', 'wb').write(b'\\xff\\xfe' * 1000)", Outcome.OK),
}


@pytest.mark.parametrize(("report", "then", "outcome"), ODD.values(), ids=ODD)
def test_odd_files_of_a_rank_are_its_outcome(store: Store, report: str, then: str, outcome: Outcome) -> None:
    assert run(store, writing(report, then)).outcome is outcome


def test_a_foreign_process_on_a_gpu_makes_the_measurement_suspect(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = GpuDevice(index=0, name="NVIDIA L4", memory_bytes=1 << 34, processes=(4711,))
    monkeypatch.setattr(runner, "probe_machine", lambda: machine((busy,)))
    record = trial(store, device="cuda").run(Program(mark_of(store.folder), "raise SystemExit(3)"))
    assert record.suspect == tuple(
        f"another process (4711) was on GPU 0 {when} the trial" for when in ("before", "after")
    )
    assert record.outcome is Outcome.CRASHED


def test_a_scratch_folder_that_cannot_be_written_ends_the_sweep_and_records_nothing(store: Store) -> None:
    begun = trial(store)
    store.remove_scratch(store.scratch)  # as a disk without inodes does, writing fails
    with pytest.raises(ResultsError, match="results cannot be written"):
        begun.run(Program("none", ""))


def test_the_time_limit_does_not_count_the_time_in_which_the_manager_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(runner.time, "monotonic", lambda: now)
    limit = TimeLimit(10.0)
    now = 1000.0  # stopped
    assert not limit.has_run_out()
    for _ in range(100):
        now += 0.2
        if limit.has_run_out():
            break
    assert now == pytest.approx(1000 + 10 - runner.MOST_SECONDS_BETWEEN_LOOKS, abs=0.5)


def test_a_report_that_was_there_when_the_limit_passed_counts(store: Store) -> None:
    assert run(store, writing(repr(OK), "import time; time.sleep(60)"), seconds=0.5).outcome is Outcome.OK


def test_a_process_dies_with_its_manager_from_its_first_moment(tmp_path: Path) -> None:
    """Even where it is stopped before its own program has begun."""
    code = (
        "import os, subprocess, time\nfrom fsdp_bench.sweep.launchers.processes import dying_with_this_process\n"
        "child = subprocess.Popen(['sleep', '1000'], preexec_fn=dying_with_this_process())\n"
        "print(child.pid, flush=True)\ntime.sleep(1000)"
    )
    manager = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(manager.stdout.readline()))
    child.suspend()
    manager.kill()
    manager.communicate()
    wait_until_gone([child])


class TwoRanks(Program):
    """The first of two ranks ends without a report; its peer waits for it."""

    def start(self, trial: Path, scratch: Path, world_size: int) -> TorchrunTrial:
        peer, ends = super().start(trial, scratch, world_size), [RankExit(rank=0, exit_code=0)]
        wait = peer.wait
        peer.wait = lambda seconds: [ends.pop()] if ends else wait(seconds)
        return peer


def test_a_rank_that_ends_early_ends_the_trial_and_is_its_cause(store: Store) -> None:
    launcher = TwoRanks(mark_of(store.folder), "import time; time.sleep(100)")
    begin = time.monotonic()
    record = trial(store, 100.0, world_size=2).run(launcher)
    assert time.monotonic() - begin < 30
    assert record.outcome is Outcome.CRASHED
    assert record.reason == "rank 0 ended with exit code 0 in start and left no report"
