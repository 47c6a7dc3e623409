"""Results: broken, foreign, newer and unwritable ones."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fsdp_bench.spec.errors import ResultsError, SpecError
from fsdp_bench.spec.rank_report import Outcome
from fsdp_bench.spec.record import read_record
from fsdp_bench.sweep.config.reading import check_folder_name
from fsdp_bench.sweep.results.load import load_results, read_records
from fsdp_bench.sweep.results.store import Store
from tests.conftest import run_command
from tests.sweep.conftest import resume


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Return a function that mounts a small file system; skips where that is not allowed."""
    places: list[Path] = []

    def mount(options: str) -> Path:
        place = tmp_path / f"mounted-{len(places)}"
        place.mkdir()
        words = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
        if os.geteuid() != 0 or subprocess.run(words, capture_output=True).returncode:
            pytest.skip("mounting a file system needs root")
        places.append(place)
        return place

    yield mount
    for place in places:
        subprocess.run(["umount", "-l", str(place)], check=True)


def one_line(text: str) -> str:
    lines = text.strip().splitlines()
    assert len(lines) == 1, text
    return lines[0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("ro,size=1m", "results cannot be written: Read-only file system"),
        ("size=32k", "No space left on device; free space"),
        (None, "results cannot be written: Not a directory"),
    ],
)
def test_a_results_folder_that_cannot_be_written_is_one_line_and_exit_code_2(
    options: str | None, said: str, write_sweep: Callable[..., Path], mounted: Callable[[str], Path], tmp_path: Path
) -> None:
    results = tmp_path / "file" if options is None else mounted(options)
    if options is None:
        results.write_text("")
    done = run_command("sweep", write_sweep("world_size = 1"), "--results", results)
    assert done.returncode == 2
    assert said in one_line(done.stderr)


@pytest.mark.parametrize(
    ("options", "num_trials"),
    [("size=80k", 20), pytest.param("size=4m,nr_inodes=13", 2, marks=pytest.mark.slow), ("size=4m,nr_inodes=15", 2)],
)
def test_a_disk_that_fills_up_during_the_sweep_is_no_trials_outcome(
    options: str, num_trials: int, write_sweep: Callable[..., Path], mounted: Callable[[str], Path]
) -> None:
    """The ranks' files are gone when a record is written, so that there is space again."""
    results = mounted(options)
    grid = f"world_size = 1\nseed = {list(range(num_trials))}"
    done = run_command("sweep", write_sweep(grid), "--results", results, "--no-charts")
    assert done.returncode == 2
    assert "No space left on device; free space" in done.stderr.strip().splitlines()[-1]
    records = list(results.glob("*/tiny/trials/*.json"))
    assert (num_trials > 2) <= len(records) < num_trials
    for path in records:
        assert read_record(path.read_bytes(), path.name).outcome is Outcome.OK


