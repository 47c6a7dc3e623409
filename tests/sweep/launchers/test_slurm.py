"""Sweeps in jobs of a real Slurm, of two nodes on this machine: time limits, requeues, nodes that die."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.sweep.results.load import read_records
from tests.conftest import command, write_tiny_sweep
from tests.sweep.launchers.slurm_cluster import SlurmCluster, running_cluster

pytestmark = pytest.mark.timeout(400)

GRID = """
world_size = 4
strategy = ["FULL_SHARD", "HYBRID_SHARD"]
api = ["fsdp1", "fsdp2"]
[[include]]
world_size = [2, 4]
strategy = "SHARD_GRAD_OP"
api = ["fsdp1", "fsdp2"]
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with running_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


class Job:
    """A sweep that was submitted, with two ranks on each of two nodes."""

    def __init__(self, cluster: SlurmCluster, file: Path, *options: str) -> None:
        self._cluster = cluster
        self.results = file.parent / "results"
        words = ("submit", file, "--nodes", 2, "--ranks-per-node", 2, "--results", self.results, *options)
        self.submitted = self._run(*words)
        self.folder = self.results / "2x2-slurm" / file.stem

    def _run(self, *words: object) -> str:
        environment = self._cluster.environment
        done = subprocess.run(command(*words), env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    @property
    def id(self) -> str:
        return re.findall(r"^job (\d+) ", self.submitted)[0]

    @property
    def log(self) -> str:
        path = self.folder / "job.log"
        return path.read_text() if path.exists() else ""

    def status(self) -> dict[str, Any]:
        (found,) = json.loads(self._run("status", self.results, "--json"))["sweeps"]
        return dict(found)

    def wait_for(self, condition: Callable[[dict[str, Any]], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition(self.status()):
            assert time.monotonic() < deadline, f"not within {seconds:g} s: {self.status()}\n{self.log}"
            time.sleep(0.5)

    def records(self) -> dict[str, TrialRecord]:
        return {record.id: record for record in read_records(self.results)}


def losses(record: TrialRecord) -> list[tuple[float, ...]]:
    return [rank.losses for rank in record.ranks]


def test_a_sweep_that_reaches_its_time_limit_is_requeued_and_ends_with_the_records_of_a_local_one(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    file = write_tiny_sweep(tmp_path, GRID, "timeout_seconds = 40")
    job = Job(cluster, file, "--time", "1", "--sbatch", "--signal=B:USR1@48")  # Slurm's shortest limit is a minute
    seen = []

    def is_done(status: dict[str, Any]) -> bool:
        seen.append(status)
        return bool(status["state"] == "done")

    job.wait_for(is_done, 200)
    assert job.log.count("the job's time limit is near") >= 1, job.log
    assert {status["state"] for status in seen} >= {"running", "queued", "done"}
    assert any(status["running"] and status["job"]["seconds_left"] is not None for status in seen)
    assert any(status["job"]["restarts"] for status in seen if status["job"])
    local = tmp_path / "local"
    done = subprocess.run(command("sweep", file, "--results", local, "--no-charts"), capture_output=True, check=False)
    assert done.returncode == 0
    expected, found = {record.id: record for record in read_records(local)}, job.records()
    assert found.keys() == expected.keys()
    assert len(found) == 8
    for trial_id, record in found.items():
        assert (record.outcome, record.reason) == (expected[trial_id].outcome, expected[trial_id].reason)
        assert losses(record) == losses(expected[trial_id])
    several = [record for record in found.values() if record.setup.world_size == 4]
    assert [{rank.environment["node"] for rank in record.ranks} for record in several] == [{"n1", "n2"}] * 6
    assert not list((job.folder / "set-aside").glob("*"))


@pytest.mark.parametrize("whole", [False, True], ids=["its slurmd is killed", "it loses its power"])
def test_a_node_that_dies_costs_the_trial_that_runs_and_no_other(
    whole: bool, cluster: SlurmCluster, tmp_path: Path
) -> None:
    cluster.wait_for_nodes(60)
    long = "world_size = 4\n[[include]]\nworld_size = 4\nsequence_length = 16\nseed = 1\nmicro_batch_size = 64\n"
    file = write_tiny_sweep(tmp_path, long, "timeout_seconds = 100\nsteps = 4000")
    job = Job(cluster, file, "--time", "3")
    try:
        job.wait_for(lambda status: (status["running_seconds"] or 0) > 9, 60)  # its ranks train
        cluster.kill_node("n2", whole)
        job.wait_for(lambda status: status["outcomes"].get("crashed") == 1, 90)
        (crashed,) = job.records().values()
        assert re.match(r"node n2 stopped answering, with ranks \d, \d in (warmup|steps)", str(crashed.reason))
    finally:
        cluster.start_node("n2")
    job.wait_for(lambda status: status["state"] == "done", 120)
    assert "the job has lost n2; 1 trials were recorded in it; job" in job.log
    assert sorted(record.outcome.value for record in job.records().values()) == ["crashed", "ok"]
