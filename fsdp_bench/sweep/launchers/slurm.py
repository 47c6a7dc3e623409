"""Slurm: the job that this process runs in, and trials on its nodes, by srun: one torchrun on each.

Everything is asked of Slurm's own commands, squeue, scontrol and srun: a MachineError says where one is not installed,
fails or does not answer. A trial whose ranks fit on one node runs on the head node, as it would without Slurm.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from fsdp_bench.spec.errors import MachineError
from fsdp_bench.spec.subprocesses.own_python import own_python
from fsdp_bench.sweep.launchers.launcher import Cluster, Launcher, NodesLost, RankExit
from fsdp_bench.sweep.launchers.one_node import TorchrunTrial
from fsdp_bench.sweep.launchers.processes import TORCHRUN, dying_with_this_process, free_port, node_options

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
        """Start ranks by srun. Raises NodesLost if a node starts nothing, MachineError if Slurm does not answer."""
        if not self._is_checked:
            self.check()
        nodes = self.job.nodes[:num_nodes]
        self._address = self._address or self.job.head_address()
        command = [
            *srun(nodes),
            *own_python(TORCHRUN, "0", str(trial), str(scratch)),
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
        """Check that every node starts processes. Raises NodesLost, naming those that do not."""
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


# -- the job -----------------------------------------------------------------------------------------------------------


_ANSWER_SECONDS = 60
"""The time that a command of Slurm's may take: a busy controller is slow."""
_ATTEMPTS, _SECONDS_BETWEEN_ATTEMPTS = 5, 10
"""The number of times that a job asks the controller, which may restart, before it gives up."""
_OPTIONS_OF_THE_JOB = (
    *("SLURM_CPU_BIND", "SLURM_CPU_BIND_LIST", "SLURM_CPU_BIND_TYPE", "SLURM_CPU_BIND_VERBOSE", "SLURM_GPU_BIND"),
    *("SLURM_GPUS", "SLURM_GPUS_PER_TASK", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_CPUS_PER_TASK", "SLURM_EXPORT_ENV"),
)
"""Variables that sbatch sets, and that srun reads as its options."""
_PROBE_SECONDS = 30
"""The time that a node may take to start a process that does nothing."""


class SlurmJob:
    """A job's allocation, seen from a process in it."""

    def __init__(self, job_id: str, nodes: Sequence[str], restarts: int = 0) -> None:
        self.id = job_id
        self.nodes = tuple(nodes)
        """The names of its nodes when it started. The first is the head node, which this process runs on."""
        self.why_lost = ""
        """The last line that srun printed where it could not start a process."""
        self.restarts = restarts
        """The number of times that it was put back into the queue."""

    def left(self) -> tuple[str, ...]:
        """Return the nodes that the job still has. Slurm takes those away that do not answer (``--no-kill``)."""
        listed = ask("squeue", "--noheader", f"--jobs={self.id}", "--format=%N", attempts=_ATTEMPTS).strip()
        return expand(listed) if listed else ()

    def lost(self) -> tuple[str, ...]:
        """Return the nodes on which no process can be started any more; takes a second if there are none."""
        left = set(self.left())
        if left.issuperset(self.nodes) and self._starts(self.nodes):
            return ()
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda node: node in left and self._starts([node]), self.nodes))
        return tuple(node for node, answers_ in zip(self.nodes, answers, strict=True) if not answers_)

    def _starts(self, nodes: Sequence[str]) -> bool:
        command, variables = [*srun(nodes), "true"], srun_environment(os.environ)
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_PROBE_SECONDS, env=variables, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            self.why_lost = " ".join(str(error).split())
            return False
        self.why_lost = (done.stderr.strip().splitlines() or [""])[-1]
        return done.returncode == 0

    def head_address(self) -> str:
        """Return the name or address by which the other nodes reach the head node (NodeAddr in slurm.conf)."""
        found = re.search(r"\bNodeAddr=(\S+)", ask("scontrol", "show", "node", self.nodes[0], "--oneliner"))
        return found[1] if found else self.nodes[0]

    def requeue(self) -> None:
        """Put the job back into the queue, which ends this process's job step."""
        ask("scontrol", "requeue", self.id, attempts=_ATTEMPTS)