def test_a_record_cut_in_half_is_set_aside_by_name_and_its_trial_runs_again(copied: Path) -> None:
    folder = copied / "m" / "tiny"
    cut, *whole = sorted((folder / "trials").glob("*.json"))
    half = cut.read_bytes()[: cut.stat().st_size // 2]
    cut.write_bytes(half)
    untouched = [path.read_bytes() for path in whole]
    report = run_command("report", folder)
    assert report.returncode == 0  # the other records are read
    assert cut.name in one_line(report.stderr)
    with pytest.warns(UserWarning, match=cut.name):
        assert len(load_results(folder)) == len(whole)
    done = resume(copied)
    assert done.returncode == 0
    assert f"{cut.name} is not a whole record" in " ".join(done.stderr.split())
    assert (folder / "set-aside" / f"{cut.stem}.1.json").read_bytes() == half
    assert read_record(cut.read_bytes(), cut.name).outcome is Outcome.OK
    assert [path.read_bytes() for path in whole] == untouched


def test_a_record_of_a_newer_version_is_refused_by_name_and_kept(copied: Path) -> None:
    path = min((copied / "m" / "tiny" / "trials").glob("*.json"))
    newer = path.read_bytes().replace(b'"schema_version": 1', b'"schema_version": 99')
    path.write_bytes(newer)
    done = resume(copied)
    assert done.returncode == 2
    message = one_line(done.stderr)
    assert str(path) in message
    assert "schema_version 99 was written by a newer fsdp-bench" in message
    assert path.read_bytes() == newer


def test_results_load_as_a_table_with_units_in_the_names(swept: Path) -> None:
    table = load_results(swept / "m" / "tiny")
    assert set(table["source"]) == {"measured"}
    assert set(table["device"]) == {"cpu"}
    assert (table["requested_strategy"] == "FULL_SHARD").all()
    alone = table["world_size"] == 1
    assert (alone == (table["effective_strategy"] == "NO_SHARD")).all()  # FSDP1 in a world of one
    assert ((table["peak_allocated_bytes"] > 0) == (table["outcome"] != "skipped")).all()
    csv = (swept / "m" / "tiny" / "trials.csv").read_text().splitlines()
    assert len(csv) == 1 + len(table) == 1 + 5
    assert csv[0].split(",") == list(table.columns)
    as_json = json.loads(run_command("report", swept, "--json").stdout)
    assert [row["id"] for row in as_json["trials"]] == list(table["id"])


def test_a_trial_that_timed_out_runs_again_under_a_longer_limit_only(
    write_sweep: Callable[..., Path], tmp_path: Path
) -> None:
    def run(limit: float) -> int:
        file = write_sweep("world_size = 1", f"timeout_seconds = {limit}\nsteps = 200")  # longer than one look
        return run_command("sweep", file, "--results", tmp_path, "--machine", "m", "--no-charts").returncode

    assert run(0.01) == 1
    folder = tmp_path / "m" / "tiny"
    (path,) = (folder / "trials").glob("*.json")
    first = path.read_bytes()
    assert read_record(first, path.name).outcome is Outcome.TIMEOUT
    assert run(0.01) == 1
    assert path.read_bytes() == first
    assert run(60) == 0
    assert read_record(path.read_bytes(), path.name).outcome is Outcome.OK
    assert len(list((folder / "set-aside").iterdir())) == 1
    shutil.rmtree(folder)


def test_what_a_killed_manager_began_to_write_is_removed_and_what_a_living_one_writes_is_kept(tmp_path: Path) -> None:
    store = Store(tmp_path / "sweep")
    store.open()
    store.close()
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    dead, living = ended.pid, os.getpid()
    for name in (f".trials.csv.{dead}.tmp", f".frontier.csv.{living}.tmp", ".my.notes.tmp", f"trials.csv.{dead}.tmp"):
        (store.folder / name).write_text("")
    (store.trials / f".abc.json.{dead}.tmp").write_text("{")
    store.scratch.mkdir()
    store.open()
    assert not store.scratch.exists()
    store.close()
    left = {path.name for path in store.folder.iterdir()} - {"trials", ".writer.2"}
    assert left == {f".frontier.csv.{living}.tmp", ".my.notes.tmp", f"trials.csv.{dead}.tmp"}
    assert list(store.trials.iterdir()) == []


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


def test_a_record_is_not_written_without_the_lock_or_over_another(copied: Path) -> None:
    folder = copied / "m" / "tiny"
    path = next((folder / "trials").glob("*.json"))
    record = read_record(path.read_bytes(), path.name)
    store = Store(folder)
    store.open()
    with pytest.raises(ResultsError, match="has recorded this trial meanwhile"):
        store.write_record(record)
    path.unlink()
    next(folder.glob(".writer.*")).unlink()
    other = Store(folder)  # a second manager, which finds no writer
    other.open()
    with pytest.raises(ResultsError, match="was removed or replaced"):
        store.write_record(record)
    other.write_record(record)
    other.close()
    store.close()


def test_a_sweep_may_be_named_trials(copied: Path) -> None:
    named = (copied / "m" / "tiny").rename(copied / "m" / "trials")
    for folder in (copied / "m", named, named / "trials"):
        assert len(read_records(folder)) == 5


def test_a_machines_name_does_not_lead_out_of_the_results() -> None:
    for name in ("../../x", "/abs", "..", "", "x" * 300):
        with pytest.raises(SpecError, match="--machine"):
            check_folder_name(name, "--machine")
