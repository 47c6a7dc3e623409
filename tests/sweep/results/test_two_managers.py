"""Two managers on one results folder, on one node or on two: no trial runs twice, and no record is lost."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp_bench.sweep.results.load import read_records
from tests.conftest import command, write_tiny_sweep
from tests.sweep.run.test_survival import stop_ranks

pytestmark = pytest.mark.timeout(600)

WITHOUT_FLOCK = """
import errno, fcntl, os

def flock(*arguments):
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

fcntl.flock = flock
"""
"""A sitecustomize.py with which a process sees a file system as Lustre is without -o flock."""

FAST = "from fsdp_bench.sweep.results import lock\nlock.BEAT_SECONDS, lock.DEAD_AFTER_SECONDS = 0.2, 2.0\n"

FLOCK = ["with flock", "without flock"]


class Managers:
    """Processes of the same command, of two nodes."""

    def __init__(self, folder: Path, has_flock: bool, num_trials: int) -> None:
        self._folder = folder
        self._num_trials = num_trials
        (folder / "site").mkdir()
        (folder / "site" / "sitecustomize.py").write_text(("" if has_flock else WITHOUT_FLOCK) + FAST)
        self._path = os.pathsep.join([str(folder / "site"), os.environ.get("PYTHONPATH", "")])
        self._file = write_tiny_sweep(folder, f"world_size = 1\nseed = {list(range(num_trials))}")
        self.results = folder / "results"
        self._logs: list[Path] = []
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, node: str) -> subprocess.Popen[bytes]:
        self._logs.append(self._folder / f"{len(self._logs)}.log")
        with open(self._logs[-1], "wb") as log:
            process = subprocess.Popen(
                command("sweep", self._file, "--results", self.results, "--no-charts"),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": self._path, "SLURMD_NODENAME": node},
            )
        self._processes.append(process)
        return process

    @property
    def logs(self) -> list[str]:
        return [path.read_text() for path in self._logs]

    def num_records(self) -> int:
        return len(list(self.results.glob("*/*/trials/*.json")))

    def check(self) -> None:
        """Every trial has one record, was run to its end once, and no record was put aside."""
        ran = re.findall(r"^\[\d+/\d+\] (\w{12}) ", "\n".join(self.logs), re.MULTILINE)
        recorded = [record.id for record in read_records(self.results)]
        assert len(recorded) == self._num_trials
        assert len(ran) == len(set(ran))
        assert set(ran) <= set(recorded)
        assert not list(self.results.glob("*/*/set-aside/*"))

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()


@pytest.fixture
def managers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Managers]:
    has_flock, num_trials = request.param
    managers = Managers(tmp_path, has_flock, num_trials)
    yield managers
    managers.end()


@pytest.mark.parametrize(
    "managers", [(True, 2), pytest.param((False, 2), marks=pytest.mark.slow)], ids=FLOCK, indirect=True
)
def test_the_second_is_refused_while_the_first_runs(managers: Managers) -> None:
    first = managers.start("n1")
    (rank,) = stop_ranks(first, 1)  # so that the first one is still there, however slow the second one's start is
    second = managers.start("n2")
    assert second.wait(200) == 2
    assert "another fsdp-bench sweep is writing here (process" in managers.logs[1]
    assert "on n1); wait for it to end" in managers.logs[1]
    rank.resume()
    assert first.wait(200) == 0
    managers.check()
    assert managers.start("n2").wait(200) == 0  # it has ended, so nobody is waited for
    managers.check()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("managers", [(True, 8), (False, 8)], ids=FLOCK, indirect=True)
def test_managers_that_are_killed_and_replaced_at_any_time_lose_nothing(managers: Managers) -> None:
    """As nodes do that lose their power: the next manager is on another one."""
    source = random.Random(managers.results.name)
    for number in range(40):
        process = managers.start(f"n{number % 3}")
        try:
            process.wait(source.uniform(1.0, 5.0) * (1 + number / 8))  # longer and longer: a busy machine starts late
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
        if process.returncode == 0:
            break
        assert process.returncode in (2, -signal.SIGKILL), managers.logs[-1]
    assert managers.num_records() == 8
    ran = re.findall(r"^\[\d+/\d+\] (\w{12}) ", "\n".join(managers.logs), re.MULTILINE)
    assert len(ran) == len(set(ran))
