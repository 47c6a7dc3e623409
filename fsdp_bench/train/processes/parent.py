"""Makes a process end when its parent ends, however the parent ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PARENT_PID = "FSDP_BENCH_PARENT_PID"
"""The environment variable with torchrun's process ID, for its ranks. Other processes get the ID as an argument."""

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Ask Linux to kill this process when its parent, process ``parent``, dies. On other systems do nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the request
            os._exit(1)
