"""Sweeps on several nodes without Slurm: the same command on each, here as processes and as network namespaces."""

import contextlib
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from fsdp_bench.spec.errors import ExitCode
from fsdp_bench.spec.rank_report import Outcome
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.sweep.launchers import torchrun_nodes
from fsdp_bench.sweep.launchers.processes import MARK, free_port
from fsdp_bench.sweep.launchers.torchrun_nodes import Meeting, NodeTask, TorchrunNodes, follow
from fsdp_bench.sweep.results import lock
from fsdp_bench.sweep.results.load import read_records
from tests.conftest import stdout_of, write_tiny_sweep
from tests.processes import Sweep, processes_with, wait_until

pytestmark = pytest.mark.timeout(600)


def on_nodes(num_nodes: int, ranks_per_node: int, host: str = "127.0.0.1") -> tuple[object, ...]:
    """Return the options of a command that is the same on each node."""
    words = ("--nodes", num_nodes, "--ranks-per-node", ranks_per_node)
    return (*words, "--rdzv-endpoint", f"{host}:{free_port()}")


def start_first(nodes: Sweep, *before: str) -> None:
    """Start the command on the first node, and wait until it waits for the others."""
    process = nodes.start(*before)
    wait_until(lambda: "waiting for" in nodes.log(0), process)


