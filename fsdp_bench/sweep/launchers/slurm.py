"""Trials on the nodes of a Slurm job: by srun, one torchrun on each node, which meet on the head node.

A trial whose ranks fit on one node runs on the head node, as it would without Slurm.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

from fsdp_bench.spec.errors import MachineError
from fsdp_bench.spec.subprocesses.own_python import own_python
from fsdp_bench.sweep.launchers.launcher import Cluster, Launcher, NodesLost, RankExit
from fsdp_bench.sweep.launchers.one_node import TorchrunTrial
from fsdp_bench.sweep.launchers.processes import (
    NODE,
    dying_with_this_process,
    free_port,
    node_options,
)
from fsdp_bench.sweep.launchers.slurm_job import SlurmJob, srun, srun_environment

_SECONDS_TO_END = 30.0
"""The time that srun may take to end the processes on all nodes."""


class SlurmNodes(Cluster):
    """The nodes of a job."""

    def __init__(self, job: SlurmJob, ranks_per_node: int) -> None:
        super().__init__(len(job.nodes), ranks_per_node)
        self.job = job
        self._address: str | None = None
        self._is_checked = False

    def begin(self, local: Launcher, mark: str, environment: Mapping[str, str]) -> None:
        """Prepare for a sweep's trials. The nodes are checked before the first that needs several."""
        super().begin(local, mark, environment)
        self._environment = srun_environment(self._environment)

    def spread(self, trial: Path, scratch: Path, num_nodes: int) -> SlurmTrial:
        """Start a trial's ranks by srun.

        Raises:
            NodesLost: if processes cannot be started on a node.
            MachineError: if Slurm does not answer.
        """
        if not self._is_checked:
            self.check()
        nodes = self.job.nodes[:num_nodes]
        self._address = self._address or self.job.head_address()
        command = [
            *srun(nodes),
            *own_python(NODE, "0", str(trial), str(scratch)),
            *node_options(f"{self._address}:{free_port()}", num_nodes, self.ranks_per_node, scratch.name),
        ]
        self._is_checked = False  # until the trial has ended well
        try:
            with open(scratch / "rank-0.log", "ab") as log:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=self._environment,
                    start_new_session=True,
                    preexec_fn=dying_with_this_process(signal.SIGTERM),
                )
        except OSError as error:
            raise MachineError(f"srun cannot be started: {error.strerror or error}") from None
        return SlurmTrial(process, self)

    def check(self) -> None:
        """Check that processes can be started on every node.

        Raises:
            NodesLost: naming the nodes on which they cannot.
        """
        lost = self.job.lost()
        if lost:
            raise NodesLost(lost, self.job.why_lost)
        self._is_checked = True

    def ended_well(self) -> None:
        """Note that a trial has used the nodes, so that they need no check."""
        self._is_checked = True


class SlurmTrial(TorchrunTrial):
    """A trial that srun runs."""

    def __init__(self, process: subprocess.Popen[bytes], nodes: SlurmNodes) -> None:
        super().__init__(process)
        self._nodes = nodes

    def wait(self, seconds: float) -> list[RankExit]:
        """Return the end of srun, which does not say which rank failed."""
        ended, code = super().wait(seconds), self._process.returncode
        if code == 0:
            self._nodes.ended_well()
        if ended and code >= 128:  # by srun that is a signal of some task, not a rank's
            return [RankExit(rank=None, exit_code=1)]
        return ended

    def kill(self) -> None:
        """End the job step: srun passes SIGTERM on to Slurm, which kills the step's processes on all nodes."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_SECONDS_TO_END)
                break
        self.finished = True

    def lost_nodes(self) -> tuple[str, ...]:
        """Return the nodes that were lost while the trial ran."""
        try:
            self._nodes.check()
        except NodesLost as lost:
            return lost.nodes
        except MachineError:  # Slurm does not answer, which the next trial will say
            pass
        return ()
