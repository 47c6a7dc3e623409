"""Starts a module of this package in this Python: its command, its environment, and ask(), which awaits an answer."""

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from fsdp_bench.spec.codec import to_builtins

T = TypeVar("T")


def own_python(module: str, *arguments: str) -> list[str]:
    """Return ``python -m module``; -P keeps it from importing files of the current folder, such as random.py."""
    return [sys.executable, "-P", "-m", module, *arguments]


def own_environment(beside: Mapping[str, str] = {}) -> dict[str, str]:
    """Return the environment of such a process: it starts no threads on import, and no CUDA.

    ``beside`` are further variables, over those of this process.
    """
    environment = {**os.environ, **beside}
    environment["PYTHONSAFEPATH"] = "1"  # python -m would import whatever lies in the current folder
    environment.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy starts its threads on import
    environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    environment.setdefault("KINETO_LOG_LEVEL", "5")
    # torch.cuda.is_available() then asks NVML and does not start CUDA, which no forked process could use.
    environment.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    environment["PYTHONUNBUFFERED"] = "1"
    return environment


class NoAnswer(Exception):
    """A process gave no answer. The message is the last line that it printed, or how it ended."""


def ask(module: str, answer: type[T], *arguments: str, request: Any = None, timeout: float | None = None) -> T:
    """Run a module to its end; return its answer, the last line of its output. Request and answer are JSON.

    Raises:
        NoAnswer: if it ends without one, or takes longer than ``timeout`` seconds.
    """
    data, command = msgspec.json.encode(to_builtins(request)), own_python(module, *arguments)
    try:
        done = subprocess.run(command, input=data, capture_output=True, env=own_environment(), timeout=timeout)
        return msgspec.json.decode(done.stdout.strip().rpartition(b"\n")[2], type=answer)
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"no answer within {timeout:g} s") from None
    except msgspec.DecodeError:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise NoAnswer(last[0]) from None
