"""A process that ends when its parent does, however the parent ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PARENT_PID = "FSDP_BENCH_PARENT_PID"
"""The environment variable in which torchrun's ranks get its process number; every other process gets an argument."""

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Ask Linux to kill this process when its parent, process ``parent``, dies; elsewhere nothing is asked."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the request
            os._exit(1)
