"""Trials on several nodes without Slurm: the same command runs on each of them, one torchrun a trial on each.

The first node, the one that the rendezvous endpoint names, decides what runs and keeps the results. The others connect
to it, start their ranks when they are told to, and send it what the ranks wrote, so that no shared file system is
needed.
"""

from __future__ import annotations

import contextlib
import platform
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import wait as wait_for_any
from pathlib import Path
from typing import Any

from fsdp_bench.spec.errors import MachineError
from fsdp_bench.sweep.launchers.channel import Channel, accept, connect
from fsdp_bench.sweep.launchers.launcher import Launched, Launcher, NodesLost, RankExit, exit_of
from fsdp_bench.sweep.launchers.logs import cut_down
from fsdp_bench.sweep.launchers.processes import end_marked
from fsdp_bench.sweep.launchers.start import NODE, free_port, node_environment, start_process
from fsdp_bench.sweep.launchers.torchrun import TorchrunTrial

JOIN_SECONDS = 600.0
"""The time that nodes wait for each other at the beginning."""
_SECONDS_TO_END = 20.0
"""The time that another node may take to end its ranks and send what they wrote."""
_POLL_SECONDS = 0.2

Say = Callable[[str], None]


def node_command(trial: Path, scratch: Path, node_rank: int, order: Mapping[str, Any]) -> list[str]:
    """Return the module that runs a trial's ranks on one node, and its arguments but the first."""
    names = ("endpoint", "num_nodes", "ranks_per_node", "run_id")
    options = [f"--{name.replace('_', '-')}={order[name]}" for name in names]
    return [NODE, str(trial), str(scratch), *options, f"--node-rank={node_rank}", f"--node-name={order['node']}"]


class TorchrunCluster:
    """The nodes on which the same command was started, as the first of them sees them."""

    def __init__(self, server: socket.socket, host: str, num_nodes: int, ranks_per_node: int, key: bytes, say: Say):
        """Prepare to wait for the others.

        Args:
            server: listens at the rendezvous endpoint.
            host: of the rendezvous endpoint.
            num_nodes: of all, with this one.
            ranks_per_node: of a trial.
            key: of the sweep (channel.py).
            say: prints a line.
        """
        self.num_nodes = num_nodes
        self.ranks_per_node = ranks_per_node
        self._server, self._host, self._key, self._say = server, host, key, say
        self._others: list[Channel] = []

    def launcher(self, local: Launcher, mark: str, environment: Mapping[str, str]) -> Launcher:
        """Wait for the other nodes; return a launcher that spreads trials over all.

        Raises:
            MachineError: if they do not come.
        """
        deadline, refused = time.monotonic() + JOIN_SECONDS, set[str]()
        while len(self._others) < self.num_nodes - 1:
            missing = self.num_nodes - 1 - len(self._others)
            if not self._others and not refused:
                self._say(f"waiting for {missing} more node{'s' * (missing > 1)}: run the same command there")
            found = accept(self._server, self._key, max(deadline - time.monotonic(), 0.01))
            if found is None:
                raise MachineError(
                    f"{missing} of {self.num_nodes} nodes did not join within {JOIN_SECONDS:g} s; run the same command"
                    " on each node, and see that they reach this one's port"
                )
            if isinstance(found, str):
                if found not in refused:
                    self._say(
                        f"a node at {found} was refused: it runs another sweep file or version, or has another key"
                    )
                refused.add(found)
                continue
            self._greet(found)
        self._server.close()
        address = self._others[0].own_address if self._others else self._host
        return TorchrunNodes(self._others, address, self.ranks_per_node, local, mark, environment)

    def _greet(self, channel: Channel) -> None:
        try:
            channel.node = str(channel.receive()["node"])
        except (OSError, EOFError, KeyError, ValueError):
            channel.close()
            return
        if channel.node in {platform.node(), *(other.node for other in self._others)}:
            channel.node += f"-{len(self._others) + 1}"  # several on one host, as in tests
        self._others.append(channel)
        self._say(f"node {channel.node} has joined")


class TorchrunNodes:
    """Starts trials on as many nodes as they fill, with this one as the first."""

    def __init__(
        self,
        others: list[Channel],
        host: str,
        ranks_per_node: int,
        local: Launcher,
        mark: str,
        environment: Mapping[str, str],
    ) -> None:
        """``local`` starts trials that one node is enough for."""
        self._others = others
        self._host = host
        self._ranks_per_node = ranks_per_node
        self._local = local
        self._mark = mark
        self._environment = environment

    def start(self, trial: Path, scratch: Path, world_size: int, may_share_process: bool) -> Launched:
        """Start a trial's ranks on all nodes that it fills.

        Raises:
            NodesLost: if a node has gone.
            MachineError: if no process can be started.
        """
        if world_size <= self._ranks_per_node:
            return self._local.start(trial, scratch, world_size, may_share_process)
        if self._local.num_waiting:
            self._local.close()  # a process that waits for the next trial keeps its memory on a GPU
        num_nodes = world_size // self._ranks_per_node
        order = {
            "endpoint": f"{self._host}:{free_port()}",
            "num_nodes": num_nodes,
            "ranks_per_node": self._ranks_per_node,
            "run_id": scratch.name,
        }
        others = self._others[: num_nodes - 1]
        for node_rank, other in enumerate(others, 1):
            try:
                other.send(run=order, node_rank=node_rank, name=other.node, trial=trial.read_text())
            except OSError:
                raise NodesLost([other.node]) from None
        command = node_command(trial, scratch, 0, {**order, "node": platform.node()})
        with open(scratch / "rank-0.log", "ab") as log:
            variables = node_environment(self._mark, self._environment)
            own = TorchrunTrial(start_process(command, subprocess.DEVNULL, log, variables))
        return TrialOnNodes(own, others, scratch)

    @property
    def num_waiting(self) -> int:
        """The number of processes that wait for the next trial."""
        return self._local.num_waiting

    def end_leftovers(self) -> None:
        """End processes that a trial left running on this node; the others do it themselves."""
        self._local.end_leftovers()

    def close(self) -> None:
        """End all processes, and the commands on the other nodes."""
        for other in self._others:
            with contextlib.suppress(OSError):
                other.send(end=True)
            other.close()
        self._local.close()


