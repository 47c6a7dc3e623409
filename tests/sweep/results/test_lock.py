"""Two managers on one results folder, on one node or on two, with and without a flock that spans nodes."""

from __future__ import annotations

import errno
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fsdp_bench.spec.errors import ResultsError
from fsdp_bench.sweep.results import lock
from fsdp_bench.sweep.results.lock import FolderLock


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(lock, "DEAD_AFTER_SECONDS", 0.6)


@pytest.fixture
def without_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system as Lustre is when it is mounted without -o flock."""

    def refuse(*_arguments: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refuse)


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


@pytest.mark.usefixtures("without_flock")
def test_a_living_writer_on_another_node_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (on_node(tmp_path, name, monkeypatch) for name in ("n1", "n2"))
    first.take()
    with pytest.raises(ResultsError, match=r"is writing here \(process \d+ on n1\); wait for it to end"):
        second.take()
    assert first.lost() is None
    first.give_back()
    second.take()
    second.give_back()


@pytest.mark.usefixtures("without_flock")
def test_without_flock_a_living_writer_on_the_same_node_is_not_replaced_either(tmp_path: Path) -> None:
    """With flock, who gets it knows that the last writer of this node has ended; without, signs of life tell."""
    first = FolderLock(tmp_path)
    first.take()
    with pytest.raises(ResultsError, match="is writing here"):
        FolderLock(tmp_path).take()
    assert first.lost() is None
    first.give_back()


@pytest.mark.usefixtures("without_flock")
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


@pytest.mark.usefixtures("without_flock")
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
@pytest.mark.parametrize("flock", ["with flock", "without flock"])
def test_of_many_that_start_together_one_writes(
    leaves: str, flock: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if flock == "without flock":
        request.getfixturevalue("without_flock")
    dead = on_node(tmp_path, "n0", monkeypatch)
    if leaves == "a dead writer":
        dead.take()
        stop_beating(dead)
        dead._lock.close()  # as the kernel does
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
