"""A starter of a trial's ranks; it returns a Launched, which reports ended ranks, and can end all."""

import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from fsdp_bench.spec.errors import ExitCode, MachineError
from fsdp_bench.sweep.launchers.processes import node_environment


class RankExit(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one rank's process. ``rank`` is None if the launcher does not know which rank it is."""

    rank: int | None
    exit_code: int | None = None
    signal: int | None = None


def exit_of(rank: int | None, code: int) -> RankExit:
    """Make a RankExit of an exit code of subprocess, which is negative for a signal."""
    return RankExit(rank=rank, signal=-code) if code < 0 else RankExit(rank=rank, exit_code=code)


class LauncherError(Exception):
    """The launcher itself has ended, and the trial's ranks with it."""


class NodesLost(MachineError):
    """Nodes of a cluster on which no process can be started any more. That interrupts a sweep, which can be resumed."""

    exit_code = ExitCode.INTERRUPTED

    def __init__(self, nodes: Sequence[str], why: str = "") -> None:
        """``why`` is what the launcher's command printed, if anything."""
        self.nodes = tuple(nodes)
        self.why = why
        names = ", ".join(self.nodes)
        who = f"nodes {names} do" if len(self.nodes) > 1 else f"node {names} does"
        super().__init__(f"{who} not answer any more; run the same command on nodes that do, which resumes")


class Launched:
    """A trial whose ranks are running."""

    finished = False
    """Whether every rank has ended."""

    def wait(self, seconds: float) -> list[RankExit]:
        """Return the ranks that have ended since the last call; wait at most ``seconds`` for the first."""
        raise NotImplementedError

    def kill(self) -> None:
        """End every process of the trial now."""
        raise NotImplementedError

    def lost_nodes(self) -> tuple[str, ...]:
        """Return the nodes that were lost while the trial ran. Asked once, after a trial that failed."""
        return ()


class Launcher:
    """Starts trials one after another."""

    def start(self, trial: Path, scratch: Path, world_size: int) -> Launched:
        """Start a trial's ranks."""
        raise NotImplementedError

    def end_leftovers(self) -> None:
        """End processes that a trial that has ended left running."""
        raise NotImplementedError

    def close(self) -> None:
        """End all processes of the launcher."""
        self.end_leftovers()


class Cluster(Launcher):
    """Several nodes, all alike. Starts trials on as many as they fill; those that one node holds, on this one.

    Slurm ends what a trial left running on the other nodes, or the command there does.
    """

    def __init__(self, num_nodes: int, ranks_per_node: int) -> None:
        self.num_nodes = num_nodes
        self.ranks_per_node = ranks_per_node
        self._environment: dict[str, str] = {}
        """All variables of the ranks on several nodes."""

    def begin(self, local: Launcher, mark: str, environment: Mapping[str, str]) -> None:
        """Prepare for a sweep's trials; ``local`` starts those that one node is enough for.

        ``mark`` is the sweep's (processes.py), ``environment`` what ranks have beside this process's. Raises
        MachineError if a node is not there.
        """
        self._local, self._environment = local, node_environment(mark, environment)

    def start(self, trial: Path, scratch: Path, world_size: int) -> Launched:
        """Start a trial's ranks; errors as of ``spread``."""
        if world_size <= self.ranks_per_node:
            return self._local.start(trial, scratch, world_size)
        return self.spread(trial, scratch, world_size // self.ranks_per_node)

    def spread(self, trial: Path, scratch: Path, num_nodes: int) -> Launched:
        """Start a trial's ranks on several nodes."""
        raise NotImplementedError

    def end_leftovers(self) -> None:
        """End processes that a trial left running on this node."""
        self._local.end_leftovers()

    def close(self) -> None:
        """End all processes on this node."""
        self._local.close()


def signal_name(number: int) -> str:
    """Return the name of a signal. Real-time signals without a name are counted from SIGRTMIN."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}" if hasattr(signal, "SIGRTMIN") else f"signal {number}"
