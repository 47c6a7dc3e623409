"""A frontier sweep with real gloo ranks: killed, resumed, with a rank that crashes."""

import csv
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.frontier import FrontierRecord, read_frontier
from fsdp_bench.spec.rank_report import Outcome
from fsdp_bench.spec.record import read_record
from tests.processes import Sweep, children_of, wait_until
from tests.sweep.shared_processes import SharedForkServer


@pytest.fixture
def search(new_sweep: Callable[..., Sweep]) -> Callable[[str], Sweep]:
    """Return a function that makes the Sweep of a frontier of 1 to 32 layers."""
    layers = "[frontier]\nof = 'num_hidden_layers'\nlargest = 32"
    return lambda grid: new_sweep(f"{grid}\n{layers}", "memory_limit = '600KiB'", "--machine", "m")


def folder(sweep: Sweep) -> Path:
    return sweep.results / "m" / "tiny"


def frontier(sweep: Sweep) -> FrontierRecord:
    return read_frontier((folder(sweep) / "frontier.json").read_bytes(), "frontier.json")


def test_a_killed_frontier_resumes_repeats_nothing_and_never_runs_above_what_ran_out(
    search: Callable[[str], Sweep],
) -> None:
    sweep = search("api = 'fsdp2'\nstrategy = ['FULL_SHARD', 'NO_SHARD']")
    wait_until(sweep.records, sweep.start())
    sweep.end()
    before, done = sweep.records(), sweep.run()
    assert done.returncode == 0, done.stderr
    after = sweep.records()
    assert all(after[trial] == data for trial, data in before.items())
    found = frontier(sweep)
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
    with open(folder(sweep) / "frontier.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["measured_fits"]) for row in rows] == [c.measured.fits for c in found.cells if c.measured]
    assert sweep.run().returncode == 0
    assert sweep.records() == after
    listed = " ".join(sweep.run("--list").stdout.split())
    assert f"larger than {found.cells[0].measured.limited_by.value} layers, which ran out of memory" in listed
    (folder(sweep) / "frontier.json").unlink()
    assert sweep.run("--only", "strategy=zero3").returncode == 0
    assert frontier(sweep) == found  # rebuilt, and of the whole sweep


def kill_a_rank() -> None:
    """Kill one of two ranks of the first trial that the sweep in this process starts."""
    wait_until(lambda: len(SharedForkServer.ranks()) == 2)
    SharedForkServer.ranks()[0].kill()


def test_a_crash_is_not_taken_as_full_and_the_next_cell_goes_on(search: Callable[[str], Sweep]) -> None:
    sweep = search("world_size = 2\napi = 'fsdp2'\nstrategy = ['FULL_SHARD', 'NO_SHARD']")
    with ThreadPoolExecutor(max_workers=1) as pool:
        killed = pool.submit(kill_a_rank)
        assert sweep.run().returncode == 1
        killed.result()
    crashed, other = frontier(sweep).cells
    assert (crashed.status, crashed.measured) == ("unknown", None)
    assert "SIGKILL" in (crashed.reason or "")
    assert other.status == "found"
    assert sweep.run("--list").returncode == 0
    assert sweep.run("--retry", "crashed").returncode == 0
    assert [cell.status for cell in frontier(sweep).cells] == ["found", "found"]


def test_an_interrupt_ends_with_130_and_says_that_the_same_command_resumes(search: Callable[[str], Sweep]) -> None:
    sweep = search("api = 'fsdp2'")
    manager = sweep.start()
    wait_until(lambda: children_of(manager), manager)
    manager.terminate()  # SIGTERM is taken as an interrupt
    assert manager.wait(200) == 130
    assert "0 of 1 cells are done, the same command resumes" in " ".join(sweep.log().split())
    assert frontier(sweep).cells[0].status == "not searched"


def test_the_list_says_where_each_search_begins_and_writes_nothing(search: Callable[[str], Sweep]) -> None:
    sweep = search("strategy = ['FULL_SHARD', 'HYBRID_SHARD']")
    done = sweep.run("--list")
    assert done.returncode == 0
    first, second, total = done.stdout.replace("\n  ", " ").splitlines()
    assert "searches 32 steps, 1 layer to 32 layers, from" in first
    assert "predicted to fit" in first
    assert "skipped: HYBRID_SHARD needs" in second
    assert total == "2 cells, 1 to search, 0 of them found, 1 skipped"
    assert not sweep.results.exists()


def test_a_frontier_of_a_newer_version_is_refused_by_name() -> None:
    with pytest.raises(SpecError, match=r"frontier.json: schema_version 99 was written by a newer fsdp-bench"):
        read_frontier(b'{"schema_version": 99}', "frontier.json")
