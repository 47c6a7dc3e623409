"""The processes of a sweep: the mark by which they are found, and how all of them are ended."""

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
"""The environment variable that names the sweep's folder. Whatever a rank starts inherits it, in any session."""

_PR_SET_PDEATHSIG = 1
_SECONDS_TO_END = 5.0


def mark_of(folder: Path) -> str:
    """Return the mark of the sweep that writes to a folder."""
    return str(folder.resolve())


def marked(mark: str) -> list[int]:
    """Return the processes that have a mark, but for this one; none where there is no /proc."""
    wanted, found = os.fsencode(f"{MARK}={mark}"), []
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) != os.getpid():
                with contextlib.suppress(OSError):  # somebody else's, or it has ended
                    if wanted in Path("/proc", name, "environ").read_bytes().split(b"\0"):
                        found.append(int(name))
    return found


def end_marked(mark: str, keep: Collection[int] = ()) -> None:
    """End every process that has a mark, but for some, and wait until they are gone; stopped ones too.

    This ends what a rank left behind: in its process group, in a session of its own, or after its parent's death.
    """
    deadline = time.monotonic() + _SECONDS_TO_END
    while (leftovers := [pid for pid in marked(mark) if pid not in keep]) and time.monotonic() < deadline:
        for pid in leftovers:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def kill_group(pgid: int) -> None:
    """End every process of a process group; stopped ones too."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pgid, signal.SIGKILL)


def dying_with_this_process() -> Callable[[], object] | None:
    """Return what a new process calls before its program starts, so that it ends when this one does; on Linux only."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up here: a forked process should do as little as it can
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
