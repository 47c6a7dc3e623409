"""Sweeps in jobs of a real Slurm, of two nodes on this machine: time limits, requeues, nodes that die."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.sweep.launchers.processes import free_port
from fsdp_bench.sweep.results.load import read_records
from tests.conftest import run_command, write_tiny_sweep
from tests.processes import processes_with, wait_until

REQUIRED = "FSDP_BENCH_TEST_SLURM"
"""The environment variable with which .ci/run says that these tests must not be skipped."""

_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "munged", "mungekey")

_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthInfo=cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdTimeout=5
KillWait=5
SchedulerParameters=sched_interval=1,bf_interval=2
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=1000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=1000
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=60 State=UP
"""


PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))


class SlurmCluster:
    """A cluster with its files in a folder: nodes n1 and n2."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": PATH}

    def ask(self, *command: str) -> str:
        """Run a command of Slurm's; return what it prints."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def run(self, *words: object) -> subprocess.CompletedProcess[str]:
        """Run fsdp-bench in this process as one of the cluster's users."""
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self.environment.items():
                patch.setenv(name, value)
            return run_command(*words)

    def start(self) -> None:
        """Start all daemons."""
        for name in ("state", "n1", "n2"):
            (self.folder / name).mkdir()
        host, ports = socket.gethostname().partition(".")[0], [free_port() for _ in range(3)]
        text = _CONFIGURATION.format(host=host, folder=self.folder, ports=ports)
        (self.folder / "slurm.conf").write_text(text.lstrip())
        self.ask("slurmctld", "-f", str(self.folder / "slurm.conf"))
        for name in ("n1", "n2"):
            self.start_node(name)
        self.wait_for_nodes()

    def start_node(self, name: str) -> None:
        """Start a node's daemon."""
        self.ask("slurmd", "-f", str(self.folder / "slurm.conf"), "-N", name)

    def kill_node(self, name: str, whole: bool) -> None:
        """Kill a node's daemon; with ``whole`` everything that runs on the node, as if its power had failed."""
        victims = [psutil.Process(int((self.folder / f"{name}.pid").read_text()))]
        for one in processes_with("SLURMD_NODENAME", name) if whole else ():
            with contextlib.suppress(psutil.Error, OSError):
                if "SLURM_STEP_ID" in one.environ() and one != victims[0]:
                    parent = one.parent()
                    victims += [one, *([parent] if parent and parent.name() == "slurmstepd" else [])]
        for victim in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()

    def wait_for_nodes(self) -> None:
        """Wait until both nodes are idle."""
        wait_until(lambda: self.ask("sinfo", "--noheader", "--format=%T %D") == "idle 2", None, 120)

    def end(self) -> None:
        with contextlib.suppress(AssertionError):
            self.ask("scancel", "--user=root")
        pids = {int(path.read_text()) for path in self.folder.glob("*.pid")}
        for pid in pids | {one.pid for one in processes_with("SLURM_CONF", self.environment["SLURM_CONF"])}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def munge() -> Iterator[None]:
    """munged, which a machine has once."""
    asked = partial(subprocess.run, ["munge", "--no-input"], capture_output=True, check=False)
    if asked().returncode == 0:
        yield
        return
    if not Path("/etc/munge/munge.key").exists():
        subprocess.run(["mungekey", "--create"], check=True, env={**os.environ, "PATH": PATH})
    Path("/run/munge").mkdir(mode=0o755, exist_ok=True)
    for path in ("/etc/munge/munge.key", "/run/munge"):
        shutil.chown(path, "munge", "munge")
    words = ["runuser", "-u", "munge", "--", "/usr/sbin/munged", "--foreground"]
    daemon = subprocess.Popen(words, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: asked().returncode == 0, daemon, 10)
        yield
    finally:
        daemon.terminate()
        daemon.wait()


@pytest.fixture(scope="module")
def can_start_slurm() -> None:
    """Skip the tests where no cluster can be started."""
    missing = [name for name in _PROGRAMS if shutil.which(name, path=PATH) is None]
    if missing or os.geteuid() != 0:
        reason = "Slurm's daemons start jobs as their owner, which takes root"
        if missing:
            reason = f"{missing[0]} is not installed: apt-get install slurm-wlm and munge"
        if os.environ.get(REQUIRED):
            pytest.fail(f"{REQUIRED} is set, and {reason}")
        pytest.skip(reason)


