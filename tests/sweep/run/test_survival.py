"""Records of trials that are killed, stopped or interrupted. tests/attacks does the same at random moments."""

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
from tests.conftest import command, run_command
from tests.processes import ranks_of, start_as_a_terminal_does


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
            preexec_fn=start_as_a_terminal_does,
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


def record_of(folder: Path, seed: int) -> TrialRecord:
    """Return the record of the trial with a seed."""
    records = [read_record(path.read_bytes(), path.name) for path in (folder / "trials").glob("*.json")]
    (found,) = [record for record in records if record.setup.seed == seed]
    return found


def wait_for_ranks(manager: subprocess.Popen[Any], count: int) -> list[psutil.Process]:
    """Wait until so many ranks of a trial run."""
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        if len(ranks := ranks_of(manager)) >= count:
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


def test_a_killed_rank_crashes_its_trial_and_a_stopped_rank_times_out(
    write_sweep: Callable[..., Path], tmp_path: Path
) -> None:
    file = write_sweep("world_size = 2\nseed = [0, 1]", "timeout_seconds = 10")
    sweep = Sweep(file, tmp_path / "results")
    manager = sweep.start()
    first = stop_ranks(manager, 2)
    first[1].kill()
    first[0].resume()
    while not sweep.records():
        assert manager.poll() is None
        time.sleep(0.02)
    second = stop_ranks(manager, 2)
    second[0].resume()
    assert sweep.end(manager) == 1
    assert not wait_until_gone([*first, *second])
    ended = sweep.records()
    crashed, timed_out = (record_of(sweep.folder, seed) for seed in (0, 1))
    assert crashed.outcome is Outcome.CRASHED
    assert "SIGKILL" in (crashed.reason or "")
    assert timed_out.outcome is Outcome.TIMEOUT
    assert "not done after 10 s" in (timed_out.reason or "")
    assert sweep.go_on() == 1  # failed trials are not repeated
    assert sweep.records() == ended
    assert sweep.go_on("--retry", "crashed") == 1
    assert record_of(sweep.folder, 0).outcome is Outcome.OK
    assert record_of(sweep.folder, 1) == timed_out
    (aside,) = (sweep.folder / "set-aside").iterdir()
    assert read_record(aside.read_bytes(), aside.name) == crashed


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
