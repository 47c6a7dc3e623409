"""Sweeps on several nodes without Slurm: the same command on each, here as processes and as network namespaces."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from fsdp_bench.spec.errors import ExitCode
from fsdp_bench.spec.rank_report import Outcome
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.sweep.launchers.processes import MARK, free_port
from fsdp_bench.sweep.launchers.torchrun_nodes import Meeting, NodeTask, OtherNode, follow
from fsdp_bench.sweep.results import lock
from fsdp_bench.sweep.results.load import read_records
from tests.conftest import command, refused, run_command, run_process, write_tiny_sweep
from tests.processes import processes_with


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


pytestmark = pytest.mark.timeout(600)


StartNodes = Callable[..., Nodes]


@pytest.fixture
def start_nodes(tmp_path: Path) -> Iterator[StartNodes]:
    """Return a function that makes Nodes of a grid."""
    made: list[Nodes] = []

    def make(grid: str, num_nodes: int, ranks_per_node: int, run: str = "", host: str = "127.0.0.1") -> Nodes:
        made.append(Nodes(tmp_path, write_tiny_sweep(tmp_path, grid, run), num_nodes, ranks_per_node, host))
        return made[-1]

    yield make
    for one in made:
        one.end()


def groups(record: TrialRecord) -> dict[int, tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Return for each rank its node, and the ranks of its process groups that shard and that replicate."""
    found = {}
    for rank in record.ranks:
        found[rank.rank] = rank.environment["node"], rank.effective.shard_ranks, rank.effective.replicate_ranks
    return found


class Swept(NamedTuple):
    """A sweep on two nodes, of which the second was started by mistake first; and the same sweep on one."""

    nodes: Nodes
    refused: int
    """The exit code of a node that must not take part."""
    local: list[TrialRecord]


@pytest.fixture(scope="module", params=["fsdp2", pytest.param("fsdp1", marks=pytest.mark.slow)], ids=["FSDP2", "FSDP1"])
def swept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Swept:
    folder = tmp_path_factory.mktemp("nodes")
    file = write_tiny_sweep(folder, f"world_size = 4\nstrategy = 'HYBRID_SHARD'\napi = '{request.param}'")
    nodes, other = Nodes(folder, file, num_nodes=2, ranks_per_node=2), folder / "other.toml"
    other.write_text(file.read_text() + "\n")
    try:
        nodes.start()
        mistake = nodes.start(file=other).wait(200)
        nodes.start()
        assert [nodes.processes[number].wait(300) for number in (0, 2)] == [0, 0], nodes.log(0)
    finally:
        nodes.end()
    done = run_command("sweep", file, "--results", folder / "local", "--no-charts")
    assert done.returncode == 0, done.stderr
    return Swept(nodes, mistake, read_records(folder / "local"))


