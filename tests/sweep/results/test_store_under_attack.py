"""The sweep's folder: leftovers of dead managers, a lock that is taken away, odd names, damaged files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from fsdp_bench.spec.errors import ResultsError, SpecError
from fsdp_bench.spec.record import read_record
from fsdp_bench.sweep.config.reading import check_folder_name
from fsdp_bench.sweep.results.load import load_results, read_records
from fsdp_bench.sweep.results.store import Store
from tests.conftest import run_command

QUICK = Path(__file__).parents[3] / "results" / "xeon-2-cores" / "cpu"


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A sweep's folder with three records."""
    folder = tmp_path / "here" / "quick"
    (folder / "trials").mkdir(parents=True)
    for path in sorted((QUICK / "trials").glob("*.json"))[:3]:
        shutil.copy(path, folder / "trials")
    shutil.copy(QUICK / "machine.json", folder)
    return folder


def ended_process() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    return process.pid


def test_what_a_killed_manager_began_to_write_is_removed_and_what_a_living_one_writes_is_kept(tmp_path: Path) -> None:
    store = Store(tmp_path / "sweep")
    store.open()
    store.close()
    dead, living = ended_process(), os.getpid()
    for name in (f".trials.csv.{dead}.tmp", f".frontier.csv.{living}.tmp", ".my.notes.tmp", f"trials.csv.{dead}.tmp"):
        (store.folder / name).write_text("")
    store.open()
    store.close()
    left = {path.name for path in store.folder.iterdir()} - {"trials", ".lock", ".writer.2"}
    assert left == {f".frontier.csv.{living}.tmp", ".my.notes.tmp", f"trials.csv.{dead}.tmp"}


def test_a_scratch_folder_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("")
    store = Store(tmp_path / "sweep")
    store.folder.mkdir()
    store.scratch.symlink_to(elsewhere)
    store.open()
    scratch = store.make_scratch("0" * 12)
    store.close()
    assert not scratch.is_relative_to(elsewhere)
    assert [path.name for path in elsewhere.iterdir()] == ["precious"]


def test_a_record_is_not_written_without_the_lock_or_over_another(results: Path) -> None:
    path = next((results / "trials").glob("*.json"))
    record = read_record(path.read_bytes(), path.name)
    store = Store(results)
    store.open()
    with pytest.raises(ResultsError, match="has recorded this trial meanwhile"):
        store.write_record(record)
    path.unlink()
    (results / ".lock").unlink()
    other = Store(results)  # a second manager, which finds no lock
    other.open()
    with pytest.raises(ResultsError, match="was removed or replaced"):
        store.write_record(record)
    other.write_record(record)
    other.close()
    store.close()


def test_a_sweep_may_be_named_trials(results: Path) -> None:
    named = results.rename(results.with_name("trials"))
    for folder in (results.parent, named, named / "trials"):
        assert len(read_records(folder)) == 3


def test_a_damaged_record_is_named_in_one_line_and_the_others_are_read(results: Path) -> None:
    damaged, *_ = sorted((results / "trials").glob("*.json"))
    data = bytearray(damaged.read_bytes())
    data[40] = 0xFF
    damaged.write_bytes(data)
    done = run_command("report", results)
    assert done.returncode == 0
    (line,) = done.stderr.strip().splitlines()
    assert damaged.name in line
    assert "2 trials" in done.stdout
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert len(load_results(results)) == 2
    assert damaged.name in str(caught[0].message)
    store = Store(results)
    assert [len(found) for found in store.read_all()] == [2, 1]
    assert (results / "set-aside" / f"{damaged.stem}.1.json").read_bytes() == data


def test_a_machines_name_does_not_lead_out_of_the_results(tmp_path: Path) -> None:
    for name in ("../../x", "/abs", "..", "", "x" * 300):
        with pytest.raises(SpecError, match="--machine"):
            check_folder_name(name, "--machine")
    (tmp_path / "s.toml").write_text('[run]\ndevice = "cpu"\n[grid]\nparams = "10M"\n')
    done = run_command("sweep", tmp_path / "s.toml", "--results", tmp_path / "r", "--machine", "../x", "--list")
    assert done.returncode == 2
    assert "--machine" in done.stderr
