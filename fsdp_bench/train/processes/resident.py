"""A process that runs trials of one rank one after another, so that a GPU does not wait for processes to start.

Trials share imports, the CUDA context, loaded kernels and library handles. The rest is reset after each trial: the
process group, every tensor, the caching allocator's segments and counts, cuBLAS's workspaces, pinned host memory. If
anything is left over, or a trial fails, the process ends, and the next trial gets a new one. Host memory is measured
only in the first trial of a process, because a process does not return it to the system.

Protocol over two pipes, one line for each trial: the input is the command of the fork server, the output is ``0``.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TextIO

import torch

from fsdp_bench.spec.codec import from_json
from fsdp_bench.spec.record import TrialSpec
from fsdp_bench.train.processes.parent import die_with_parent

_CACHES = ("_cuda_clearCublasWorkspaces", "_host_emptyCache")
"""Functions of torch that free cuBLAS's workspaces and the cache of pinned host memory."""

_POLL_SECONDS = 0.1

Run = Callable[[dict[str, Any]], int]
"""Runs the trial of a command in this process; returns the exit status."""


class ResidentProcess:
    """The resident process, as the fork server sees it. It is forked when needed."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._pid: int | None = None
        self._commands: TextIO | None = None
        self._answers: TextIO | None = None

    def begin(self, command: dict[str, Any]) -> int:
        """Start a trial in the process; return the process ID, which is also its process group ID."""
        if self._pid is not None and _has_ended(self._pid):
            self._pid = None  # by somebody, between two trials
        if self._pid is None:
            self._fork()
        assert self._pid is not None
        assert self._commands is not None
        with contextlib.suppress(BrokenPipeError):  # it ends now, which end() sees
            self._commands.write(json.dumps(command) + "\n")
            self._commands.flush()
        return self._pid

    def end(self) -> int:
        """Wait for the end of the trial; return its status in the form of waitpid."""
        assert self._pid is not None
        assert self._answers is not None
        while True:
            # The pipe does not signal its death: a child of the trial may hold it open.
            ready, _, _ = select.select([self._answers], [], [], _POLL_SECONDS)
            if ready and self._answers.readline():
                return 0
            pid, status = os.waitpid(self._pid, 0 if ready else os.WNOHANG)
            if pid:
                self._pid = None
                return status

    def close(self) -> None:
        """End the process, if it runs, and wait for its end. Its GPU memory is then free."""
        for stream in (self._commands, self._answers):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        if self._pid is not None:
            os.waitpid(self._pid, 0)
        self._pid = self._commands = self._answers = None

    def _fork(self) -> None:
        self.close()
        server, (commands, to_child), (from_child, answers) = os.getpid(), os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            die_with_parent(server)
            os.close(to_child)
            os.close(from_child)
            _serve(os.fdopen(commands), os.fdopen(answers, "w"), self._run)
        os.close(commands)
        os.close(answers)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # both sides set it, so that neither has to wait for the other
        self._pid, self._commands, self._answers = pid, os.fdopen(to_child, "w"), os.fdopen(from_child)


def _has_ended(pid: int) -> bool:
    """Return whether a child process has ended, or is ending: a killed one takes until its threads are gone."""
    if os.waitpid(pid, os.WNOHANG) != (0, 0):
        return True
    with contextlib.suppress(OSError):  # where there is no /proc
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
            os.waitpid(pid, 0)
            return True
    return False


def _serve(commands: TextIO, answers: TextIO, run: Run) -> NoReturn:
    """Run a trial for each line, until one fails or cannot be reset; then exit with its status."""
    code = 1
    try:
        os.setpgid(0, 0)
        for line in commands:
            command = json.loads(line)
            with warnings.catch_warnings():
                code = run(command)
            if code != 0 or not _leaves_nothing(from_json(Path(command["trial"]).read_bytes(), TrialSpec)):
                break
            answers.write("0\n")
            answers.flush()
    finally:
        os._exit(code)  # no destructors: they would wait for peers that may be gone


def _leaves_nothing(spec: TrialSpec) -> bool:
    """Reset the state that a trial changed; return whether nothing of it is left."""
    if torch.distributed.is_initialized():
        return False
    gc.collect()  # wrapped models are cycles
    return spec.device != "cuda" or _reset_gpu()


def _reset_gpu() -> bool:
    torch.cuda.synchronize()
    for name in _CACHES:
        getattr(torch._C, name, int)()  # where a version lacks one, what it holds shows below
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_accumulated_memory_stats()  # num_alloc_retries and num_ooms among them
    return torch.cuda.memory_allocated() == 0 and torch.cuda.memory_reserved() == 0
