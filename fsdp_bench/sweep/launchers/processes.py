"""Finds and ends the processes of a sweep by its mark, an environment variable that they inherit."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path

MARK = "FSDP_BENCH_SWEEP"
"""The environment variable with a sweep's mark: its folder. All processes that a rank starts inherit it."""

_PR_SET_PDEATHSIG = 1
_SECONDS_TO_END = 5.0
_SECONDS_TO_START = 0.1


def mark_of(folder: Path) -> str:
    """Return the mark of the sweep that writes to a folder."""
    return str(folder.resolve())


def pids_with(mark: str) -> list[int]:
    """Return the IDs of the processes with a mark, except this process. Without /proc, return none."""
    wanted, found = os.fsencode(f"{MARK}={mark}"), []
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) != os.getpid():
                with contextlib.suppress(OSError):  # another user's process, or one that has ended
                    if wanted in environment_of(Path("/proc", name)).split(b"\0"):
                        found.append(int(name))
    return found


def environment_of(process: Path) -> bytes:
    """Return a process's environment variables as /proc has them.

    They read as empty while the process starts a program: Linux sets `env_end` last in execve (fs/binfmt_elf.c). Kernel
    threads and ended processes have none either, but they have no program; so what has one is read again for a while.

    Raises:
        OSError: it has ended, or belongs to another user, or is a kernel thread.
    """
    deadline = time.monotonic() + _SECONDS_TO_START
    while not (variables := (process / "environ").read_bytes()) and time.monotonic() < deadline:
        (process / "exe").readlink()
        time.sleep(0.001)
    return variables


def end_marked(mark: str, keep: Collection[int] = ()) -> None:
    """Kill every process with a mark except those to keep, also stopped ones; wait until they are gone.

    This finds all processes that a rank started, also in other sessions or without a parent.
    """
    deadline = time.monotonic() + _SECONDS_TO_END
    while (leftovers := [pid for pid in pids_with(mark) if pid not in keep]) and time.monotonic() < deadline:
        for pid in leftovers:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def kill_group(pgid: int) -> None:
    """Kill every process of a process group, also stopped ones."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pgid, signal.SIGKILL)


def dying_with_this_process(by: signal.Signals = signal.SIGKILL) -> Callable[[], object] | None:
    """Return a preexec_fn with which a signal ends a new process when this one ends. None if this is not Linux."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up here: a forked process should do as little as it can
    return lambda: prctl(_PR_SET_PDEATHSIG, by)
