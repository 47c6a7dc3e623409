"""Trials on this machine: a process that imports torch once forks their ranks, or a new torchrun starts each one."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from fsdp_bench.spec.errors import MachineError
from fsdp_bench.sweep.launchers import processes
from fsdp_bench.sweep.launchers.launcher import Launched, Launcher, LauncherError, RankExit, exit_of, signal_name

SERVER_START_SECONDS = 120.0
"""The time that the server may take to start: importing torch from a cold network file system can take a minute."""


class ForkServer(Launcher):
    """One server process for a whole sweep, started again if it ended; torchrun where forking is unsafe."""

    def __init__(self, log: Path, mark: str, environment: Mapping[str, str] = {}) -> None:
        """``environment`` is what the ranks' environment has beside this process's."""
        self._log = log
        self._mark = mark
        self._environment = environment
        self._unsafe: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""

    def start(self, trial: Path, scratch: Path, world_size: int) -> Launched:
        """Have the server fork ranks.

        Raises LauncherError if it does not answer, MachineError if it does not start.
        """
        if self._unsafe is None and (self._process is None or self._process.poll() is not None):
            self._spawn()
        if self._unsafe is not None:
            return Torchrun(self._mark, self._environment).start(trial, scratch, world_size)
        assert self._process is not None
        assert self._process.stdin is not None
        command = {"trial": str(trial), "scratch": str(scratch), "world_size": world_size}
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise LauncherError(f"the fork server is gone: {error}") from error
        started = self.expect("started", 30.0)
        return ForkedTrial(self, int(started["pgid"]))  # type: ignore[call-overload]

    def _spawn(self) -> None:
        self._buffer = b""
        with open(self._log, "ab") as log:
            command = ["fsdp_bench.train.processes.server"]
            self._process = processes.start_process(
                command, subprocess.PIPE, log, processes.worker_environment(self._mark, self._environment)
            )
        try:
            unsafe = self.expect("ready", SERVER_START_SECONDS)["unsafe"]
        except LauncherError as error:  # no trial has anything to do with it
            self.close()
            printed = " ".join(processes.last_lines(self._log, 1)) or "it printed nothing"
            raise MachineError(f"the process that starts the ranks did not start: {error}: {printed}") from None
        if unsafe is not None:
            self._unsafe = str(unsafe)
            self.close()

    def expect(self, event: str, seconds: float) -> dict[str, object]:
        """Return the next event, which must be ``event``. Raises LauncherError if it does not come."""
        for message in self.events(seconds):
            if message["event"] == event:
                return message
        self.close()
        raise LauncherError(f"the fork server did not say {event!r} within {seconds:g} s")

    def events(self, seconds: float) -> Iterator[dict[str, object]]:
        """Yield the server's events until none comes for ``seconds``. Raises LauncherError if the server has ended."""
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
        """End the server and all processes that ranks left running."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
            self._process = None
        processes.end_marked(self._mark)

    def end_leftovers(self) -> None:
        """End processes that a trial that has ended left running."""
        processes.end_marked(self._mark, [] if self._process is None else [self._process.pid])


class ForkedTrial(Launched):
    """A trial that the fork server runs."""

    def __init__(self, server: ForkServer, pgid: int) -> None:
        self._server = server
        self._pgid = pgid

    def wait(self, seconds: float) -> list[RankExit]:
        """Return the ranks that have ended, as the server reports them."""
        for message in self._server.events(seconds):
            if message["event"] == "ended":
                self.finished = True
                return []
            status = int(message["status"])  # type: ignore[call-overload]
            rank = int(message["rank"])  # type: ignore[call-overload]
            return [exit_of(rank, os.waitstatus_to_exitcode(status))]
        return []

    def kill(self) -> None:
        """End the ranks' process group. If the server then does not report their end, end it too."""
        processes.kill_group(self._pgid)
        deadline = time.monotonic() + 10
        while not self.finished and time.monotonic() < deadline:
            try:
                self.wait(0.5)
            except LauncherError:
                self.finished = True
        if not self.finished:
            self._server.close()
            self.finished = True


class Torchrun(Launcher):
    """Starts every trial with a new torchrun, so that each trial imports torch again and trials share nothing."""

    def __init__(self, mark: str, environment: Mapping[str, str] = {}) -> None:
        self._mark = mark
        self._environment = environment

    def start(self, trial: Path, scratch: Path, world_size: int) -> TorchrunTrial:
        """Start torchrun in a session of its own."""
        command = [processes.TORCHRUN, str(trial), str(scratch), f"--ranks-per-node={world_size}"]
        with open(scratch / "rank-0.log", "ab") as log:
            variables = processes.worker_environment(self._mark, self._environment)
            return TorchrunTrial(processes.start_process(command, subprocess.DEVNULL, log, variables))

    def end_leftovers(self) -> None:
        """End processes that a trial that has ended left running."""
        processes.end_marked(self._mark)


class TorchrunTrial(Launched):
    """A trial that torchrun runs. torchrun ends all ranks if one fails, and has one exit code for all."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

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
        processes.kill_group(self._process.pid)
        self._process.wait()
        self.finished = True
