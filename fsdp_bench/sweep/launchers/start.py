"""Starts processes of a sweep: their environment, and that they end with this process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import IO

from fsdp_bench.spec.errors import MachineError
from fsdp_bench.spec.subprocesses.own_python import own_environment, own_python
from fsdp_bench.sweep.launchers.processes import MARK, dying_with_this_process

NODE = "fsdp_bench.train.processes.node"
"""The module that runs a trial's ranks on one of several nodes."""


def worker_environment(mark: str | None = None, beside: Mapping[str, str] = {}) -> dict[str, str]:
    """Return the environment of ranks that are all on this machine: they listen on the loopback interface only.

    Args:
        mark: the mark of the sweep (processes.py), if the process belongs to one.
        beside: further variables, over those of this process.
    """
    environment = node_environment(mark, beside)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        environment.setdefault(name, "lo" if sys.platform == "linux" else "lo0")
    return environment


def node_environment(mark: str | None = None, beside: Mapping[str, str] = {}) -> dict[str, str]:
    """Return the environment of ranks on several nodes: they start no threads on import. Arguments as above."""
    environment = own_environment(beside)
    if mark is not None:
        environment[MARK] = mark
    return environment


def node_options(endpoint: str, num_nodes: int, ranks_per_node: int, run_id: str) -> tuple[str, ...]:
    """Return the options of NODE that all nodes of a trial have alike."""
    counts = (f"--num-nodes={num_nodes}", f"--ranks-per-node={ranks_per_node}")
    return (f"--endpoint={endpoint}", *counts, f"--run-id={run_id}")


def start_process(
    command: list[str], pipes: int, log: IO[bytes], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a Python module in a session of its own, so that Ctrl-C at the terminal reaches only its parent.

    Args:
        command: the module and its arguments; the process ID of this process is passed between them.
        pipes: subprocess.PIPE for its input and output; subprocess.DEVNULL for no input, and output to the log.
        log: the file for what it prints.
        environment: all its variables.

    Raises:
        MachineError: if no process can be started.
    """
    module, *arguments = command
    try:
        return subprocess.Popen(
            own_python(module, str(os.getpid()), *arguments),
            stdin=pipes,
            stdout=subprocess.PIPE if pipes == subprocess.PIPE else log,
            stderr=log,
            env=dict(environment),
            start_new_session=True,
            preexec_fn=dying_with_this_process(),
        )
    except OSError as error:
        raise MachineError(f"no process can be started: {error.strerror or error}; the same command resumes") from None


def free_port() -> int:
    """Return a port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
