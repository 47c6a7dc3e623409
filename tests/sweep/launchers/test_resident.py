"""Trials that share one process: their numbers are those of a process of their own, and one that fails ends it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from fsdp_bench.spec.codec import to_json
from fsdp_bench.spec.rank_report import MemoryReading, Outcome
from fsdp_bench.spec.record import RunPlan, TrialRecord, TrialSpec
from fsdp_bench.sweep.launchers.fork_server import ForkServer
from tests.conftest import records_of_sweep
from tests.sweep.test_emulation import HEAD
from tests.train.training import LLAMA, S, setup_of

GRID = """
world_size = 8
api = ["fsdp1", "fsdp2"]
strategy = ["FULL_SHARD", "NO_SHARD", "HYBRID_SHARD"]
"""


def sweep(folder: Path, launcher: str, grid: str, code: int = 0, run: str = "") -> list[TrialRecord]:
    """Run a sweep; return its records in the order of its trials."""
    folder.mkdir()
    file = folder / "sweep.toml"
    file.write_text(HEAD.format(run=f'emulate = true\nlauncher = "{launcher}"\n{run}') + grid)
    return records_of_sweep(file, code=code)


def place(record: TrialRecord) -> tuple[str, int]:
    """The launcher, and which trial of its process this was."""
    environment = record.ranks[0].environment
    return environment["launcher"], int(environment["trials_in_process"])


def numbers(record: TrialRecord) -> tuple[object, ...]:
    """Return a trial's results except times and the host's resident memory."""
    rank = record.ranks[0]
    assert isinstance(rank.memory, MemoryReading)
    memory = msgspec.structs.replace(rank.memory, peak_host_bytes=None, peak_host_cgroup_bytes=None)
    return record.outcome, memory, rank.losses, rank.effective


def test_a_shared_process_changes_no_number(tmp_path: Path) -> None:
    """Every peak by phase to the byte, every loss to the bit, what was read back: as with a process for each trial."""
    alone = {r.id: r for r in sweep(tmp_path / "alone", "fork", GRID)}
    shared = {r.id: r for r in sweep(tmp_path / "shared", "resident", GRID)}
    assert {place(record) for record in alone.values()} == {("fork", 1)}
    assert sorted(place(record) for record in shared.values()) == [("resident", n) for n in range(1, 7)]
    for trial, record in alone.items():
        assert numbers(shared[trial]) == numbers(record), record.setup
        memory = shared[trial].ranks[0].memory
        assert memory is not None
        assert (memory.peak_host_bytes is not None) == (
            place(shared[trial])[1] == 1
        )  # the resident set is the process's


def test_a_trial_that_runs_out_of_memory_ends_the_process_and_nothing_else(tmp_path: Path) -> None:
    """The next trial gets a fresh process."""
    batches = [1, 512, 2, 4]  # two may start in one second, which is all that a record tells
    grid = f'api = "fsdp1"\nstrategy = "NO_SHARD"\nworld_size = 2\nmicro_batch_size = {batches}\n'
    found = sweep(tmp_path / "shared", "resident", grid, run='memory_limit = "64 MiB"')
    records = sorted(found, key=lambda record: batches.index(record.setup.micro_batch_size))
    assert [record.outcome for record in records] == [Outcome.OK, Outcome.OOM_HOST, Outcome.OK, Outcome.OK]
    assert [place(record)[1] for record in records] == [1, 2, 1, 2]


def start(server: ForkServer, folder: Path, world_size: int, may_share_process: bool) -> Any:
    """Start a trial of three steps."""
    scratch = folder / str(len(list(folder.iterdir())))
    scratch.mkdir()
    setup = setup_of(world_size, strategy=S.NO_SHARD)
    spec = TrialSpec(
        id="0", model=LLAMA, setup=setup, run=RunPlan(communication_steps=0, threads_per_rank=1), device="cpu"
    )
    (scratch / "trial.json").write_bytes(to_json(spec))
    return server.start(scratch / "trial.json", scratch, world_size, may_share_process)


def ends_of(launched: Any) -> list[tuple[int | None, int | None]]:
    """Wait; return how its ranks ended: status, signal."""
    ends = []
    while not launched.finished:
        ends += launched.wait(1.0)
    return [(end.exit_code, end.signal) for end in ends]


@pytest.mark.parametrize(("world_size", "may_share_process"), [(1, True), (1, False), (2, True)])
def test_trials_of_one_rank_that_may_share_a_process(
    server: ForkServer, tmp_path: Path, world_size: int, may_share_process: bool
) -> None:
    """Those of several ranks get processes of their own, and so does one that must not share."""
    shares = may_share_process and world_size == 1
    numbers = []
    for _ in range(2):
        launched = start(server, tmp_path, world_size, may_share_process)
        numbers.append(launched._pgid)
        assert ends_of(launched) == [(0, None)] * world_size
        assert server.num_waiting == shares
    assert len(set(numbers)) == (1 if shares else 2)


def test_a_trial_that_must_not_share_ends_the_process_that_waits(server: ForkServer, tmp_path: Path) -> None:
    """The waiting process would hold a CUDA context on the GPU."""
    waiting = start(server, tmp_path, 1, may_share_process=True)
    ends_of(waiting)
    ends_of(start(server, tmp_path, 1, may_share_process=False))
    assert not psutil.pid_exists(waiting._pgid)


def test_a_shared_process_that_was_killed_is_replaced(server: ForkServer, tmp_path: Path) -> None:
    """Between two trials by somebody, and in a trial at its time limit: the next trial does not know of it."""
    first = start(server, tmp_path, 1, may_share_process=True)
    ends_of(first)
    os.kill(first._pgid, signal.SIGKILL)
    while server.num_waiting:
        time.sleep(0.01)
    second = start(server, tmp_path, 1, may_share_process=True)
    second.kill()
    third = start(server, tmp_path, 1, may_share_process=True)
    assert ends_of(third) == [(0, None)]
    assert len({first._pgid, second._pgid, third._pgid}) == 3
