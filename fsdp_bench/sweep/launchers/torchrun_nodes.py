"""Trials on several nodes without Slurm: the same command runs on each of them, one torchrun a trial on each.

torchrun's rendezvous joins the nodes of a trial and numbers their ranks. It does not say which trial is next, and an
agent whose ranks run on does not learn that another one has ended (torch 2.13, agent/server/api.py, _invoke_run). So
the results folder, which the nodes share, says that::

    .nodes-HOST:PORT/
        .writer.N   the first node, the one that the rendezvous endpoint names: its signs of life (results/lock.py)
        order.json  what it has all nodes do
        ID.json     the answer of another node to the last order

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
from fsdp_bench.sweep.results.lock import FolderLock, last_writer, node_name, seems_to_live
from fsdp_bench.version import __version__

JOIN_SECONDS = 600.0
"""The time that nodes wait for each other at the beginning."""
_SECONDS_TO_ANSWER = 20.0
"""The time that another node may take to answer an order, after it has ended its ranks."""
_POLL_SECONDS = 0.3
_ORDER = "order"

Say = Callable[[str], None]
T = TypeVar("T")


class NodeTask(msgspec.Struct, frozen=True, kw_only=True):
    """The order of the first node to all nodes: run a trial, or end what runs. Each other node answers at once."""

    sweep: str
    """The Meeting's."""
    number: int = msgspec.field(default_factory=time.time_ns)
    """The order's number, which no other order of any run has."""
    trial: str = ""
    """The path of its trial.json in its scratch folder, from the results folder. Empty: end what runs."""
    options: tuple[str, ...] = ()
    """The options of train/processes/torchrun.py that are the same on all nodes."""
    nodes: dict[str, str] = {}
    """The IDs of its nodes in the order of their ranks, and their names. The first node's ID is empty."""


class NodeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a node that is not the first."""

    name: str
    sweep: str
    """The Meeting's."""
    number: int = 0
    """The number of the last order that the node has seen."""
    code: int | None = None
    """The exit code of the node's torchrun; None while it runs."""


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

    def lives(self) -> bool:
        """Return whether the first node gives signs of life."""
        return (writer := last_writer(self.folder)) is not None and seems_to_live(self.folder, writer)

    def write(self, name: str, content: NodeTask | NodeAnswer) -> None:
        """Write the order, or the answer of the node with an ID. Raises OSError if it cannot be written."""
        write_atomically(self._path(name), msgspec.json.encode(content))
        self._owner = self._path(name).stat().st_uid  # as the file server sees this process

    def read(self, name: str, kind: type[T]) -> T | None:
        """Return what ``write`` has written; None if there is nothing, or another user wrote it."""
        with contextlib.suppress(OSError, msgspec.DecodeError), open(self._path(name), "rb") as file:
            if os.fstat(file.fileno()).st_uid == self._owner:
                return msgspec.json.decode(file.read(), type=kind)
        return None

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def answers(self, order: NodeTask) -> dict[str, NodeAnswer]:
        """Return the answers to an order, by the IDs of the nodes."""
        found = ((path.stem, self.read(path.stem, NodeAnswer)) for path in sorted(self.folder.glob("*.json")))
        return {name: one for name, one in found if one is not None and one.number == order.number}

    def ask(self, order: NodeTask) -> list[str]:
        """Give an order; return the names of its nodes that do not answer. Raises OSError if it cannot be written."""
        self.write(_ORDER, order)
        deadline = time.monotonic() + _SECONDS_TO_ANSWER
        while missing := order.nodes.keys() - {"", *self.answers(order)}:
            if time.monotonic() > deadline:
                return [order.nodes[node_id] for node_id in missing]
            self.pause()
        return []

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

    def __init__(self, meeting: Meeting, num_nodes: int, ranks_per_node: int) -> None:
        """Become the first of ``num_nodes``. Raises ResultsError if there is one, or results cannot be written."""
        super().__init__(num_nodes, ranks_per_node)
        self._meeting, self._lock = meeting, FolderLock(meeting.folder)
        self._nodes = {"": node_name()}
        try:
            meeting.folder.mkdir(parents=True, exist_ok=True)
            self._lock.take()
            meeting.write(_ORDER, NodeTask(sweep=meeting.sweep))
        except OSError as error:
            raise ResultsError(f"{meeting.folder}: cannot be written: {error.strerror or error}") from None
        atexit.register(self._leave)

    def begin(self, local: Launcher, mark: str, environment: Mapping[str, str]) -> None:
        """Prepare for a sweep's trials: wait for the other nodes. Raises MachineError if they do not come."""
        super().begin(local, mark, environment)
        meeting, begin, known = self._meeting, time.monotonic(), set[str]()
        if self.num_nodes > 1:
            more = f"{self.num_nodes - 1} more node{'s' * (self.num_nodes > 2)}"
            meeting.say(f"waiting for {more}: run the same command there")
        order = NodeTask(sweep=meeting.sweep)
        meeting.write(_ORDER, order)
        while missing := self.num_nodes - len(self._nodes):
            if time.monotonic() - begin > JOIN_SECONDS:
                raise MachineError(
                    f"{missing} of {self.num_nodes} nodes did not join within {JOIN_SECONDS:g} s; run the same command"
                    f" on each node, with {meeting.results} in a file system that all of them share"
                )
            meeting.pause()
            new = [(node_id, one) for node_id, one in meeting.answers(order).items() if node_id not in known]
            for node_id, answer in new[:missing]:
                known.add(node_id)
                self._meet(node_id, answer)

    def _meet(self, node_id: str, answer: NodeAnswer) -> None:
        if answer.sweep != self._meeting.sweep:
            self._meeting.say(f"node {answer.name} was refused: it runs another sweep file or version")
            return
        names = self._nodes.values()
        name = f"{answer.name}-{len(names) + 1}" if answer.name in names else answer.name  # several on one host: tests
        self._nodes[node_id] = name
        self._meeting.say(f"node {name} has joined")

    def spread(self, trial: Path, scratch: Path, num_nodes: int) -> TrialOnNodes:
        """Start a trial's ranks on this node and on others.

        Raises:
            NodesLost: if a node has gone.
            MachineError: if no process can be started.
            OSError: if the other nodes cannot be told.
        """
        meeting = self._meeting
        order = NodeTask(
            sweep=meeting.sweep,
            trial=str(trial.relative_to(meeting.results)),
            options=node_options(meeting.endpoint, num_nodes, self.ranks_per_node, scratch.name),
            nodes=dict(list(self._nodes.items())[:num_nodes]),
        )
        if lost := meeting.ask(order):
            raise NodesLost(lost)
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
        self._running = set(order.nodes) - {""}
        self._lost: list[str] = []

    def wait(self, seconds: float) -> list[RankExit]:
        """Return the ends of the trial on nodes since the last call; wait at most ``seconds`` for the first."""
        deadline, exits = time.monotonic() + seconds, list[RankExit]()
        while not exits and not self.finished and time.monotonic() < deadline:
            if self._own.finished:
                time.sleep(_POLL_SECONDS)
            else:
                exits += self._own.wait(_POLL_SECONDS)
            for node_id, answer in self._meeting.answers(self._order).items():
                if answer.code is not None and node_id in self._running:
                    self._running.remove(node_id)
                    exits.append(exit_of(None, answer.code))
            self.finished = self._own.finished and not self._running
        return exits

    def kill(self) -> None:
        """End the ranks on all nodes. A node that does not answer is lost."""
        if not self._own.finished:
            self._own.kill()
        with contextlib.suppress(OSError):
            self._lost += self._meeting.ask(NodeTask(sweep=self._order.sweep, nodes=self._order.nodes))
        self.finished = True

    def lost_nodes(self) -> tuple[str, ...]:
        """Return the nodes that do not answer."""
        return tuple(self._lost)


