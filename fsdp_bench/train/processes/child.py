"""A process that fsdp-bench starts: it ends when its parent ends, however that ends, and answers with JSON."""

import ctypes
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import TextIO, TypeVar

from fsdp_bench.spec.errors import FsdpBenchError

Answer = TypeVar("Answer")

PARENT_PID = "FSDP_BENCH_PARENT_PID"
"""The environment variable with torchrun's process ID, for its ranks. Other processes get the ID as an argument."""

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Ask Linux to kill this process when its parent, process ``parent``, dies. On other systems do nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the request
            os._exit(1)


def answers_only() -> TextIO:
    """Return standard output, for the answers of this process; all that others print goes to standard error.

    Python warns of nothing. The process ends with the one that its first argument names, if there is one.
    """
    if len(sys.argv) > 1:
        die_with_parent(int(sys.argv[1]))
    out, sys.stdout = sys.stdout, sys.stderr
    warnings.simplefilter("ignore")
    return out


def answered(kind: Callable[..., Answer], compute: Callable[[], Answer]) -> Answer:
    """Return an answer, or one with the error: the user's mistake, or with its traceback on standard error."""
    try:
        return compute()
    except FsdpBenchError as error:
        return kind(error=" ".join(str(error).split()))
    except Exception as error:
        traceback.print_exc()
        text = " ".join(str(error).split())[:400]
        return kind(error=f"{type(error).__name__}: {text}", users_mistake=False)
