"""Processes of running sweeps, for tests that look at them or send them signals."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path
from typing import Any

import psutil


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
