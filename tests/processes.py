"""Processes of running sweeps, for tests that look at them or send them signals."""

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.conftest import command, run_command


class Sweep:
    """One sweep in processes of its own: the same command over and over, or on several nodes."""

    def __init__(self, file: Path, results: Path, *options: object) -> None:
        self.results = results
        self._file, self._options = file, options
        self.processes: list[subprocess.Popen[bytes]] = []

    def _words(self, file: Path | None = None) -> tuple[object, ...]:
        return ("sweep", file or self._file, "--results", self.results, "--no-charts", *self._options)

    def start(self, *before: str, file: Path | None = None, **environment: str) -> subprocess.Popen[bytes]:
        """Start the command, perhaps with another file, with the words ``before`` before it."""
        with open(self._log(len(self.processes)), "wb") as log:
            process = subprocess.Popen(
                [*before, *command(*self._words(file))],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **environment},
                start_new_session=True,
                preexec_fn=start_as_a_terminal_does,
            )
        self.processes.append(process)
        return process

    def run(self, *words: object) -> subprocess.CompletedProcess[str]:
        """Run the command to its end in this process."""
        return run_command(*self._words(), *words)

    def _log(self, number: int) -> Path:
        return self.results.parent / f"process-{number}.log"

    def log(self, number: int = -1) -> str:
        """Return what a process has printed, by default the last one."""
        return self._log(range(len(self.processes))[number]).read_text(errors="replace")

    def records(self) -> dict[str, bytes]:
        return {path.stem: path.read_bytes() for path in self.results.glob("*/*/trials/*.json")}

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def wait_until(
    condition: Callable[[], Any], process: subprocess.Popen[bytes] | None = None, seconds: float = 200
) -> Any:
    """Return what a condition returns once it is true; before that a process must not end, and time not run out."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"did not happen within {seconds:g} s"
        assert process is None or process.poll() is None, "the process has ended"
        time.sleep(0.05)
    return found


def wait_for_ranks(manager: subprocess.Popen[bytes], count: int) -> list[psutil.Process]:
    """Wait until so many ranks of a trial run."""
    return wait_until(lambda: len(ranks := ranks_of(manager)) >= count and ranks, manager)


def stop_ranks(manager: subprocess.Popen[bytes], count: int) -> list[psutil.Process]:
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


def wait_until_gone(processes: list[psutil.Process]) -> None:
    wait_until(
        lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in processes), None, 15
    )


def processes_with(variable: str, value: str) -> list[psutil.Process]:
    """Return the living processes whose environment's variable holds a text, whosoever children they are by now."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            is_one = process.pid != os.getpid() and value in process.environ().get(variable, "")
            if is_one and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def children_of(process: Any) -> list[psutil.Process]:
    """Return the children of a process of psutil's or subprocess's; psutil looks at every process of the machine."""
    found = []
    with contextlib.suppress(OSError, psutil.Error):
        for task in Path(f"/proc/{process.pid}/task").iterdir():
            found += [psutil.Process(int(word)) for word in (task / "children").read_text().split()]
    return found


def ranks_of(manager: Any) -> list[psutil.Process]:
    """Return the ranks of the trial that a manager runs: its children start them."""
    return [rank for child in children_of(manager) for rank in children_of(child)]


def listens_for_interrupts(pid: int) -> bool:
    """Whether the command handles SIGTERM; before that Python is starting, and nothing of the package runs."""
    with contextlib.suppress(OSError):
        caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        return bool(caught) and bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)
    return False


def start_as_a_terminal_does() -> None:
    """A shell's background jobs, and so their tests, start with SIGINT ignored."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
