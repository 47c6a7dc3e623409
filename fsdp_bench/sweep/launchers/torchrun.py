"""torchrun on this machine alone: a new one for every trial."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Mapping
from pathlib import Path

import psutil

from fsdp_bench.sweep.launchers.launcher import RankExit, exit_of
from fsdp_bench.sweep.launchers.processes import end_marked, kill_group
from fsdp_bench.sweep.launchers.start import start_process, worker_environment


class Torchrun:
    """Starts every trial with a new torchrun, so that each trial imports torch again and trials share nothing."""

    def __init__(self, mark: str, environment: Mapping[str, str] = {}) -> None:
        self._mark = mark
        self._environment = environment

    def start(self, trial: Path, scratch: Path, world_size: int) -> TorchrunTrial:
        """Start torchrun in a session of its own."""
        command = ["fsdp_bench.train.processes.torchrun", str(scratch), f"--nproc-per-node={world_size}"]
        command += [
            "--log-dir",
            str(scratch),
            "-m",
            "fsdp_bench.train.processes.torchrun_rank",
            str(trial),
            str(scratch),
        ]
        with open(scratch / "rank-0.log", "ab") as log:
            variables = worker_environment(self._mark, self._environment)
            return TorchrunTrial(start_process(command, subprocess.DEVNULL, log, variables))

    def end_leftovers(self) -> None:
        """End processes that a trial that has ended left running."""
        end_marked(self._mark)

    def close(self) -> None:
        """End processes that are left. torchrun itself is not kept running."""
        end_marked(self._mark)


class TorchrunTrial:
    """A trial that torchrun runs. torchrun ends all ranks if one fails, and has one exit code for all."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.finished = False

    def wait(self, seconds: float) -> list[RankExit]:
        """Return the end of torchrun, which does not say which rank failed."""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return []
        self.finished = True
        return [exit_of(None, code)]

    def kill(self) -> None:
        """End torchrun and its ranks, each of which has a process group of its own."""
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self._process.pid).children(recursive=True):
                child.kill()
        kill_group(self._process.pid)
        self._process.wait()
        self.finished = True

    def lost_nodes(self) -> tuple[str, ...]:
        """Return nothing: all ranks were on this node."""
        return ()
