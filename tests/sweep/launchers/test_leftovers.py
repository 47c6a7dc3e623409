"""Processes that end with a trial or a sweep, with real launchers; and the addresses on which a trial listens."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from fsdp_bench.spec.codec import to_json
from fsdp_bench.spec.record import RunPlan, TrialSpec
from fsdp_bench.sweep.launchers.launcher import RankExit
from fsdp_bench.sweep.launchers.one_node import ForkServer
from fsdp_bench.sweep.launchers.processes import MARK, end_marked, environment_of, mark_of, worker_environment
from tests.processes import Sweep, processes_with, wait_for_ranks, wait_until, wait_until_gone
from tests.train.training import LLAMA, S, setup_of


def run_trial(server: ForkServer, folder: Path) -> list[RankExit]:
    """Run a trial of one rank and three steps; return how its rank ended."""
    scratch = folder / str(len(list(folder.iterdir())))
    scratch.mkdir()
    run = RunPlan(communication_steps=0, threads_per_rank=1)
    spec = TrialSpec(id="0", model=LLAMA, setup=setup_of(1, strategy=S.NO_SHARD), run=run, device="cpu")
    (scratch / "trial.json").write_bytes(to_json(spec))
    launched, ends = server.start(scratch / "trial.json", scratch, 1), list[RankExit]()
    while not launched.finished:
        ends += launched.wait(1.0)
    return ends


def sleeping(mark: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "1000"], env=worker_environment(mark), start_new_session=True)


def test_processes_that_a_trial_or_a_sweep_leaves_are_ended_but_not_the_fork_server(tmp_path: Path) -> None:
    server = ForkServer(tmp_path / "server.log", str(tmp_path))
    run_trial(server, tmp_path)
    left, other = sleeping(server._mark), sleeping("another sweep")
    try:
        server.end_leftovers()
        assert left.wait(5) < 0
        assert run_trial(server, tmp_path) == [RankExit(rank=0, exit_code=0)]
        left = sleeping(server._mark)
    finally:
        server.close()
    assert left.wait(5) < 0
    assert other.poll() is None
    end_marked("another sweep")
    assert other.wait(5) < 0


def test_a_process_that_is_starting_a_program_is_found_and_one_without_a_program_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "environ").write_bytes(b"")  # as a kernel thread or an ended process reads, and any within execve
    with pytest.raises(OSError, match="exe"):
        environment_of(tmp_path)
    (tmp_path / "exe").symlink_to("/bin/sleep")
    threading.Timer(0.02, (tmp_path / "environ").write_bytes, [b"A=1\0B=2\0"]).start()
    assert environment_of(tmp_path) == b"A=1\0B=2\0"


def listening(mark: str) -> set[str]:
    """Return the addresses at which the processes of a sweep listen."""
    found = set()
    for process in processes_with(MARK, mark):
        with contextlib.suppress(psutil.Error):
            listens = [one for one in process.net_connections() if one.status == psutil.CONN_LISTEN]
            found |= {connection.laddr.ip for connection in listens}
    return found


def test_a_trial_under_torchrun_listens_on_the_loopback_interface_only_and_dies_with_its_manager(
    new_sweep: Callable[..., Sweep],
) -> None:
    sweep = new_sweep("world_size = 2", "launcher = 'torchrun'\nsteps = 5000\ntimeout_seconds = 300")
    manager = sweep.start()
    ranks = wait_for_ranks(manager, 2)
    (folder,) = sweep.results.glob("*/*")
    mark = mark_of(folder)
    found = wait_until(lambda: listening(mark), manager)  # gloo's, once the ranks have met
    time.sleep(0.5)
    assert found | listening(mark) <= {"127.0.0.1", "::1"}
    manager.kill()
    wait_until_gone(ranks)


def test_after_its_imports_the_server_has_one_thread_and_no_cuda() -> None:
    words = [sys.executable, "-m", "fsdp_bench.train.processes.server", str(os.getpid())]
    done = subprocess.run(words, input="", capture_output=True, text=True, env=worker_environment(), timeout=200)
    assert done.stdout == '{"event": "ready", "unsafe": null}\n', done.stderr


def test_a_second_thread_makes_it_unsafe_and_the_reason_says_so() -> None:
    program = (
        "import threading, time; from fsdp_bench.train.processes.server import unsafe_to_fork\n"
        "threading.Thread(target=time.sleep, args=(5,), daemon=True).start(); print(unsafe_to_fork())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == "importing torch started 1 threads\n"
