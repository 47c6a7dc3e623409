"""Two writers of one results folder, on one node or on two."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from fsdp_bench.spec.errors import ResultsError
from fsdp_bench.sweep.results import lock
from fsdp_bench.sweep.results.lock import FolderLock
from tests.processes import Sweep, stop_ranks


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(lock, "DEAD_AFTER_SECONDS", 0.6)


def on_node(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> FolderLock:
    monkeypatch.setenv("SLURMD_NODENAME", name)
    return FolderLock(folder)


def stop_beating(writer: FolderLock) -> None:
    """As if its node had lost its power."""
    writer._ends.set()
    writer._beating.join()


def test_a_second_writer_on_the_node_is_refused_at_once_and_names_the_first(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from fsdp_bench.sweep.results.lock import FolderLock;"
        "FolderLock(Path(sys.argv[1])).take(); print('taken', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "taken\n"
        with pytest.raises(ResultsError, match=rf"another fsdp-bench sweep is writing here \(process {first.pid} on "):
            FolderLock(tmp_path).take()
        first.kill()
    begin = time.monotonic()
    second = FolderLock(tmp_path)
    second.take()  # it was on this node, so nobody waits for signs of life
    assert time.monotonic() - begin < lock.DEAD_AFTER_SECONDS
    second.give_back()


def test_a_later_process_with_the_number_of_a_dead_writer_is_not_that_writer(tmp_path: Path) -> None:
    first, second = FolderLock(tmp_path), FolderLock(tmp_path)
    first._writer = msgspec.structs.replace(first._writer, started=1.0)
    first.take()
    assert second.take() is None
    for one in (first, second):
        one.give_back()


@pytest.mark.parametrize("nodes", [("n1", "n2"), ("n1", "n1")])
def test_a_living_writer_is_not_replaced(
    nodes: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (on_node(tmp_path, name, monkeypatch) for name in nodes)
    first.take()
    with pytest.raises(ResultsError, match=r"is writing here \(process \d+ on n1\); wait for it to end"):
        second.take()
    assert first.lost() is None
    first.give_back()
    second.take()
    second.give_back()


def test_a_writer_that_listed_the_folder_too_early_does_not_overwrite_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where both look at the same moment, and on NFS: the second has seen an empty folder."""
    first, second = (on_node(tmp_path, name, monkeypatch) for name in ("n1", "n2"))
    first.take()
    too_old: list[list[int]] = [[]]
    current = lock._numbers
    monkeypatch.setattr(lock, "_numbers", lambda folder: too_old.pop() if too_old else current(folder))
    with pytest.raises(ResultsError, match="on n1"):
        second.take()
    assert first.lost() is None
    first.give_back()


def test_a_dead_writer_on_another_node_is_replaced_and_may_not_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (on_node(tmp_path, name, monkeypatch) for name in ("n1", "n2"))
    first.take()
    stop_beating(first)
    second.take()
    assert first.lost() == tmp_path / ".writer.1"
    assert second.lost() is None
    first.give_back()  # which must not end the other's
    third = on_node(tmp_path, "n3", monkeypatch)
    with pytest.raises(ResultsError, match="on n2"):
        third.take()
    second.give_back()


@pytest.mark.parametrize("leaves", ["nothing", "a dead writer", "a file that was just made"])
def test_of_many_that_start_together_one_writes(leaves: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = on_node(tmp_path, "n0", monkeypatch)
    if leaves == "a dead writer":
        dead.take()
        stop_beating(dead)
    elif leaves != "nothing":
        (tmp_path / ".writer.7").write_bytes(b"")
    locks = [on_node(tmp_path, f"n{number}", monkeypatch) for number in range(1, 9)]

    def takes(one: FolderLock) -> bool:
        try:
            one.take()
        except ResultsError:
            return False
        return True

    with ThreadPoolExecutor(len(locks)) as pool:
        taken = list(pool.map(takes, locks))
    assert sum(taken) == 1
    assert locks[taken.index(True)].lost() is None
    for one in (dead, *locks):
        one.give_back()


pytestmark = pytest.mark.timeout(600)

FAST = "from fsdp_bench.sweep.results import lock\nlock.BEAT_SECONDS, lock.DEAD_AFTER_SECONDS = 0.2, 2.0\n"


def start(sweep: Sweep, node: str) -> subprocess.Popen[bytes]:
    """Start the command as on a node."""
    site = sweep.results.parent / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(FAST)
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    return sweep.start(PYTHONPATH=path, SLURMD_NODENAME=node)


def check(sweep: Sweep, num_trials: int) -> None:
    """Every trial has one record, none was run to its end twice, and no record was put aside."""
    logs = "\n".join(map(sweep.log, range(len(sweep.processes))))
    ran = re.findall(r"^\[\d+/\d+\] (\w{12}) ", logs, re.MULTILINE)
    assert len(sweep.records()) == num_trials
    assert len(ran) == len(set(ran))
    assert set(ran) <= sweep.records().keys()
    assert not list(sweep.results.glob("*/*/set-aside/*"))


def test_the_second_is_refused_while_the_first_runs(new_sweep: Callable[..., Sweep]) -> None:
    sweep = new_sweep("world_size = 1\nseed = [0, 1]")
    first = start(sweep, "n1")
    (rank,) = stop_ranks(first, 1)  # so that the first one is still there, however slow the second one's start is
    assert start(sweep, "n2").wait(200) == 2
    assert "another fsdp-bench sweep is writing here (process" in sweep.log()
    assert "on n1); wait for it to end" in sweep.log()
    rank.resume()
    assert first.wait(200) == 0
    check(sweep, 2)
    assert start(sweep, "n2").wait(200) == 0  # it has ended, so nobody is waited for
    check(sweep, 2)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_managers_that_are_killed_and_replaced_at_any_time_lose_nothing(new_sweep: Callable[..., Sweep]) -> None:
    """As nodes do that lose their power: the next manager is on another one."""
    sweep, source = new_sweep(f"world_size = 1\nseed = {list(range(8))}"), random.Random("lock")
    for number in range(40):
        process = start(sweep, f"n{number % 3}")
        try:
            process.wait(source.uniform(1.0, 5.0) * (1 + number / 8))  # longer and longer: a busy machine starts late
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.returncode == 0:
            break
        assert process.returncode in (2, -signal.SIGKILL), sweep.log()
    check(sweep, 8)