def groups(record: TrialRecord) -> dict[int, tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Return for each rank its node, and the ranks of its process groups that shard and that replicate."""
    found = {}
    for rank in record.ranks:
        found[rank.rank] = rank.environment["node"], rank.effective.shard_ranks, rank.effective.replicate_ranks
    return found


class Swept(NamedTuple):
    """A sweep on two nodes, of which the second was started by mistake first; and the same sweep on one."""

    nodes: Sweep
    refused: int
    """The exit code of a node that must not take part."""
    local: list[TrialRecord]


@pytest.fixture(scope="module", params=["fsdp2", pytest.param("fsdp1", marks=pytest.mark.slow)], ids=["FSDP2", "FSDP1"])
def swept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Swept:
    folder = tmp_path_factory.mktemp("nodes")
    file = write_tiny_sweep(folder, f"world_size = 4\nstrategy = 'HYBRID_SHARD'\napi = '{request.param}'")
    nodes, other = Sweep(file, folder / "results", *on_nodes(2, 2)), folder / "other.toml"
    other.write_text(file.read_text() + "\n")
    try:
        start_first(nodes)
        mistake = nodes.start(file=other).wait(200)
        assert [process.wait(300) for process in (nodes.start(), nodes.processes[0])] == [0, 0], nodes.log(0)
    finally:
        nodes.end()
    stdout_of("sweep", file, "--results", folder / "local", "--no-charts")
    return Swept(nodes, mistake, read_records(folder / "local"))


def test_hybrid_shards_in_nodes_and_replicates_between_them(swept: Swept) -> None:
    (record,) = read_records(swept.nodes.results)
    assert record.effective_strategy == "HYBRID_SHARD"
    assert record.setup.shard_size is None  # half of the world, so that the trial is the one that a single node has
    found = groups(record)
    for rank, (node, shard, replicate) in found.items():
        assert shard == tuple(range(rank // 2 * 2, rank // 2 * 2 + 2))
        assert replicate == (rank % 2, rank % 2 + 2)
        assert {found[peer][0] for peer in shard} == {node}
    assert len({node for node, _, _ in found.values()}) == 2


def test_two_nodes_find_the_losses_of_one_and_leave_nothing_beside_them(swept: Swept) -> None:
    (expected,), (found,) = swept.local, read_records(swept.nodes.results)
    assert (found.id, found.outcome) == (expected.id, Outcome.OK)
    assert [rank.losses for rank in found.ranks] == [rank.losses for rank in expected.ranks]
    assert len(list(swept.nodes.results.iterdir())) == 1  # the machine's folder


def test_a_node_with_another_sweep_file_is_refused_and_the_right_one_is_waited_for(swept: Swept) -> None:
    assert swept.refused == 2
    (_, line) = swept.nodes.log(1).strip().splitlines()
    assert "runs another sweep file or another version of fsdp-bench; all nodes need the same" in line
    assert "was refused: it runs another sweep file or version" in swept.nodes.log(0)


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
    two_hosts: tuple[list[str], list[str]], new_sweep: Callable[..., Sweep], tmp_path: Path
) -> None:
    nodes = new_sweep("world_size = 4\nstrategy = ['FULL_SHARD', 'NO_SHARD']", "", *on_nodes(2, 2, host="10.77.0.1"))
    start_first(nodes, *two_hosts[0])
    assert [process.wait(300) for process in (nodes.start(*two_hosts[1]), nodes.processes[0])] == [0, 0], nodes.log(0)
    stdout_of("sweep", tmp_path / "tiny.toml", "--results", tmp_path / "local", "--no-charts")
    for expected, found in zip(read_records(tmp_path / "local"), read_records(nodes.results), strict=True):
        assert found.id == expected.id
        assert [rank.losses for rank in found.ranks] == [rank.losses for rank in expected.ranks]
        assert sorted(rank.environment["node"] for rank in found.ranks) == ["host-a"] * 2 + ["host-b"] * 2


@pytest.mark.parametrize("killed", [0, 1], ids=["the first", "the second"])
def test_a_node_that_is_killed_costs_its_trial_and_leaves_nothing(
    killed: int, new_sweep: Callable[..., Sweep], tmp_path: Path
) -> None:
    nodes = new_sweep("world_size = 2\ngradient_accumulation_steps = [100000, 1]", "", *on_nodes(2, 1))
    start_first(nodes)
    nodes.start()

    def both_train() -> bool:
        stages = [path.read_text() for path in nodes.results.glob("**/.scratch/*/rank-*.phase")]
        return len(stages) == 2 and not {"start", ""}.intersection(stages)

    wait_until(both_train, nodes.processes[0])
    nodes.processes[killed].kill()
    assert nodes.processes[1 - killed].wait(200) == ExitCode.INTERRUPTED
    assert "does not answer any more; run the same command" in nodes.log(1 - killed)
    if killed == 1:
        (record,) = read_records(nodes.results)
        name = re.findall(r"node (\S+) has joined", nodes.log(0))[0]
        assert record.outcome is Outcome.CRASHED
        assert f"node {name} does not answer" in nodes.log(0)
        assert name in (record.reason or "")
    # The first node ends all that it started before it ends.
    wait_until(lambda: not processes_with(MARK, str(tmp_path)), None, 30 * (killed == 0))


def test_a_node_reads_no_order_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who may write into the results folder could otherwise have it run a trial, which names code, as this user."""
    meeting = Meeting(tmp_path, "127.0.0.1:29420", write_tiny_sweep(tmp_path, "world_size = 2"), lambda _line: None)
    meeting.folder.mkdir()
    order = NodeTask(sweep=meeting.sweep)
    meeting.write("order", order)
    assert meeting.read("order", NodeTask) == order
    monkeypatch.setattr(meeting, "_owner", os.getuid() + 1)
    assert meeting.read("order", NodeTask) is None


def test_a_node_that_does_not_answer_an_order_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one answers each, also one that is withdrawn before it has begun."""
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(torchrun_nodes, "_SECONDS_TO_ANSWER", 3.0)
    meeting = Meeting(tmp_path, "127.0.0.1:29420", write_tiny_sweep(tmp_path, "world_size = 2"), lambda _line: None)
    first = TorchrunNodes(meeting, 3, 1)
    with ThreadPoolExecutor() as pool:
        other = pool.submit(follow, meeting)
        joined = wait_until(lambda: {path.stem for path in meeting.folder.glob("*.json")} - {"order"})
        nodes = {"": "n0", min(joined): "n1", "gone": "n2"}
        assert meeting.ask(NodeTask(sweep=meeting.sweep, nodes=nodes)) == ["n2"]
        first._leave()
        assert other.result(20) is None
