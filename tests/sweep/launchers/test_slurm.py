"""Sweeps in jobs of a real Slurm, of two nodes on this machine: time limits, requeues, nodes that die."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.sweep.launchers.processes import free_port
from fsdp_bench.sweep.results.load import read_records
from tests.conftest import run_command, write_tiny_sweep
from tests.processes import processes_with

PACKAGES = "slurm-wlm and munge"
REQUIRED = "FSDP_BENCH_TEST_SLURM"
"""The environment variable with which .ci/run says that these tests must not be skipped."""

_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "munged", "mungekey")

_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SlurmdTimeout=5
KillWait=5
SchedulerParameters=sched_interval=1,bf_interval=2
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=1000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=1000
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=60 State=UP
"""


class SlurmCluster:
    """The running cluster: nodes n1 and n2."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": _path()}

    def ask(self, *command: str) -> str:
        """Run a command of Slurm's; return what it prints."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def start_node(self, name: str) -> None:
        """Start a node's daemon."""
        self.ask("slurmd", "-f", str(self.folder / "slurm.conf"), "-N", name)

    def kill_node(self, name: str, whole: bool = False) -> None:
        """Kill a node's daemon; with ``whole`` everything that runs on the node, as if its power had failed."""
        daemon = psutil.Process(int((self.folder / f"{name}.pid").read_text()))
        steps = [one for one in processes_with("SLURMD_NODENAME", name) if _is_step(one) and one != daemon]
        parents = [parent for one in steps if (parent := one.parent()) and parent.name() == "slurmstepd"]
        for victim in [daemon, *(steps + parents if whole else [])]:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()

    def wait_for_nodes(self, seconds: float = 120.0) -> None:
        """Wait until both nodes are idle."""
        wait_for(lambda: self.ask("sinfo", "--noheader", "--format=%T %D") == "idle 2", seconds)


def wait_for(condition: Callable[[], object], seconds: float) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"did not happen within {seconds:g} s"
        time.sleep(0.2)


def _path() -> str:
    return os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))


def _is_step(process: psutil.Process) -> bool:
    """Whether a process belongs to a job step on a node."""
    with contextlib.suppress(psutil.Error, OSError):
        return "SLURM_STEP_ID" in process.environ()
    return False


def why_none() -> str | None:
    """Return why no cluster can be started here; None if one can."""
    missing = [name for name in _PROGRAMS if shutil.which(name, path=_path()) is None]
    if missing:
        return f"{missing[0]} is not installed: apt-get install {PACKAGES}"
    if os.geteuid() != 0:
        return "Slurm's daemons start jobs as their owner, which takes root"
    return None


@contextlib.contextmanager
def running_cluster(folder: Path) -> Iterator[SlurmCluster]:
    """Start a cluster with its files in a folder; end all of its processes afterwards."""
    reason = why_none()
    if reason is not None:
        if os.environ.get(REQUIRED):
            pytest.fail(f"{REQUIRED} is set, and {reason}")
        pytest.skip(reason)
    cluster = SlurmCluster(folder)
    host = socket.gethostname().partition(".")[0]
    for name in ("state", "n1", "n2"):
        (folder / name).mkdir()
    ports = [free_port() for _ in range(3)]
    (folder / "slurm.conf").write_text(_CONFIGURATION.format(host=host, folder=folder, ports=ports).lstrip())
    with _munge(cluster):
        try:
            cluster.ask("slurmctld", "-f", str(folder / "slurm.conf"))
            for name in ("n1", "n2"):
                cluster.start_node(name)
            cluster.wait_for_nodes()
            yield cluster
        finally:
            _end(cluster)


@contextlib.contextmanager
def _munge(cluster: SlurmCluster) -> Iterator[None]:
    """Have munged running, which one machine has once."""
    if subprocess.run(["munge", "--no-input"], capture_output=True, check=False).returncode == 0:
        yield
        return
    if not Path("/etc/munge/munge.key").exists():
        cluster.ask("mungekey", "--create")
    Path("/run/munge").mkdir(mode=0o755, exist_ok=True)
    for path in ("/etc/munge/munge.key", "/run/munge"):
        shutil.chown(path, "munge", "munge")
    words = ["runuser", "-u", "munge", "--", "/usr/sbin/munged", "--foreground"]
    daemon = subprocess.Popen(words, env=cluster.environment, stderr=subprocess.DEVNULL)
    try:
        answers = ["munge", "--no-input"]
        wait_for(lambda: subprocess.run(answers, capture_output=True, check=False).returncode == 0, 10)
        yield
    finally:
        daemon.terminate()
        daemon.wait()


def _end(cluster: SlurmCluster) -> None:
    with contextlib.suppress(AssertionError):
        cluster.ask("scancel", "--user=root")
    pids = {int(path.read_text()) for path in cluster.folder.glob("*.pid")}
    pids |= {one.pid for one in processes_with("SLURM_CONF", cluster.environment["SLURM_CONF"])}
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


pytestmark = pytest.mark.timeout(900)

GRID = """
world_size = 1
[[include]]
world_size = 2
strategy = ["FULL_SHARD", "SHARD_GRAD_OP"]
api = ["fsdp1", "fsdp2"]
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with running_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def no_job_is_left(cluster: SlurmCluster) -> Iterator[None]:
    """Cancel the jobs of a test that failed, for which the next test would wait."""
    yield
    cluster.ask("scancel", "--me")


def run_in(cluster: SlurmCluster, *words: object) -> subprocess.CompletedProcess[str]:
    """Run fsdp-bench in this process as in one of the cluster's users."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.environment.items():
            patch.setenv(name, value)
        return run_command(*words)


class Job:
    """A sweep that was submitted."""

    def __init__(self, cluster: SlurmCluster, file: Path, *options: str, nodes: int = 2, ranks: int = 2) -> None:
        self._cluster = cluster
        self.results = file.parent / "results"
        self.words = ("submit", file, "--nodes", nodes, "--ranks-per-node", ranks, "--results", self.results, *options)
        self.submitted = self._run(*self.words)
        self.folder = self.results / f"{nodes}x{ranks}-slurm" / file.stem

    def _run(self, *words: object) -> str:
        done = run_in(self._cluster, *words)
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

    def wait_for(self, condition: Callable[[dict[str, Any]], object], seconds: float) -> None:
        try:
            wait_for(lambda: condition(self.status()), seconds)
        finally:
            print(self.log)

    def records(self) -> dict[str, TrialRecord]:
        return {record.id: record for record in read_records(self.results)}


def losses(record: TrialRecord) -> list[tuple[float, ...]]:
    return [rank.losses for rank in record.ranks]


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
        assert losses(record) == losses(expected[trial_id])
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
    refused = run_in(cluster, *job.words)
    assert refused.returncode == 2
    assert f"job {job.id} runs this sweep already" in refused.stderr
    cluster.ask("sbatch", str(job.folder / "submit.sbatch"))  # by hand
    job.wait_for(lambda status: status["state"] == "done", 400)
    cluster.wait_for_nodes()
    assert [record.outcome.value for record in job.records().values()] == ["ok"] * 6
    assert len(re.findall(r"^\[\d/6\] ", job.log, re.MULTILINE)) == 6
