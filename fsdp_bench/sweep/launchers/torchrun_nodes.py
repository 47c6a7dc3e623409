"""Trials on several nodes without Slurm: the same command runs on each of them, one torchrun a trial on each.

The nodes share the results folder, and meet in a folder of it::

    .nodes-HOST:PORT/
        .writer.N     the first node, the one that the rendezvous endpoint names (results/lock.py)
        order.json    the trial that it has all nodes run
        ID.json       another node, and how its last torchrun ended
        ID/.writer.1  its sign of life

The ranks write into the trial's scratch folder.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from fsdp_bench.spec.errors import MachineError, ResultsError
from fsdp_bench.spec.files import write_atomically
from fsdp_bench.sweep.launchers.launcher import Cluster, Launched, Launcher, NodesLost, RankExit, exit_of
from fsdp_bench.sweep.launchers.one_node import TorchrunTrial
from fsdp_bench.sweep.launchers.processes import TORCHRUN, end_marked, node_environment, node_options, start_process
from fsdp_bench.sweep.results.lock import FolderLock, LockHolder, last_writer, node_name, seems_to_live
from fsdp_bench.version import __version__

JOIN_SECONDS = 600.0
"""The time that nodes wait for each other at the beginning."""
_SECONDS_TO_END = 20.0
"""The time that another node may take to end its ranks."""
_POLL_SECONDS = 0.3

Say = Callable[[str], None]
T = TypeVar("T")


class NodeTask(msgspec.Struct, frozen=True, kw_only=True):
    """The task of all nodes, as the first one sets it: nothing, or a trial."""

    sweep: str
    """The Meeting's."""
    number: int = 0
    """The trial's number, which no later run of the first node's command repeats."""
    trial: str = ""
    """The path of its trial.json in its scratch folder, from the results folder. Empty: end it."""
    options: tuple[str, ...] = ()
    """The options of train/processes/torchrun.py that are the same on all nodes."""
    nodes: dict[str, str] = {}
    """The IDs of its nodes in the order of their ranks, and their names. The first node's ID is empty."""


class OtherNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node that takes part and is not the first."""

    name: str
    sweep: str
    """The Meeting's."""
    done: int = 0
    """The number of the last order that has ended."""
    code: int = 0
    """The exit code of torchrun then."""


class Meeting:
    """The folder in which the nodes of a sweep meet."""

    def __init__(self, results: Path, endpoint: str, sweep_file: Path, say: Say) -> None:
        """``say`` prints a line. Raises MachineError if the sweep file cannot be read."""
        self.results, self.endpoint, self.say = results.absolute(), endpoint, say
        self.folder = self.results / f".nodes-{endpoint}"
        self._owner: int | None = None
        """The user whose files are read: others who may write here would otherwise start trials as this one."""
        try:
            self.sweep = hashlib.sha256(__version__.encode() + b"\0" + sweep_file.read_bytes()).hexdigest()
            """The digest of all that has to be the same on all nodes."""
        except OSError as error:
            raise MachineError(f"{sweep_file}: {error.strerror}") from None

    def join(self, node_id: str) -> FolderLock:
        """Begin to give signs of life: as the node with an ID, or without one as the first node.

        Raises ResultsError if the folder cannot be written, or another process is the first node.
        """
        lock = FolderLock(self.folder / node_id)
        try:
            (self.folder / node_id).mkdir(parents=True, exist_ok=True)
            lock.take()
            self.write(
                OtherNode(name=node_name(), sweep=self.sweep) if node_id else NodeTask(sweep=self.sweep), node_id
            )
            self._owner = self._path(node_id).stat().st_uid  # as the file server sees this process
        except OSError as error:
            raise ResultsError(f"{self.folder}: cannot be written: {error.strerror or error}") from None
        return lock

    def writer(self, node_id: str = "") -> LockHolder | None:
        """Return the last sign of life of a node, of the first one without an ID; None if there is none."""
        return last_writer(self.folder / node_id)

    def lives(self, node_id: str = "") -> bool:
        """Return whether a node gives signs of life."""
        return (writer := self.writer(node_id)) is not None and seems_to_live(self.folder / node_id, writer)

    def write(self, content: NodeTask | OtherNode, node_id: str = "") -> None:
        """Write the order, or what a node with an ID says. Raises OSError if it cannot be written."""
        write_atomically(self._path(node_id), msgspec.json.encode(content))

    def read(self, kind: type[T], node_id: str = "") -> T | None:
        """Return what ``write`` has written; None if there is nothing, or another user wrote it."""
        with contextlib.suppress(OSError, msgspec.DecodeError), open(self._path(node_id), "rb") as file:
            if os.fstat(file.fileno()).st_uid == self._owner:
                return msgspec.json.decode(file.read(), type=kind)
        return None

    def _path(self, node_id: str) -> Path:
        return self.folder / f"{node_id or 'order'}.json"

    def run(self, order: NodeTask, node_id: str, environment: Mapping[str, str]) -> TorchrunTrial:
        """Start the torchrun of a node."""
        trial, rank, name = self.results / order.trial, list(order.nodes).index(node_id), order.nodes[node_id]
        words = [TORCHRUN, str(trial), str(trial.parent), *order.options, f"--node-rank={rank}", f"--node-name={name}"]
        with open(trial.parent / (f"{name}.log" if node_id else "rank-0.log"), "ab") as log:
            return TorchrunTrial(start_process(words, subprocess.DEVNULL, log, environment))

    def pause(self) -> None:
        """Wait a moment, and change the folder: NFS may show it as it was a minute ago otherwise (nfs(5), acdirmax)."""
        time.sleep(_POLL_SECONDS)
        with contextlib.suppress(OSError):
            os.utime(self.folder)


