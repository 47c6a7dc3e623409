"""How a trial's ranks are started: forked from a server that has torch imported, or by torchrun.

Both give a Launched: something that tells which ranks ended and how, and that can be ended whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Protocol

import msgspec
import psutil

from fsdp_bench.spec.errors import MachineError
from fsdp_bench.sweep.run.logs import last_lines
from fsdp_bench.sweep.run.outcome import signal_name
from fsdp_bench.sweep.run.processes import MARK, dying_with_this_process, end_marked, kill_group

SERVER_START_SECONDS = 120.0
"""Importing torch from a cold network file system can take a minute."""


class RankExit(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's process ended; ``rank`` is None when the launcher cannot tell ranks apart."""

    rank: int | None
    exit_code: int | None = None
    signal: int | None = None


def _rank_exit(rank: int | None, code: int) -> RankExit:
    """Read an exit code as subprocess has it: negative for a signal."""
    return RankExit(rank=rank, signal=-code) if code < 0 else RankExit(rank=rank, exit_code=code)


class LauncherError(Exception):
    """The launcher itself ended; the trial's ranks have ended with it."""


class Launched(Protocol):
    """A trial whose ranks are running."""

    def wait(self, seconds: float) -> list[RankExit]:
        """Return the ranks that ended, waiting at most ``seconds`` for the first."""

    @property
    def finished(self) -> bool:
        """Whether every rank has ended."""

    def kill(self) -> None:
        """End every process of the trial now."""


class Launcher(Protocol):
    """Starts trials one after another."""

    def start(self, trial: Path, scratch: Path, world_size: int, may_share: bool) -> Launched:
        """Start a trial's ranks; ``may_share`` a process with trials before and after it."""

    @property
    def num_waiting(self) -> int:
        """Processes of workers that wait for the next trial."""

    def end_leftovers(self) -> None:
        """End what the ranks of a trial that has ended left running."""

    def close(self) -> None:
        """End whatever the launcher keeps running."""


def worker_environment(mark: str | None = None) -> dict[str, str]:
    """Return the environment of workers: they listen on the loopback interface only; no threads before a fork.

    Args:
        mark: the sweep's, where the process belongs to one.
    """
    environment = dict(os.environ)
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


class ForkServer:
    """One server process for a whole sweep; started again when it has ended.

    Where the server finds that forking is not safe, trials go through torchrun instead. With ``resident``, trials of
    one rank share a process as long as each leaves it as it found it.
    """

    def __init__(self, log: Path, mark: str, resident: bool = False) -> None:
        self._log = log
        self._mark = mark
        self._resident = resident
        self._shared: int | None = None
        self._unsafe: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""

    def start(self, trial: Path, scratch: Path, world_size: int, may_share: bool) -> Launched:
        """Have the server fork a trial's ranks.

        Raises:
            LauncherError: when the server does not answer.
            MachineError: when it does not start.
        """
        if self._unsafe is None and (self._process is None or self._process.poll() is not None):
            self._spawn()
        if self._unsafe is not None:
            return Torchrun(self._mark).start(trial, scratch, world_size, may_share)
        assert self._process is not None
        assert self._process.stdin is not None
        shares = self._resident and may_share and world_size == 1
        command = {"trial": str(trial), "scratch": str(scratch), "world_size": world_size, "resident": shares}
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise LauncherError(f"the fork server is gone: {error}") from error
        started = self.expect("started", 30.0)
        self._shared = int(started["pgid"]) if shares else None  # type: ignore[call-overload]
        return ForkedTrial(self, int(started["pgid"]))  # type: ignore[call-overload]

    @property
    def num_waiting(self) -> int:
        """One, where the process that ran the last trial is there for the next one."""
        with contextlib.suppress(psutil.Error):
            return int(self._shared is not None and psutil.Process(self._shared).status() != psutil.STATUS_ZOMBIE)
        return 0

    def _spawn(self) -> None:
        self._buffer = b""
        with open(self._log, "ab") as log:
            self._process = _start_process(["fsdp_bench.train.processes.server"], self._mark, subprocess.PIPE, log)
        try:
            unsafe = self.expect("ready", SERVER_START_SECONDS)["unsafe"]
        except LauncherError as error:  # no trial has anything to do with it
            self.close()
            words = " ".join(last_lines(self._log, 1)) or "it printed nothing"
            raise MachineError(f"the process that starts the ranks did not start: {error}: {words}") from None
        if unsafe is not None:
            self._unsafe = str(unsafe)
            self.close()

    def expect(self, event: str, seconds: float) -> dict[str, object]:
        """Return the next event, which must be ``event``.

        Raises:
            LauncherError: when it does not come.
        """
        for message in self.events(seconds):
            if message["event"] == event:
                return message
        self.close()
        raise LauncherError(f"the fork server did not say {event!r} within {seconds:g} s")

    def events(self, seconds: float) -> Iterator[dict[str, object]]:
        """Yield the server's events until none comes for ``seconds``.

        Raises:
            LauncherError: when the server has ended.
        """
        deadline = time.monotonic() + seconds
        while True:
            line, newline, rest = self._buffer.partition(b"\n")
            if newline:
                self._buffer = rest
                yield json.loads(line)
                continue
            if self._process is None or self._process.stdout is None:
                raise LauncherError("the fork server is not running")
            descriptor = self._process.stdout.fileno()
            ready, _, _ = select.select([descriptor], [], [], max(deadline - time.monotonic(), 0))
            if not ready:
                return
            chunk = os.read(descriptor, 65536)
            if not chunk:
                code = self._process.wait()
                how = f"was ended by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
                raise LauncherError(f"the fork server {how}")
            self._buffer += chunk

    def close(self) -> None:
        """End the server, and with it any process that a rank has left."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
            self._process = self._shared = None
        end_marked(self._mark)

    def end_leftovers(self) -> None:
        """End what the ranks of a trial that has ended left running."""
        kept = [] if self._process is None else [self._process.pid]
        end_marked(self._mark, kept if self._shared is None else [*kept, self._shared])


class ForkedTrial:
    """A trial that the fork server runs."""

    def __init__(self, server: ForkServer, pgid: int) -> None:
        self._server = server
        self._pgid = pgid
        self.finished = False

    def wait(self, seconds: float) -> list[RankExit]:
        """Return the ranks that the server saw end."""
        for message in self._server.events(seconds):
            if message["event"] == "ended":
                self.finished = True
                return []
            status = int(message["status"])  # type: ignore[call-overload]
            rank = int(message["rank"])  # type: ignore[call-overload]
            return [_rank_exit(rank, os.waitstatus_to_exitcode(status))]
        return []

    def kill(self) -> None:
        """End the ranks' process group; a server that then says nothing is ended too."""
        kill_group(self._pgid)
        deadline = time.monotonic() + 10
        while not self.finished and time.monotonic() < deadline:
            try:
                self.wait(0.5)
            except LauncherError:
                self.finished = True
        if not self.finished:
            self._server.close()
            self.finished = True


