"""Whatever is killed, stopped or interrupted, the same command ends with exactly the trials' set of records."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from fsdp_bench.spec.record import Outcome, TrialRecord, read_record
from tests.conftest import command, run_command

MOMENTS = int(os.environ.get("FSDP_BENCH_TEST_MOMENTS", "16"))
SEED = int(os.environ.get("FSDP_BENCH_TEST_SEED", random.SystemRandom().randrange(10**6)))
GRID = """
world_size = 2
seed = [0, 1, 2, 3]
strategy = ["FULL_SHARD", "NO_SHARD"]
api = ["fsdp1", "fsdp2"]
"""
NUM_TRIALS = 16


def kill_manager(manager: psutil.Process, _ranks: list[psutil.Process]) -> None:
    manager.kill()


def kill_all(manager: psutil.Process, _ranks: list[psutil.Process]) -> None:
    for process in [manager, *manager.children(recursive=True)]:
        process.kill()


def kill_server(manager: psutil.Process, _ranks: list[psutil.Process]) -> None:
    for process in manager.children():
        process.kill()


def kill_one_rank(_manager: psutil.Process, ranks: list[psutil.Process]) -> None:
    if ranks:
        ranks[0].kill()


def stop_one_rank(_manager: psutil.Process, ranks: list[psutil.Process]) -> None:
    if ranks:
        ranks[-1].suspend()


def interrupt(manager: psutil.Process, _ranks: list[psutil.Process]) -> None:
    manager.send_signal(signal.SIGINT)


ATTACKS = [kill_manager, kill_all, kill_server, kill_one_rank, stop_one_rank, interrupt]


def _hear_interrupts() -> None:
    """A shell's background jobs, and so their tests, start with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Sweep:
    """One sweep under attack: the same command, over and over."""

    def __init__(self, file: Path, results: Path) -> None:
        self.words = command("sweep", file, "--results", results, "--machine", "here", "--no-charts")
        self.folder = results / "here" / file.stem
        self.finished_lines: Counter[str] = Counter()

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
        """Wait for the end; count which trials said that they finished."""
        _, text = process.communicate(timeout=200)
        self.finished_lines.update(re.findall(r"^\[\d+/\d+\] ([0-9a-f]{12}) ", text, re.MULTILINE))
        return process.returncode

    def records(self) -> dict[str, bytes]:
        return {path.stem: path.read_bytes() for path in (self.folder / "trials").glob("*.json")}


def wait_until_gone(processes: list[psutil.Process]) -> list[psutil.Process]:
    _, alive = psutil.wait_procs(processes, timeout=15)
    return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.timeout(3000)