class TorchrunNodes(Cluster):
    """The nodes as the first of them sees them; it starts trials on itself and on others."""

    def __init__(self, meeting: Meeting, lock: FolderLock, num_nodes: int, ranks_per_node: int) -> None:
        """``lock`` is the first node's; ``num_nodes`` counts it."""
        super().__init__(num_nodes, ranks_per_node)
        self._meeting, self._lock = meeting, lock
        self._nodes = {"": node_name()}
        atexit.register(self._leave)

    def begin(self, local: Launcher, mark: str, environment: Mapping[str, str]) -> None:
        """Prepare for a sweep's trials: wait for the other nodes. Raises MachineError if they do not come."""
        super().begin(local, mark, environment)
        meeting, begin, known = self._meeting, time.monotonic(), {"order"}
        left_before = {path.stem: meeting.writer(path.stem) for path in meeting.folder.glob("*.json")}
        if self.num_nodes > 1:
            more = f"{self.num_nodes - 1} more node{'s' * (self.num_nodes > 2)}"
            meeting.say(f"waiting for {more}: run the same command there")
        while missing := self.num_nodes - len(self._nodes):
            if time.monotonic() - begin > JOIN_SECONDS:
                raise MachineError(
                    f"{missing} of {self.num_nodes} nodes did not join within {JOIN_SECONDS:g} s; run the same command"
                    f" on each node, with {meeting.results} in a file system that all of them share"
                )
            meeting.pause()
            found = {path.stem for path in meeting.folder.glob("*.json")} - known
            new = [one for one in sorted(found) if one not in left_before or meeting.writer(one) != left_before[one]]
            for node_id in new[:missing]:
                if (node := meeting.read(OtherNode, node_id)) is not None:
                    known.add(node_id)
                    self._meet(node_id, node)

    def _meet(self, node_id: str, node: OtherNode) -> None:
        meeting, names = self._meeting, self._nodes.values()
        if node.sweep != meeting.sweep:
            meeting.say(f"node {node.name} was refused: it runs another sweep file or version")
        elif meeting.lives(node_id):
            name = f"{node.name}-{len(names) + 1}" if node.name in names else node.name  # several on one host, in tests
            self._nodes[node_id] = name
            meeting.say(f"node {name} has joined")

    def spread(self, trial: Path, scratch: Path, num_nodes: int) -> TrialOnNodes:
        """Start a trial's ranks on this node and on others.

        Raises:
            NodesLost: if a node has gone.
            MachineError: if no process can be started.
            OSError: if the other nodes cannot be told.
        """
        meeting, nodes = self._meeting, dict(list(self._nodes.items())[:num_nodes])
        if lost := [name for node_id, name in nodes.items() if not meeting.lives(node_id)]:
            raise NodesLost(lost)
        order = NodeTask(
            sweep=meeting.sweep,
            number=time.time_ns(),
            trial=str(trial.relative_to(meeting.results)),
            options=node_options(meeting.endpoint, num_nodes, self.ranks_per_node, scratch.name),
            nodes=nodes,
        )
        meeting.write(order)
        return TrialOnNodes(meeting, order, meeting.run(order, "", self._environment))

    def close(self) -> None:
        """End all processes, and the commands on the other nodes."""
        self._leave()
        super().close()

    def _leave(self) -> None:
        if self._lock.is_taken:
            self._lock.give_back()
            shutil.rmtree(self._meeting.folder, ignore_errors=True)


