"""Processes that end with a trial or a sweep, with real launchers; and the addresses on which a trial listens."""

from __future__ import annotations

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
from tests.processes import processes_with
from tests.sweep.run.test_survival import Sweep, wait_for_ranks, wait_until_gone
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


def test_processes_that_a_trial_leaves_are_ended_but_not_the_fork_server(tmp_path: Path) -> None:
    server = ForkServer(tmp_path / "server.log", str(tmp_path))
    run_trial(server, tmp_path)
    left = subprocess.Popen(["sleep", "1000"], env=worker_environment(server._mark), start_new_session=True)
    other = subprocess.Popen(["sleep", "1000"], env=worker_environment("another sweep"), start_new_session=True)
    try:
        server.end_leftovers()
        assert left.wait(5) < 0
        assert other.poll() is None
        assert run_trial(server, tmp_path) == [RankExit(rank=0, exit_code=0)]
    finally:
        server.close()
        end_marked("another sweep")
    assert other.wait(5) < 0


def test_processes_that_a_sweep_leaves_are_ended_at_its_end(tmp_path: Path) -> None:
    left = subprocess.Popen(["sleep", "1000"], env=worker_environment("this sweep"), start_new_session=True)
    ForkServer(tmp_path / "server.log", "this sweep").close()
    assert left.wait(5) < 0


def test_a_process_that_is_starting_a_program_is_found(tmp_path: Path) -> None:
    (tmp_path / "exe").symlink_to("/bin/sleep")
    (tmp_path / "environ").write_bytes(b"")  # so it reads within execve
    threading.Timer(0.02, (tmp_path / "environ").write_bytes, [b"A=1\0B=2\0"]).start()
    assert environment_of(tmp_path) == b"A=1\0B=2\0"


def test_a_process_without_a_program_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "environ").write_bytes(b"")  # a kernel thread, or a process that has ended
    with pytest.raises(OSError, match="exe"):
        environment_of(tmp_path)


def listening(mark: str) -> set[str]:
    """Return the addresses at which the processes of a sweep listen."""
    found = set()
    for process in processes_with(MARK, mark):
        with contextlib.suppress(psutil.Error):
            listens = [one for one in process.net_connections() if one.status == psutil.CONN_LISTEN]
            found |= {connection.laddr.ip for connection in listens}
    return found


def test_a_trial_under_torchrun_listens_on_the_loopback_interface_only_and_dies_with_its_manager(
    write_sweep: Callable[..., Path], tmp_path: Path
) -> None:
    endless = "launcher = 'torchrun'\nsteps = 5000\ntimeout_seconds = 300"
    sweep = Sweep(write_sweep("world_size = 2", endless), tmp_path / "results")
    manager = sweep.start()
    try:
        ranks = wait_for_ranks(manager, 2)
        found, deadline = set[str](), time.monotonic() + 200
        while not found and time.monotonic() < deadline:  # gloo's, once the ranks have met
            found |= listening(mark_of(sweep.folder))
            time.sleep(0.2)
        time.sleep(0.5)
        found |= listening(mark_of(sweep.folder))
    finally:
        manager.kill()
        sweep.end(manager)
    assert found
    assert found <= {"127.0.0.1", "::1"}
    assert not wait_until_gone(ranks)


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