def test_hybrid_shards_in_nodes_and_replicates_between_them(swept: Swept) -> None:
    (record,) = swept.nodes.records()
    assert record.effective_strategy == "HYBRID_SHARD"
    assert record.setup.shard_size is None  # half of the world, so that the trial is the one that a single node has
    found = groups(record)
    for rank, (node, shard, replicate) in found.items():
        assert shard == tuple(range(rank // 2 * 2, rank // 2 * 2 + 2))
        assert replicate == (rank % 2, rank % 2 + 2)
        assert {found[peer][0] for peer in shard} == {node}
    assert len({node for node, _, _ in found.values()}) == 2


def test_two_nodes_find_the_losses_of_one_and_leave_nothing_beside_them(swept: Swept) -> None:
    (expected,), (found,) = swept.local, swept.nodes.records()
    assert (found.id, found.outcome) == (expected.id, Outcome.OK)
    assert [rank.losses for rank in found.ranks] == [rank.losses for rank in expected.ranks]
    assert len(list(swept.nodes.results.iterdir())) == 1  # the machine's folder


def test_a_node_with_another_sweep_file_is_refused_and_the_right_one_is_waited_for(swept: Swept) -> None:
    assert swept.refused == 2
    (_, line) = swept.nodes.log(1).strip().splitlines()
    assert "runs another sweep file or another version of fsdp-bench; all nodes need the same" in line
    assert "was refused: it runs another sweep file or version" in swept.nodes.log(0)


@pytest.mark.slow
def test_a_shard_group_is_as_many_nodes_as_shard_size_says(start_nodes: StartNodes) -> None:
    grid = "world_size = 4\nstrategy = 'HYBRID_SHARD'\napi = 'fsdp2'\nshard_size = 2"
    nodes = start_nodes(grid, num_nodes=4, ranks_per_node=1)
    for _ in range(4):
        nodes.start()
    assert nodes.wait() == [0] * 4, nodes.log(0)
    (record,) = nodes.records()
    found = groups(record)
    for rank, (_, shard, _) in found.items():
        assert shard == tuple(range(rank // 2 * 2, rank // 2 * 2 + 2))
        assert len({found[peer][0] for peer in shard}) == 2  # nodes


@pytest.fixture
def two_hosts() -> Iterator[tuple[list[str], list[str]]]:
    """Two network namespaces, joined by a cable: words that run a command on a host with its own name and address."""
    names = [f"fsdp-bench-{os.getpid()}-{letter}" for letter in "ab"]
    commands = [f"ip netns add {name}" for name in names]
    commands.append(f"ip link add veth0 netns {names[0]} type veth peer name veth0 netns {names[1]}")
    for number, name in enumerate(names, 1):
        commands.append(f"ip -n {name} addr add 10.77.0.{number}/24 dev veth0")
        commands += [f"ip -n {name} link set {device} up" for device in ("lo", "veth0")]
    try:
        for one in commands:
            done = subprocess.run(one.split(), capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"no network namespaces here: {one}: {done.stderr.strip()}")
        first, second = (
            [*f"ip netns exec {name} unshare --uts sh -c".split(), f'hostname {host}; exec "$@"', "sh"]
            for name, host in zip(names, ("host-a", "host-b"), strict=True)
        )
        yield first, second
    except FileNotFoundError:
        pytest.skip("no network namespaces here: the command ip is not installed")
    finally:
        with contextlib.suppress(FileNotFoundError):
            for name in names:
                subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@pytest.mark.slow
def test_two_hosts_with_their_own_addresses_train_one_trial_after_another(
    two_hosts: tuple[list[str], list[str]], start_nodes: StartNodes, tmp_path: Path
) -> None:
    grid = "world_size = 4\nstrategy = ['FULL_SHARD', 'NO_SHARD']"
    nodes = start_nodes(grid, num_nodes=2, ranks_per_node=2, host="10.77.0.1")
    for host in two_hosts:
        nodes.start(*host)
    assert nodes.wait() == [0, 0], nodes.log(0)
    local = run_process("sweep", tmp_path / "tiny.toml", "--results", tmp_path / "local", "--no-charts")
    assert local.returncode == 0, local.stderr
    for expected, found in zip(read_records(tmp_path / "local"), nodes.records(), strict=True):
        assert found.id == expected.id
        assert [rank.losses for rank in found.ranks] == [rank.losses for rank in expected.ranks]
        assert sorted(rank.environment["node"] for rank in found.ranks) == ["host-a"] * 2 + ["host-b"] * 2


LONG = "world_size = 2\ngradient_accumulation_steps = [100000, 1]"


def wait_for_steps(nodes: Nodes, num_ranks: int = 2) -> None:
    """Wait until the ranks of both nodes train."""
    deadline = time.monotonic() + 200
    while True:
        stages = [path.read_text() for path in nodes.results.glob("**/.scratch/*/rank-*.phase")]
        if len(stages) == num_ranks and not {"start", ""}.intersection(stages):
            return
        assert time.monotonic() < deadline, (stages, nodes.log(0), nodes.log(1))
        time.sleep(0.1)


@pytest.mark.parametrize("killed", [0, 1], ids=["the first", "the second"])
def test_a_node_that_is_killed_costs_its_trial_and_leaves_nothing(
    killed: int, start_nodes: StartNodes, tmp_path: Path
) -> None:
    nodes = start_nodes(LONG, num_nodes=2, ranks_per_node=1)
    nodes.start()
    nodes.start()
    wait_for_steps(nodes)
    nodes.processes[killed].kill()
    assert nodes.processes[1 - killed].wait(200) == ExitCode.INTERRUPTED
    assert "does not answer any more; run the same command" in nodes.log(1 - killed)
    if killed == 1:
        (record,) = nodes.records()
        name = re.findall(r"node (\S+) has joined", nodes.log(0))[0]
        assert record.outcome.value == "crashed"
        assert f"node {name} does not answer" in nodes.log(0)
        assert name in (record.reason or "")
    deadline = time.monotonic() + 30 * (killed == 0)  # the first node ends all that it started before it ends
    while processes_with(MARK, str(tmp_path)):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_node_reads_no_order_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who may write into the results folder could otherwise have it run a trial, which names code, as this user."""
    meeting = Meeting(tmp_path, "127.0.0.1:29420", write_tiny_sweep(tmp_path, "world_size = 2"), lambda _line: None)
    lock = meeting.join("")
    try:
        assert meeting.read(NodeTask) == NodeTask(sweep=meeting.sweep)
        monkeypatch.setattr(meeting, "_owner", os.getuid() + 1)
        assert meeting.read(NodeTask) is None
    finally:
        lock.give_back()


def test_a_node_answers_an_order_that_was_withdrawn_before_the_node_saw_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the first node would wait for it, and count it as lost."""
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.05)
    meeting = Meeting(tmp_path, "127.0.0.1:29420", write_tiny_sweep(tmp_path, "world_size = 2"), lambda _line: None)
    first = meeting.join("")
    with ThreadPoolExecutor() as pool:
        other = pool.submit(follow, meeting)
        try:
            while not (found := [path.stem for path in meeting.folder.glob("*.json") if path.stem != "order"]):
                assert not other.done(), other.exception()
                time.sleep(0.01)
            meeting.write(NodeTask(sweep=meeting.sweep, number=7, nodes={"": "n0", found[0]: "n1"}))
            while (node := meeting.read(OtherNode, found[0])) is None or node.done != 7:
                assert not other.done(), other.exception()
                time.sleep(0.01)
        finally:
            first.give_back()
        assert other.result(20) is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--nodes 2", "--nodes and --rdzv-endpoint go together"),
        ("--rdzv-endpoint a:1", "--nodes and --rdzv-endpoint go together"),
        ("--slurm --nodes 2 --rdzv-endpoint a:1", "--slurm takes the job's nodes"),
        ("--slurm --ranks-per-node 2", "this is no job of Slurm (SLURM_JOB_ID is not set)"),
        ("--ranks-per-node 2", "--ranks-per-node is for several nodes"),
        ("--nodes 2 --rdzv-endpoint localhost --ranks-per-node 1", "HOST:PORT of the first node"),
        ("--nodes 2 --rdzv-endpoint nowhere.invalid:1 --ranks-per-node 1", "nowhere.invalid has no address here"),
        ("--nodes 2 --rdzv-endpoint localhost:29400", "--ranks-per-node: by default one for each GPU"),
        ("--nodes 0 --rdzv-endpoint localhost:29400", "nodes: '0' is not allowed"),
    ],
)
def test_options_that_do_not_go_together_are_one_line(
    options: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert said in refused("sweep", write_tiny_sweep(tmp_path, "world_size = 4"), *options.split())
