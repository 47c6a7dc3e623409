"""A sweep's processes: starts, finds and ends them by a mark, an inherited variable; limits and reads logs."""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import IO

from fsdp_bench.spec.errors import MachineError
from fsdp_bench.spec.subprocesses.own_python import own_environment, own_python

MARK = "FSDP_BENCH_SWEEP"
"""The environment variable with a sweep's mark: its folder."""

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

    Raises OSError: it has ended, or belongs to another user, or is a kernel thread.
    """
    deadline = time.monotonic() + _SECONDS_TO_START
    while not (variables := (process / "environ").read_bytes()) and time.monotonic() < deadline:
        (process / "exe").readlink()
        time.sleep(0.001)
    return variables


def end_marked(mark: str, keep: Collection[int] = ()) -> None:
    """Kill all processes with a mark but those to keep, whatever their session or parent; wait for their end."""
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


TORCHRUN = "fsdp_bench.train.processes.torchrun"
"""The module that runs a trial's ranks under torchrun, on one node or on each of several."""


def worker_environment(mark: str | None = None, beside: Mapping[str, str] = {}) -> dict[str, str]:
    """Return the environment of ranks that are all on this machine: they listen on the loopback interface only.

    ``mark`` is the sweep's, if the process belongs to one; ``beside`` are further variables, over those of this
    process.
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
    """Return the options of TORCHRUN that all nodes of a trial have alike."""
    counts = (f"--num-nodes={num_nodes}", f"--ranks-per-node={ranks_per_node}")
    return (f"--endpoint={endpoint}", *counts, f"--run-id={run_id}")


def start_process(
    command: list[str], pipes: int, log: IO[bytes], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a Python module in a session of its own, so that Ctrl-C at the terminal reaches only its parent.

    This process's ID goes between the module and its arguments. ``pipes``: subprocess.PIPE, or DEVNULL for no input,
    and output to ``log``. ``environment`` has all variables. Raises MachineError if it cannot be started.
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


MOST_LOG_BYTES = 16 * 1024**2
"""A log that grows beyond this while a trial runs is cut to its last TAIL_BYTES."""
TAIL_BYTES = 64 * 1024
MOST_LINE_CHARACTERS = 500


def last_lines(path: Path, count: int) -> list[str]:
    """Return the last lines of a log, long lines shortened. Without a log, return no lines."""
    try:
        with open(path, "rb") as file:
            return last_lines_of(file, count)
    except OSError:
        return []


def last_lines_of(file: IO[bytes], count: int) -> list[str]:
    """Return the last lines of an open log, long lines shortened."""
    lines = _tail(file).decode(errors="replace").strip().splitlines()[-count:]
    return [line if len(line) <= MOST_LINE_CHARACTERS else line[:MOST_LINE_CHARACTERS] + " [...]" for line in lines]


def cut_down(folder: Path) -> None:
    """Cut each log of a folder that is too large to its last part. Ranks append, so they go on writing after it."""
    with contextlib.suppress(OSError):
        for path in folder.glob("*.log"):
            if path.stat().st_size > MOST_LOG_BYTES:
                with open(path, "a+b") as file:
                    tail = _tail(file)
                    os.truncate(path, 0)
                    file.write(b"[what came before was too much to keep]\n" + tail)


def _tail(file: IO[bytes]) -> bytes:
    file.seek(max(os.fstat(file.fileno()).st_size - TAIL_BYTES, 0))
    return file.read(TAIL_BYTES)