class Torchrun:
    """A fresh torchrun for every trial: slower by the import of torch, and shared with nothing."""

    num_waiting = 0

    def __init__(self, mark: str) -> None:
        self._mark = mark

    def start(self, trial: Path, scratch: Path, world_size: int, may_share: bool) -> TorchrunTrial:
        """Start torchrun in a session of its own."""
        words = ["fsdp_bench.train.processes.torchrun", str(scratch), f"--nproc-per-node={world_size}"]
        words += ["--log-dir", str(scratch), "-m", "fsdp_bench.train.processes.torchrun_rank", str(trial), str(scratch)]
        with open(scratch / "rank-0.log", "ab") as log:
            return TorchrunTrial(_start_process(words, self._mark, subprocess.DEVNULL, log))

    def end_leftovers(self) -> None:
        """End what the ranks of a trial that has ended left running."""
        end_marked(self._mark)

    def close(self) -> None:
        """End what is left; nothing is kept running."""
        end_marked(self._mark)


def _start_process(words: list[str], mark: str, pipes: int, log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a module of Python in a session of its own: an interrupt at the terminal is the manager's alone.

    Args:
        words: the module and its arguments; between them it is given this process's number.
        mark: the sweep's.
        pipes: subprocess.PIPE for its input and output; subprocess.DEVNULL for no input, and output to the log.
        log: what it prints goes there.

    Raises:
        MachineError: when no process can be started.
    """
    module, *arguments = words
    try:
        return subprocess.Popen(
            [sys.executable, "-m", module, str(os.getpid()), *arguments],
            stdin=pipes,
            stdout=subprocess.PIPE if pipes == subprocess.PIPE else log,
            stderr=log,
            env=worker_environment(mark),
            start_new_session=True,
            preexec_fn=dying_with_this_process(),
        )
    except OSError as error:
        raise MachineError(f"no process can be started: {error.strerror or error}; the same command resumes") from None


class TorchrunTrial:
    """A trial that torchrun runs: it ends the other ranks when one fails, and tells one exit code for all."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.finished = False

    def wait(self, seconds: float) -> list[RankExit]:
        """Return torchrun's own end as that of no rank in particular."""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return []
        self.finished = True
        return [_rank_exit(None, code)]

    def kill(self) -> None:
        """End torchrun's session, whose ranks each have a group of their own."""
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self._process.pid).children(recursive=True):
                child.kill()
        kill_group(self._process.pid)
        self._process.wait()
        self.finished = True
