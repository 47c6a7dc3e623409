"""A process that ends when its parent does, however the parent ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

AGENT = "FSDP_BENCH_AGENT"
"""The environment variable with the process number of torchrun's agent, for its workers."""

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Ask Linux to kill this process when its parent, process ``parent``, dies; elsewhere nothing is asked."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the request
            os._exit(1)