class TrialOnNodes(Launched):
    """A trial that runs on this node and on others."""

    def __init__(self, meeting: Meeting, order: NodeTask, own: TorchrunTrial) -> None:
        self._meeting, self._order, self._own = meeting, order, own
        self._running = {node_id: name for node_id, name in order.nodes.items() if node_id}
        self._lost: list[str] = []

    def wait(self, seconds: float) -> list[RankExit]:
        """Return the ends of the trial on nodes since the last call; wait at most ``seconds`` for the first."""
        deadline, exits = time.monotonic() + seconds, list[RankExit]()
        while not exits and not self.finished and time.monotonic() < deadline:
            if self._own.finished:
                time.sleep(_POLL_SECONDS)
            else:
                exits += self._own.wait(_POLL_SECONDS)
            exits += self._ends()
        return exits

    def _ends(self) -> list[RankExit]:
        exits = []
        for node_id, name in list(self._running.items()):
            lives, node = self._meeting.lives(node_id), self._meeting.read(OtherNode, node_id)
            if node is not None and node.done == self._order.number:
                exits.append(exit_of(None, node.code))
            elif not lives:
                self._lost.append(name)
                exits.append(exit_of(None, 1))
            else:
                continue
            del self._running[node_id]
        self.finished = self._own.finished and not self._running
        return exits

    def kill(self) -> None:
        """End the ranks on all nodes."""
        with contextlib.suppress(OSError):
            self._meeting.write(msgspec.structs.replace(self._order, trial=""))
        if not self._own.finished:
            self._own.kill()
        deadline = time.monotonic() + _SECONDS_TO_END
        while self._running and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            self._ends()
        self._lost += self._running.values()
        self._running, self.finished = {}, True

    def lost_nodes(self) -> tuple[str, ...]:
        """Return the nodes that have gone, or do not answer."""
        return tuple(self._lost)


def follow(meeting: Meeting) -> None:
    """Run on this node, which is not the first, what the first one says, until it has no more.

    Raises:
        MachineError: if the first node does not appear, or runs something else.
        NodesLost: if it has gone.
        ResultsError: if the results folder cannot be written.
    """
    meeting.say(f"waiting for the first node, {meeting.endpoint}")
    begin, left_before, node_id = time.monotonic(), meeting.writer(), uuid.uuid4().hex
    lock, done = meeting.join(node_id), 0
    try:
        while (first := meeting.writer()) == left_before:  # its signs of life change
            if time.monotonic() - begin > JOIN_SECONDS:
                raise MachineError(
                    f"the first node, {meeting.endpoint}, did not appear within {JOIN_SECONDS:g} s; run the same"
                    f" command there, with {meeting.results} in a file system that all nodes share"
                )
            meeting.pause()
        while first is not None and not first.has_ended:
            order = meeting.read(NodeTask)
            if order is not None and order.sweep != meeting.sweep:
                raise MachineError(
                    f"the first node, {meeting.endpoint}, runs another sweep file or another version of fsdp-bench;"
                    " all nodes need the same"
                )
            if not meeting.lives():
                raise NodesLost([meeting.endpoint])
            if order is not None and order.number != done and node_id in order.nodes:
                code = _take_part(meeting, order, node_id) if order.trial else 1
                done = order.number
                meeting.write(OtherNode(name=node_name(), sweep=meeting.sweep, done=done, code=code), node_id)
            meeting.pause()
            first = meeting.writer()
    except OSError as error:
        raise ResultsError(f"{error.filename or meeting.folder}: {error.strerror or error}") from None
    finally:
        lock.give_back()


def _take_part(meeting: Meeting, order: NodeTask, node_id: str) -> int:
    """Run this node's ranks of a trial while the first node wants them. Return torchrun's exit code."""
    meeting.say(f"trial {Path(order.trial).parent.name}")
    mark, code = str(meeting.folder / node_id), 1
    own = meeting.run(order, node_id, node_environment(mark))
    try:
        while not own.finished and meeting.read(NodeTask) in (order, None) and meeting.lives():
            for end in own.wait(_POLL_SECONDS):
                code = 1 if end.exit_code is None else end.exit_code
    finally:
        if not own.finished:
            own.kill()
        end_marked(mark)
    return code
