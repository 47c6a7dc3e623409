"""A frontier sweep with real gloo ranks: killed, resumed, with a rank that crashes."""

from __future__ import annotations

import csv
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.frontier import FrontierRecord, read_frontier
from fsdp_bench.spec.rank_report import Outcome
from fsdp_bench.spec.record import read_record
from tests.conftest import command, run_command, write_tiny_sweep
from tests.processes import children_of
from tests.sweep.shared_processes import SharedForkServer

FRONTIER = "[frontier]\nof = 'num_hidden_layers'\nlargest = 32"


@pytest.fixture
def sweep(tmp_path: Path) -> Callable[..., list[str]]:
    """Return a function that writes a frontier sweep and returns the words that run it."""

    def write(grid: str) -> list[str]:
        path = write_tiny_sweep(tmp_path, f"{grid}\n{FRONTIER}", "memory_limit = '600KiB'")
        return ["sweep", str(path), "--results", str(tmp_path / "results"), "--machine", "m"]

    return write


def folder(tmp_path: Path) -> Path:
    return tmp_path / "results" / "m" / "tiny"


def records(tmp_path: Path) -> dict[str, bytes]:
    return {path.stem: path.read_bytes() for path in (folder(tmp_path) / "trials").glob("*.json")}


def frontier(tmp_path: Path) -> FrontierRecord:
    return read_frontier((folder(tmp_path) / "frontier.json").read_bytes(), "frontier.json")


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def start(words: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command(*words), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def test_a_killed_frontier_resumes_repeats_nothing_and_never_runs_above_what_ran_out(
    sweep: Callable[..., list[str]], tmp_path: Path
) -> None:
    words = sweep("api = 'fsdp2'\nstrategy = ['FULL_SHARD', 'NO_SHARD']")
    manager = start(words)
    wait_for(lambda: records(tmp_path))
    manager.kill()
    manager.wait()
    before = records(tmp_path)
    done = run_command(*words)
    assert done.returncode == 0, done.stderr
    after = records(tmp_path)
    assert all(after[trial] == data for trial, data in before.items())
    found = frontier(tmp_path)
    for cell in found.cells:
        assert cell.status == "found"
        assert cell.measured.fits == cell.predicted.fits > 0
        assert cell.steps_apart == 0
        assert len(cell.trials) == 2
        full = read_record(after[str(cell.measured.limited_by.trial_id)], "full")
        assert full.outcome is Outcome.OOM_HOST
        assert full.model.num_hidden_layers == cell.measured.fits + 1
    assert {trial for cell in found.cells for trial in cell.trials} == set(after)
    assert "2 of 2 cells found; predicted and measured are the same step in 2 of 2" in done.stdout
    with open(folder(tmp_path) / "frontier.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["measured_fits"]) for row in rows] == [c.measured.fits for c in found.cells if c.measured]
    assert run_command(*words).returncode == 0
    assert records(tmp_path) == after
    listed = " ".join(run_command(*words, "--list").stdout.split())
    assert f"larger than {found.cells[0].measured.limited_by.value} layers, which ran out of memory" in listed
    (folder(tmp_path) / "frontier.json").unlink()
    assert run_command(*words, "--only", "strategy=zero3").returncode == 0
    assert frontier(tmp_path) == found  # rebuilt, and of the whole sweep


def kill_a_rank() -> None:
    """Kill one of two ranks of the first trial that the sweep in this process starts."""
    wait_for(lambda: len(SharedForkServer.ranks()) == 2)
    SharedForkServer.ranks()[0].kill()


def test_a_crash_is_not_taken_as_full_and_the_next_cell_goes_on(
    sweep: Callable[..., list[str]], tmp_path: Path
) -> None:
    words = sweep("world_size = 2\napi = 'fsdp2'\nstrategy = ['FULL_SHARD', 'NO_SHARD']")
    with ThreadPoolExecutor(max_workers=1) as pool:
        killed = pool.submit(kill_a_rank)
        assert run_command(*words).returncode == 1
        killed.result()
    crashed, other = frontier(tmp_path).cells
    assert (crashed.status, crashed.measured) == ("unknown", None)
    assert "SIGKILL" in (crashed.reason or "")
    assert other.status == "found"
    assert run_command(*words, "--list").returncode == 0
    assert run_command(*words, "--retry", "crashed").returncode == 0
    assert [cell.status for cell in frontier(tmp_path).cells] == ["found", "found"]


def test_an_interrupt_ends_with_130_and_says_that_the_same_command_resumes(
    sweep: Callable[..., list[str]], tmp_path: Path
) -> None:
    words = sweep("api = 'fsdp2'")
    manager = subprocess.Popen(command(*words), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: children_of(manager))
    manager.terminate()  # SIGTERM is taken as an interrupt
    _, text = manager.communicate(timeout=200)
    assert manager.returncode == 130
    assert "0 of 1 cells are done, the same command resumes" in text
    assert frontier(tmp_path).cells[0].status == "not searched"


def test_the_list_says_where_each_search_begins_and_writes_nothing(
    sweep: Callable[..., list[str]], tmp_path: Path
) -> None:
    done = run_command(*sweep("strategy = ['FULL_SHARD', 'HYBRID_SHARD']"), "--list")
    assert done.returncode == 0
    first, second, total = done.stdout.replace("\n  ", " ").splitlines()
    assert "searches 32 steps, 1 layer to 32 layers, from" in first
    assert "predicted to fit" in first
    assert "skipped: HYBRID_SHARD needs" in second
    assert total == "2 cells, 1 to search, 0 of them found, 1 skipped"
    assert not (tmp_path / "results").exists()


def test_a_frontier_of_a_newer_version_is_refused_by_name() -> None:
    with pytest.raises(SpecError, match=r"frontier.json: schema_version 99 was written by a newer fsdp-bench"):
        read_frontier(b'{"schema_version": 99}', "frontier.json")