@pytest.fixture(scope="module")
def cluster(can_start_slurm: None, munge: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A running cluster, all of whose processes end with the tests."""
    cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.end()


pytestmark = pytest.mark.timeout(900)

GRID = """
world_size = 1
[[include]]
world_size = 2
strategy = ["FULL_SHARD", "SHARD_GRAD_OP"]
api = ["fsdp1", "fsdp2"]
"""


@pytest.fixture(autouse=True)
def no_job_is_left(cluster: SlurmCluster) -> Iterator[None]:
    """Cancel the jobs of a test that failed, for which the next test would wait."""
    yield
    cluster.ask("scancel", "--me")


class Job:
    """A sweep that was submitted."""

    def __init__(self, cluster: SlurmCluster, file: Path, *options: str, nodes: int = 2, ranks: int = 2) -> None:
        self._cluster = cluster
        self.results = file.parent / "results"
        self.folder = self.results / f"{nodes}x{ranks}-slurm" / file.stem
        self.words = ("submit", file, "--nodes", nodes, "--ranks-per-node", ranks, "--results", self.results, *options)
        submitted = cluster.run(*self.words)
        assert submitted.returncode == 0, submitted.stderr
        (self.id,) = re.findall(r"^job (\d+) ", submitted.stdout)

    @property
    def log(self) -> str:
        return (self.folder / "job.log").read_text()

    def wait_for(self, condition: Callable[[dict[str, Any]], object], seconds: float) -> None:
        """Wait until the status of the sweep is as a condition says."""

        def is_so() -> object:
            (found,) = json.loads(self._cluster.run("status", self.results, "--json").stdout)["sweeps"]
            return condition(found)

        wait_until(is_so, None, seconds)

    def records(self) -> dict[str, TrialRecord]:
        return {record.id: record for record in read_records(self.results)}


def test_a_sweep_that_reaches_its_time_limit_is_requeued_and_ends_with_the_records_of_a_local_one(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    file = write_tiny_sweep(tmp_path, GRID, "timeout_seconds = 85")
    soon = "--signal=B:USR1@105"  # 15 s after its beginning, while few trials are done
    job = Job(cluster, file, "--time", "2", "--sbatch", soon, ranks=1)
    seen = []

    def is_done(status: dict[str, Any]) -> bool:
        if status["state"] == "queued" and status["job"]["restarts"] == 1:
            cluster.ask("scontrol", "update", f"JobId={job.id}", "TimeLimit=20")  # the second job ends it
        seen.append(status)
        return bool(status["state"] == "done")

    job.wait_for(is_done, 600)
    assert job.log.count("the job's time limit is near") >= 1, job.log
    assert {status["state"] for status in seen} >= {"running", "queued", "done"}
    assert any(status["running"] and status["job"]["seconds_left"] is not None for status in seen)
    assert any(status["job"]["restarts"] for status in seen if status["job"])
    local = tmp_path / "local"
    assert run_command("sweep", file, "--results", local, "--no-charts").returncode == 0
    expected, found = {record.id: record for record in read_records(local)}, job.records()
    assert found.keys() == expected.keys()
    assert len(found) == 5
    for trial_id, record in found.items():
        assert (record.outcome, record.reason) == (expected[trial_id].outcome, expected[trial_id].reason)
        assert [rank.losses for rank in record.ranks] == [rank.losses for rank in expected[trial_id].ranks]
    several = [record for record in found.values() if record.setup.world_size == 2]
    assert [{rank.environment["node"] for rank in record.ranks} for record in several] == [{"n1", "n2"}] * 4
    assert not list((job.folder / "set-aside").glob("*"))


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True], ids=["its slurmd is killed", "it loses its power"])
def test_a_node_that_dies_costs_the_trial_that_runs_and_no_other(
    whole: bool, cluster: SlurmCluster, tmp_path: Path
) -> None:
    cluster.wait_for_nodes()
    minutes_then_milliseconds = "world_size = 4\ngradient_accumulation_steps = [5000, 1]"
    file = write_tiny_sweep(tmp_path, minutes_then_milliseconds, "timeout_seconds = 300")
    job = Job(cluster, file, "--time", "20")
    try:
        job.wait_for(lambda _status: len(list(job.folder.glob(".scratch/*/rank-*.node"))) == 4, 200)  # its ranks run
        cluster.kill_node("n2", whole)
        job.wait_for(lambda status: status["outcomes"].get("crashed") == 1, 200)
        (crashed,) = job.records().values()
        assert re.match(r"node n2 stopped answering, with ranks? \d(, \d)? in \w+", str(crashed.reason))
    finally:
        cluster.start_node("n2")
    job.wait_for(lambda status: status["state"] == "done", 300)
    assert "the job has lost n2; 1 of 2 are done; job" in job.log
    assert sorted(record.outcome.value for record in job.records().values()) == ["crashed", "ok"]


def test_two_jobs_on_two_nodes_do_not_run_the_same_sweep(cluster: SlurmCluster, tmp_path: Path) -> None:
    cluster.wait_for_nodes()
    file = write_tiny_sweep(tmp_path, "world_size = 2\nseed = [0, 1, 2, 3, 4, 5]", "timeout_seconds = 200")
    job = Job(cluster, file, "--time", "10", nodes=1)
    refused = cluster.run(*job.words)
    assert refused.returncode == 2
    assert f"job {job.id} runs this sweep already" in refused.stderr
    cluster.ask("sbatch", str(job.folder / "submit.sbatch"))  # by hand
    job.wait_for(lambda status: status["state"] == "done", 400)
    cluster.wait_for_nodes()
    assert [record.outcome.value for record in job.records().values()] == ["ok"] * 6
    assert len(re.findall(r"^\[\d/6\] ", job.log, re.MULTILINE)) == 6