def follow(meeting: Meeting) -> None:
    """Run on this node, which is not the first, what the first one says, until it has no more.

    Raises:
        MachineError: if the first node does not appear, or runs something else.
        NodesLost: if it has gone.
        ResultsError: if the results folder cannot be written.
    """
    meeting.say(f"waiting for the first node, {meeting.endpoint}")
    begin, left_before, node_id = time.monotonic(), last_writer(meeting.folder), uuid.uuid4().hex
    answer = NodeAnswer(name=node_name(), sweep=meeting.sweep)
    try:
        meeting.folder.mkdir(parents=True, exist_ok=True)
        meeting.write(node_id, answer)
        while (first := last_writer(meeting.folder)) == left_before:  # its signs of life change
            if time.monotonic() - begin > JOIN_SECONDS:
                raise MachineError(
                    f"the first node, {meeting.endpoint}, did not appear within {JOIN_SECONDS:g} s; run the same"
                    f" command there, with {meeting.results} in a file system that all nodes share"
                )
            meeting.pause()
        while first is not None and not first.has_ended:
            if not meeting.lives():
                raise NodesLost([meeting.endpoint])
            order = meeting.read(_ORDER, NodeTask)
            if order is not None and order.number != answer.number:
                answer = msgspec.structs.replace(answer, number=order.number)
                meeting.write(node_id, answer)
                if order.sweep != meeting.sweep:
                    raise MachineError(
                        f"the first node, {meeting.endpoint}, runs another sweep file or another version of fsdp-bench;"
                        " all nodes need the same"
                    )
                if order.trial and node_id in order.nodes:
                    code = _take_part(meeting, order, node_id)
                    meeting.write(node_id, msgspec.structs.replace(answer, code=code))
            meeting.pause()
            first = last_writer(meeting.folder)
    except OSError as error:
        raise ResultsError(f"{error.filename or meeting.folder}: {error.strerror or error}") from None


def _take_part(meeting: Meeting, order: NodeTask, node_id: str) -> int:
    """Run this node's ranks of a trial while the first node wants them. Return torchrun's exit code."""
    meeting.say(f"trial {Path(order.trial).parent.name}")
    mark, code = str(meeting.folder / node_id), 1
    own = meeting.run(order, node_id, node_environment(mark))
    try:
        while not own.finished and meeting.read(_ORDER, NodeTask) in (order, None) and meeting.lives():
            for end in own.wait(_POLL_SECONDS):
                code = 1 if end.exit_code is None else end.exit_code
    finally:
        if not own.finished:
            own.kill()
        end_marked(mark)
    return code