class TrialOnNodes:
    """A trial that runs on this node and on others."""

    def __init__(self, own: TorchrunTrial, others: list[Channel], scratch: Path) -> None:
        self._own = own
        self._running = list(others)
        self._scratch = scratch
        self._lost: list[str] = []
        self._has_failed = False

    @property
    def finished(self) -> bool:
        """Whether the ranks on all nodes have ended, and what they wrote is here."""
        return self._own.finished and not self._running

    def wait(self, seconds: float) -> list[RankExit]:
        """Return the end of the trial on a node that has failed, or on the last node."""
        deadline, exits = time.monotonic() + seconds, list[RankExit]()
        while not exits and not self.finished and time.monotonic() < deadline:
            if not self._own.finished:
                exits += self._own.wait(_POLL_SECONDS if not self._running else 0.02)
            exits += [exit_of(None, code) for code in self._messages(_POLL_SECONDS)]
        failed = [one for one in exits if one.exit_code != 0]
        if failed and not self._has_failed:
            self._has_failed = True
            return failed[:1]
        return exits[:1] if self.finished and not self._has_failed else []

    def _messages(self, seconds: float) -> list[int]:
        """Read what other nodes have sent; return the exit codes of those that have ended."""
        codes = []
        by_connection: dict[Any, Channel] = {other.connection: other for other in self._running}
        for connection in wait_for_any(list(by_connection), seconds) if by_connection else []:
            other = by_connection[connection]
            try:
                message = other.receive()
                if "file" in message:
                    other.receive_file(self._scratch, message)
                elif message.get("ended") == self._scratch.name:
                    codes.append(int(message["code"]))
                    self._running.remove(other)
            except (OSError, EOFError):
                self._lost.append(other.node)
                self._running.remove(other)
                codes.append(1)
        return codes

    def kill(self) -> None:
        """End the ranks on all nodes; fetch what those of others wrote."""
        for other in self._running:
            with contextlib.suppress(OSError):
                other.send(kill=True)
        if not self._own.finished:
            self._own.kill()
        deadline = time.monotonic() + _SECONDS_TO_END
        while self._running and time.monotonic() < deadline:
            self._messages(_POLL_SECONDS)
        self._lost += [other.node for other in self._running]
        self._running = []

    def lost_nodes(self) -> tuple[str, ...]:
        """Return the nodes whose connection was lost."""
        return tuple(self._lost)


class OtherNode:
    """This node, if it is not the first: it runs what the first one says."""

    def __init__(self, host: str, port: int, key: bytes, say: Say) -> None:
        self._host, self._port, self._key, self._say = host, port, key, say

    def serve(self) -> None:
        """Run trials until the first node has no more.

        Raises:
            MachineError: if the first node cannot be reached, or is lost.
        """
        self._say(f"waiting for the first node, {self._host}:{self._port}")
        channel = connect(self._host, self._port, self._key, JOIN_SECONDS)
        folder = Path(tempfile.mkdtemp(prefix="fsdp-bench-"))
        try:
            channel.send(node=platform.node())
            while True:
                message = channel.receive()
                if "end" in message:
                    return
                if "run" in message:
                    self._run(channel, folder, message)
        except (OSError, EOFError):
            raise MachineError(
                f"the first node, {self._host}, is gone; run the same command on each node, which resumes"
            ) from None
        finally:
            channel.close()
            end_marked(str(folder))
            shutil.rmtree(folder, ignore_errors=True)

    def _run(self, channel: Channel, folder: Path, message: dict[str, Any]) -> None:
        """Run this node's ranks of a trial; send what they wrote, and how they ended."""
        order = message["run"]
        scratch = folder / Path(str(order["run_id"])).name
        scratch.mkdir()
        trial = scratch / "trial.json"
        trial.write_text(message["trial"])
        self._say(f"trial {scratch.name}")
        command = node_command(trial, scratch, int(message["node_rank"]), {**order, "node": message["name"]})
        log_path = scratch / f"{message['name']}.log"
        with open(log_path, "ab") as log:
            own = TorchrunTrial(start_process(command, subprocess.DEVNULL, log, node_environment(str(folder))))
        code, sent = 1, dict[str, bytes]()
        try:
            while not own.finished:
                for end in own.wait(_POLL_SECONDS):
                    code = end.exit_code if end.exit_code is not None else 1
                cut_down(scratch)
                _send_stages(channel, scratch, sent)
                if channel.connection.poll() and not {"kill", "end"}.isdisjoint(channel.receive()):
                    break
        finally:
            if not own.finished:
                own.kill()
            end_marked(str(folder))
        channel.send_files(sorted(path for path in scratch.iterdir() if path.is_file() and path != trial))
        channel.send(ended=scratch.name, code=code)
        shutil.rmtree(scratch, ignore_errors=True)


def _send_stages(channel: Channel, scratch: Path, sent: dict[str, bytes]) -> None:
    """Send in which stage each rank is, and on which node, if that has changed; it is told if this node dies."""
    for path in sorted((*scratch.glob("rank-*.node"), *scratch.glob("rank-*.phase"))):
        content = path.read_bytes()
        if sent.get(path.name) != content:
            sent[path.name] = content
            channel.send_files([path])
