"""Starts processes of a sweep: their environment, and that they end with this process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import IO

from fsdp_bench.spec.errors import MachineError
from fsdp_bench.sweep.launchers.processes import MARK, dying_with_this_process


def worker_environment(mark: str | None = None, beside: Mapping[str, str] = {}) -> dict[str, str]:
    """Return the environment of ranks: they listen on the loopback interface only, and start no threads on import.

    Args:
        mark: the mark of the sweep (processes.py), if the process belongs to one.
        beside: further variables, over those of this process.
    """
    environment = {**os.environ, **beside}
    if mark is not None:
        environment[MARK] = mark
    environment["PYTHONSAFEPATH"] = "1"  # python -m would import whatever lies in the current folder
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):  # all ranks are on this machine
        environment.setdefault(name, "lo" if sys.platform == "linux" else "lo0")
    environment.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy starts its threads on import
    environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    environment.setdefault("KINETO_LOG_LEVEL", "5")
    # torch.cuda.is_available() then asks NVML and does not start CUDA, which no forked process could use.
    environment.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    environment["PYTHONUNBUFFERED"] = "1"
    return environment


def start_process(
    command: list[str], mark: str, pipes: int, log: IO[bytes], environment: Mapping[str, str] = {}
) -> subprocess.Popen[bytes]:
    """Start a Python module in a session of its own, so that Ctrl-C at the terminal reaches only its parent.

    Args:
        command: the module and its arguments; the process ID of this process is passed between them.
        mark: the mark of the sweep (processes.py).
        pipes: subprocess.PIPE for its input and output; subprocess.DEVNULL for no input, and output to the log.
        log: the file for what it prints.
        environment: variables over those of this process.

    Raises:
        MachineError: if no process can be started.
    """
    module, *arguments = command
    try:
        return subprocess.Popen(
            [sys.executable, "-m", module, str(os.getpid()), *arguments],
            stdin=pipes,
            stdout=subprocess.PIPE if pipes == subprocess.PIPE else log,
            stderr=log,
            env=worker_environment(mark, environment),
            start_new_session=True,
            preexec_fn=dying_with_this_process(),
        )
    except OSError as error:
        raise MachineError(f"no process can be started: {error.strerror or error}; the same command resumes") from None
