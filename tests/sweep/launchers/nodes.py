"""The same sweep on several nodes, as processes of one machine."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.sweep.launchers.processes import free_port
from fsdp_bench.sweep.results.load import read_records
from tests.conftest import command


class Nodes:
    """Processes of the same command, each with an output of its own; they share the results folder."""

    def __init__(self, folder: Path, file: Path, num_nodes: int, ranks_per_node: int, host: str = "127.0.0.1") -> None:
        self.folder = folder
        words = ("sweep", file, "--nodes", num_nodes, "--ranks-per-node", ranks_per_node, "--no-charts")
        self._words = [*words, "--rdzv-endpoint", f"{host}:{free_port()}"]
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, *before: str, file: Path | None = None, **variables: str) -> subprocess.Popen[bytes]:
        """Start the command on the next node, with the words ``before`` before it."""
        number = len(self.processes)
        words = [file if file is not None and word == self._words[1] else word for word in self._words]
        with open(self._log(number), "wb") as log:
            process = subprocess.Popen(
                [*before, *command(*words, "--results", self.results)],
                stdout=log,
                stderr=log,
                env={**os.environ, **variables},
            )
        self.processes.append(process)
        if number == 0:
            self.wait_for(0, "waiting for")
        return process

    @property
    def results(self) -> Path:
        return self.folder / "results"

    def _log(self, number: int) -> Path:
        return self.folder / f"node-{number}.log"

    def log(self, number: int) -> str:
        return self._log(number).read_text()

    def wait_for(self, number: int, text: str, seconds: float = 200) -> None:
        """Wait until a node has printed something."""
        deadline = time.monotonic() + seconds
        while text not in self.log(number):
            assert time.monotonic() < deadline, self.log(number)
            assert self.processes[number].poll() is None, self.log(number)
            time.sleep(0.05)

    def wait(self) -> list[int]:
        """Wait for the ends; return the exit codes."""
        return [process.wait(300) for process in self.processes]

    def records(self) -> list[TrialRecord]:
        return list(read_records(self.results))

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