def test_a_sweep_attacked_at_random_moments_ends_with_every_record_once(
    write_sweep: Callable[..., Path], tmp_path: Path
) -> None:
    draw = random.Random(SEED)
    print(f"seed {SEED}: FSDP_BENCH_TEST_SEED repeats this draw")
    sweep = Sweep(write_sweep(GRID, "timeout_seconds = 10"), tmp_path / "results")
    expected = {line.split()[1] for line in run_command(*sweep.words[3:], "--list").stdout.splitlines()[:-1]}
    assert len(expected) == NUM_TRIALS
    attacks = [attack for attack in ATTACKS for _ in range(MOMENTS // len(ATTACKS))]
    draw.shuffle(attacks)
    for attack in attacks:
        before = sweep.records()
        if set(before) == expected:  # this folder is done: go on with a fresh one
            check_complete(sweep, expected)
            shutil.rmtree(sweep.folder)
            sweep.finished_lines.clear()
            before = {}
        manager, everyone = attack_once(sweep, attack, draw.uniform(0.0, 6.0))
        sweep.end(manager)
        assert not wait_until_gone(everyone), f"{attack.__name__} left processes behind"
        after = sweep.records()
        assert all(after[trial] == data for trial, data in before.items()), f"{attack.__name__} changed a record"
        for trial, data in after.items():
            assert read_record(data, trial).id == trial
    assert sweep.end(sweep.start()) in (0, 1)  # 1: a trial whose rank was killed has crashed
    check_complete(sweep, expected)


def attack_once(
    sweep: Sweep, attack: Callable[..., None], seconds: float
) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """Start the sweep, attack it after some seconds; return it with every process that it had then."""
    manager = sweep.start()
    time.sleep(seconds)
    try:
        process = psutil.Process(manager.pid)
        everyone = [process, *process.children(recursive=True)]
        ranks = [grandchild for child in process.children() for grandchild in child.children()]
        attack(process, ranks)
    except psutil.NoSuchProcess:  # the sweep, or the rank, was faster
        everyone = []
    return manager, everyone


def check_complete(sweep: Sweep, expected: set[str]) -> None:
    records = sweep.records()
    assert set(records) == expected
    for trial, data in records.items():
        json.loads(data)
        record = read_record(data, trial)
        assert record.outcome in (Outcome.OK, Outcome.CRASHED, Outcome.TIMEOUT), record.reason
        assert record.outcome is Outcome.OK or record.reason
    assert all(count == 1 for count in sweep.finished_lines.values()), "a trial ran again after it had finished"
    leftovers = {path.name for path in sweep.folder.iterdir()} - {
        "trials", "machine.json", "sweep.toml", "trials.csv", ".lock", ".server.log", ".scratch",
    }  # fmt: skip
    assert not leftovers
    assert not list((sweep.folder / "trials").glob(".*"))


def record_of(folder: Path) -> TrialRecord:
    (path,) = (folder / "trials").glob("*.json")
    return read_record(path.read_bytes(), path.name)


def wait_for_ranks(manager: subprocess.Popen[str], count: int) -> list[psutil.Process]:
    process = psutil.Process(manager.pid)
    for _ in range(600):
        ranks = [grandchild for child in process.children() for grandchild in child.children()]
        if len(ranks) >= count:
            return ranks
        time.sleep(0.05)
    raise AssertionError("the ranks did not start")


def test_a_killed_rank_is_that_trials_crash_and_its_reason_names_the_signal(
    write_sweep: Callable[..., Path], tmp_path: Path
) -> None:
    sweep = Sweep(write_sweep("world_size = 2", "steps = 100"), tmp_path / "results")
    manager = sweep.start()
    wait_for_ranks(manager, 2)[1].kill()
    assert sweep.end(manager) == 1
    record = record_of(sweep.folder)
    assert record.outcome is Outcome.CRASHED
    assert "SIGKILL" in (record.reason or "")
    assert sweep.end(sweep.start()) == 1  # the crash stands
    assert record_of(sweep.folder) == record
    sweep.words += ["--retry", "crashed"]
    assert sweep.end(sweep.start()) == 0
    assert record_of(sweep.folder).outcome is Outcome.OK
    (aside,) = (sweep.folder / "set-aside").iterdir()
    assert read_record(aside.read_bytes(), aside.name) == record


def test_a_stopped_rank_is_a_timeout_that_says_where_it_was(write_sweep: Callable[..., Path], tmp_path: Path) -> None:
    sweep = Sweep(write_sweep("world_size = 2", "timeout_seconds = 4"), tmp_path / "results")
    manager = sweep.start()
    ranks = wait_for_ranks(manager, 2)
    ranks[1].suspend()
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


def test_torchruns_ranks_die_with_a_killed_manager_too(write_sweep: Callable[..., Path], tmp_path: Path) -> None:
    sweep = Sweep(write_sweep("world_size = 2", "launcher = 'torchrun'"), tmp_path / "results")
    manager = sweep.start()
    ranks = wait_for_ranks(manager, 2)
    manager.kill()
    sweep.end(manager)
    assert not wait_until_gone(ranks)
    assert sweep.end(sweep.start()) == 0
    assert record_of(sweep.folder).outcome is Outcome.OK


def test_two_sweeps_do_not_write_to_one_folder(write_sweep: Callable[..., Path], tmp_path: Path) -> None:
    sweep = Sweep(write_sweep("world_size = 2"), tmp_path / "results")
    first = sweep.start()
    ranks = wait_for_ranks(first, 1)
    for rank in ranks:
        rank.suspend()  # so that the first one is still there, however slow the second one's start is
    second = run_command(*sweep.words[3:])
    for rank in ranks:
        rank.resume()
    assert second.returncode == 2
    assert "another fsdp-bench sweep is writing here" in second.stderr
    assert sweep.end(first) == 0
