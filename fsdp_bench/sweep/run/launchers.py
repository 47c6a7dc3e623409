"""Launchers, which start a trial's ranks: the interface, and torchrun. fork_server.py is the other launcher.

A launcher returns a Launched, which reports the ranks that have ended, and can end all of them.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Protocol

import msgspec
import psutil

from fsdp_bench.spec.errors import MachineError
from fsdp_bench.sweep.run.processes import MARK, dying_with_this_process, end_marked, kill_group


class RankExit(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one rank's process. ``rank`` is None if the launcher does not know which rank it is."""

    rank: int | None
    exit_code: int | None = None
    signal: int | None = None


def exit_of(rank: int | None, code: int) -> RankExit:
    """Make a RankExit of an exit code of subprocess, which is negative for a signal."""
    return RankExit(rank=rank, signal=-code) if code < 0 else RankExit(rank=rank, exit_code=code)


class LauncherError(Exception):
    """The launcher itself has ended, and the trial's ranks with it."""


class Launched(Protocol):
    """A trial whose ranks are running."""

    def wait(self, seconds: float) -> list[RankExit]:
        """Return the ranks that have ended since the last call; wait at most ``seconds`` for the first."""

    @property
    def finished(self) -> bool:
        """Whether every rank has ended."""

    def kill(self) -> None:
        """End every process of the trial now."""


class Launcher(Protocol):
    """Starts trials one after another."""

    def start(self, trial: Path, scratch: Path, world_size: int, may_share_process: bool) -> Launched:
        """Start a trial's ranks. With ``may_share_process`` the trial may run in one process with other trials."""

    @property
    def num_waiting(self) -> int:
        """The number of processes that wait for the next trial."""

    def end_leftovers(self) -> None:
        """End processes that a trial that has ended left running."""

    def close(self) -> None:
        """End all processes of the launcher."""


def worker_environment(mark: str | None = None, beside: Mapping[str, str] = {}) -> dict[str, str]:
    """Return the environment of ranks: they listen on the loopback interface only, and start no threads on import.

    Args:
        mark: the mark of the sweep (processes.py), if the process belongs to one.
        beside: further variables, over those of this process.
    """
    environment = {**os.environ, **beside}
    if mark is not None:
        environment[MARK] = mark
    environment["PYTHONSAFEPATH"] = "1"  # python -m would import whatever lies in the current folder
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):  # all ranks are on this machine
        environment.setdefault(name, "lo" if sys.platform == "linux" else "lo0")
    environment.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy starts its threads on import
    environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    environment.setdefault("KINETO_LOG_LEVEL", "5")
    # torch.cuda.is_available() then asks NVML and does not start CUDA, which no forked process could use.
    environment.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    environment["PYTHONUNBUFFERED"] = "1"
    return environment


class Torchrun:
    """Starts every trial with a new torchrun, so that each trial imports torch again and trials share nothing."""

    num_waiting = 0

    def __init__(self, mark: str, environment: Mapping[str, str] = {}) -> None:
        self._mark = mark
        self._environment = environment

    def start(self, trial: Path, scratch: Path, world_size: int, may_share_process: bool) -> TorchrunTrial:
        """Start torchrun in a session of its own."""
        command = ["fsdp_bench.train.processes.torchrun", str(scratch), f"--nproc-per-node={world_size}"]
        command += [
            "--log-dir",
            str(scratch),
            "-m",
            "fsdp_bench.train.processes.torchrun_rank",
            str(trial),
            str(scratch),
        ]
        with open(scratch / "rank-0.log", "ab") as log:
            return TorchrunTrial(start_process(command, self._mark, subprocess.DEVNULL, log, self._environment))

    def end_leftovers(self) -> None:
        """End processes that a trial that has ended left running."""
        end_marked(self._mark)

    def close(self) -> None:
        """End processes that are left. torchrun itself is not kept running."""
        end_marked(self._mark)


def start_process(
    command: list[str], mark: str, pipes: int, log: IO[bytes], environment: Mapping[str, str] = {}
) -> subprocess.Popen[bytes]:
    """Start a Python module in a session of its own, so that Ctrl-C at the terminal reaches only its parent.

    Args:
        command: the module and its arguments; the process ID of this process is passed between them.
        mark: the mark of the sweep (processes.py).
        pipes: subprocess.PIPE for its input and output; subprocess.DEVNULL for no input, and output to the log.
        log: the file for what it prints.
        environment: variables over those of this process.

    Raises:
        MachineError: if no process can be started.
    """
    module, *arguments = command
    try:
        return subprocess.Popen(
            [sys.executable, "-m", module, str(os.getpid()), *arguments],
            stdin=pipes,
            stdout=subprocess.PIPE if pipes == subprocess.PIPE else log,
            stderr=log,
            env=worker_environment(mark, environment),
            start_new_session=True,
            preexec_fn=dying_with_this_process(),
        )
    except OSError as error:
        raise MachineError(f"no process can be started: {error.strerror or error}; the same command resumes") from None


class TorchrunTrial:
    """A trial that torchrun runs. torchrun ends all ranks if one fails, and has one exit code for all."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.finished = False

    def wait(self, seconds: float) -> list[RankExit]:
        """Return the end of torchrun, which does not say which rank failed."""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return []
        self.finished = True
        return [exit_of(None, code)]

    def kill(self) -> None:
        """End torchrun and its ranks, each of which has a process group of its own."""
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self._process.pid).children(recursive=True):
                child.kill()
        kill_group(self._process.pid)
        self._process.wait()
        self.finished = True
