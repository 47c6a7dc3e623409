"""A cluster of two nodes on one machine, by Debian's Slurm: a controller and two node daemons on ports of their own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

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
        daemon = int((self.folder / f"{name}.pid").read_text())
        victims = [daemon]
        if whole:
            victims += [one.pid for one in psutil.process_iter() if _is_on(one, name) and one.pid != daemon]
        for victim in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)

    def wait_for_nodes(self, seconds: float = 30.0) -> None:
        """Wait until both nodes are idle."""
        self.wait_for(lambda: self.ask("sinfo", "--noheader", "--format=%T %D") == "idle 2", seconds)

    @staticmethod
    def wait_for(condition, seconds: float) -> None:  # type: ignore[no-untyped-def]
        """Wait until something is so."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"did not happen within {seconds:g} s"
            time.sleep(0.2)


def _path() -> str:
    return os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))


def _is_on(process: psutil.Process, name: str) -> bool:
    """Whether a process belongs to a job step on a node, or is the step's daemon."""
    with contextlib.suppress(psutil.Error, OSError):
        variables = process.environ()
        if process.name() == "slurmstepd":
            return any(_is_on(child, name) for child in process.children())
        return variables.get("SLURMD_NODENAME") == name and "SLURM_STEP_ID" in variables
    return False


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


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
    (folder / "slurm.conf").write_text(_CONFIGURATION.format(host=host, folder=folder, ports=_free_ports(3)).lstrip())
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
        cluster.wait_for(lambda: subprocess.run(answers, capture_output=True, check=False).returncode == 0, 10)
        yield
    finally:
        daemon.terminate()
        daemon.wait()


def _end(cluster: SlurmCluster) -> None:
    with contextlib.suppress(AssertionError):
        cluster.ask("scancel", "--user=root")
    pids = [int(path.read_text()) for path in cluster.folder.glob("*.pid")]
    steps = [one.pid for one in psutil.process_iter() if _has_configuration(one, cluster) and one.pid not in pids]
    for pid in (*pids, *steps):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _has_configuration(process: psutil.Process, cluster: SlurmCluster) -> bool:
    with contextlib.suppress(psutil.Error, OSError):
        return process.pid != os.getpid() and process.environ().get("SLURM_CONF") == cluster.environment["SLURM_CONF"]
    return False
