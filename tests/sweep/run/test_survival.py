"""What is recorded of a trial that is killed, stopped or interrupted; tests/attacks does so at random moments."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from fsdp_bench.spec.rank_report import Outcome
from fsdp_bench.spec.record import TrialRecord, read_record
from tests.attacks.signals import children_of
from tests.conftest import command, run_command


def _hear_interrupts() -> None:
    """A shell's background jobs, and so their tests, start with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Sweep:
    """One sweep under attack: the same command, over and over."""

    def __init__(self, file: Path, results: Path) -> None:
        self.words = command("sweep", file, "--results", results, "--machine", "here", "--no-charts")
        self.folder = results / "here" / file.stem

    def start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.words,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=_hear_interrupts,
        )

    def end(self, process: subprocess.Popen[str]) -> int:
        process.communicate(timeout=200)
        return process.returncode

    def go_on(self, *words: str) -> int:
        """Run the command to its end in this process; return its exit code."""
        return run_command(*self.words[3:], *words).returncode

    def records(self) -> dict[str, bytes]:
        return {path.stem: path.read_bytes() for path in (self.folder / "trials").glob("*.json")}


def wait_until_gone(processes: list[psutil.Process]) -> list[psutil.Process]:
    _, alive = psutil.wait_procs(processes, timeout=15)
    return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def record_of(folder: Path) -> TrialRecord:
    (path,) = (folder / "trials").glob("*.json")
    return read_record(path.read_bytes(), path.name)


def wait_for_ranks(manager: subprocess.Popen[Any], count: int) -> list[psutil.Process]:
    """Wait until so many ranks of a trial run."""
    process, deadline = psutil.Process(manager.pid), time.monotonic() + 200
    while time.monotonic() < deadline:
        ranks = [grandchild for child in children_of(process) for grandchild in children_of(child)]
        if len(ranks) >= count:
            return ranks
        assert manager.poll() is None, "the sweep has ended"
        time.sleep(0.01)
    raise AssertionError("the ranks did not start")


def stop_ranks(manager: subprocess.Popen[Any], count: int) -> list[psutil.Process]:
    """Wait until so many ranks of a trial run, and stop them: the trial goes on for as long as a test needs."""
    while True:
        ranks = wait_for_ranks(manager, count)
        with contextlib.suppress(psutil.NoSuchProcess):
            for rank in ranks:
                rank.suspend()
            if all(rank.status() == psutil.STATUS_STOPPED for rank in ranks):
                return ranks
        for rank in ranks:  # one had ended: those of the next trial
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.resume()


def test_a_killed_rank_is_that_trials_crash_and_its_reason_names_the_signal(
    write_sweep: Callable[..., Path], tmp_path: Path
) -> None:
    sweep = Sweep(write_sweep("world_size = 2"), tmp_path / "results")
    manager = sweep.start()
    ranks = stop_ranks(manager, 2)  # so that the trial has not ended when the signal comes
    ranks[1].kill()
    ranks[0].resume()
    assert sweep.end(manager) == 1
    record = record_of(sweep.folder)
    assert record.outcome is Outcome.CRASHED
    assert "SIGKILL" in (record.reason or "")
    assert sweep.go_on() == 1  # the crash stands
    assert record_of(sweep.folder) == record
    assert sweep.go_on("--retry", "crashed") == 0
    assert record_of(sweep.folder).outcome is Outcome.OK
    (aside,) = (sweep.folder / "set-aside").iterdir()
    assert read_record(aside.read_bytes(), aside.name) == record


def test_a_stopped_rank_is_a_timeout_that_says_where_it_was(write_sweep: Callable[..., Path], tmp_path: Path) -> None:
    sweep = Sweep(write_sweep("world_size = 2", "timeout_seconds = 4"), tmp_path / "results")
    manager = sweep.start()
    ranks = stop_ranks(manager, 2)
    ranks[0].resume()
    assert sweep.end(manager) == 1
    record = record_of(sweep.folder)
    assert record.outcome is Outcome.TIMEOUT
    assert "not done after 4 s" in (record.reason or "")
    assert not wait_until_gone(ranks)


def test_an_interrupt_ends_with_130_and_leaves_no_record_of_the_running_trial(
    write_sweep: Callable[..., Path], tmp_path: Path
) -> None:
    endless = "steps = 5000"  # so that the trial is still running when the signal comes, however slow the machine
    sweep = Sweep(write_sweep("world_size = 2", endless), tmp_path / "results")
    manager = sweep.start()
    ranks = wait_for_ranks(manager, 2)
    manager.send_signal(signal.SIGINT)
    assert sweep.end(manager) == 130
    assert not sweep.records()
    assert not wait_until_gone(ranks)
    assert not (sweep.folder / ".scratch").exists()