def current_job() -> SlurmJob:
    """Return this process's job. Raises MachineError if there is none, or Slurm does not answer."""
    job_id, listed = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_JOB_NODELIST")
    if not job_id or not listed:
        raise MachineError(
            "--slurm: this is no job of Slurm (SLURM_JOB_ID is not set); use it in a batch script or in salloc, or have"
            " the script written: fsdp-bench submit"
        )
    restarts, nodes = os.environ.get("SLURM_RESTART_COUNT", "0"), expand(listed)
    here = os.environ.get("SLURMD_NODENAME")
    if here != nodes[0]:
        raise MachineError(
            f"--slurm: run this on the job's first node, {nodes[0]}, and not on {here or 'a login node'}:"
            f" srun --overlap --nodes=1 --ntasks=1 --nodelist={nodes[0]} --pty bash"
        )
    return SlurmJob(job_id, nodes, int(restarts) if restarts.isdigit() else 0)


class JobState(msgspec.Struct, frozen=True, kw_only=True):
    """A job as squeue shows it."""

    id: str
    state: str
    """RUNNING, PENDING and so on."""
    reason: str
    """Why it waits: Resources, Priority; the text ``None`` if it runs."""
    nodes: str
    seconds_left: float | None
    """The seconds until its time limit. None if it has none."""
    restarts: int
    """The number of times that it was put back into the queue."""


def job_state(job_id: str) -> JobState | None:
    """Return the state of a job; None if it has ended."""
    listed = ask("squeue", "--noheader", "--me", "--format=%i|%T|%r|%N|%L")  # with --jobs an ended one is an error
    for line in listed.splitlines():
        number, state, reason, nodes, left = line.split("|")
        if number == job_id:
            found = re.search(r"\bRestarts=(\d+)", ask("scontrol", "show", "job", job_id))
            restarts = int(found[1]) if found else 0
            return JobState(
                id=job_id, state=state, reason=reason, nodes=nodes, seconds_left=seconds_of(left), restarts=restarts
            )
    return None


def seconds_of(text: str) -> float | None:
    """Read a time as Slurm writes it: MM, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS. None for other words."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+(?::\d+){0,2})", text.strip(), re.ASCII)
    if found is None:
        return None
    days, clock = found[1], list(map(int, found[2].split(":")))
    if days is None and len(clock) < 3:
        clock = [0, *clock]  # it begins with minutes
    hours, minutes, seconds = (*clock, 0, 0)[:3]
    return float(((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds)


def expand(listed: str) -> tuple[str, ...]:
    """Return the names in a list of Slurm's, such as ``n[1-4]``."""
    return tuple(ask("scontrol", "show", "hostnames", listed).split())


def ask(*command: str, attempts: int = 1) -> str:
    """Run a Slurm command, several ``attempts`` if a controller restarts. Raises MachineError if it fails."""
    if attempts > 1:
        try:
            return ask(*command)
        except MachineError:
            time.sleep(_SECONDS_BETWEEN_ATTEMPTS)
            return ask(*command, attempts=attempts - 1)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=False)
    except FileNotFoundError:
        raise MachineError(f"{command[0]} is not installed here; this needs Slurm's commands in PATH") from None
    except subprocess.TimeoutExpired:
        raise MachineError(f"{command[0]} did not answer within {_ANSWER_SECONDS} s: is slurmctld up?") from None
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise MachineError(f"{' '.join(command[:2])}: {said}")
    return done.stdout


def srun(nodes: Sequence[str]) -> list[str]:
    """Return the beginning of a command that starts one process on each node, whatever else the job runs there."""
    counts = (f"--nodelist={','.join(nodes)}", f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}")
    alike = "--export=ALL --cpu-bind=none --ntasks-per-node=1 --overlap --kill-on-bad-exit=1 --mpi=none --input=none"
    return ["srun", *counts, *alike.split(), "--quiet"]


def srun_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for srun without the job's options, which would hold for one process on a node too."""
    return {name: value for name, value in variables.items() if name not in _OPTIONS_OF_THE_JOB}
