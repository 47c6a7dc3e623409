"""A sweep in a folder with an odd name, run beside files that have the names of Python's own modules."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from fsdp_bench.spec.rank_report import Outcome
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.sweep.results.load import load_results, read_records
from tests.conftest import command, run_command, write_tiny_sweep

ODD = os.fsdecode(b"run#2?a=b\ncaf\xe9 %20")
DIVERGING = ("world_size = 2\nlearning_rate = 1e10", "steps = 3", "s")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a sweep has run, with results where they go by default."""
    folder = tmp_path_factory.mktemp("place") / ODD
    folder.mkdir()
    write_tiny_sweep(folder, *DIVERGING)
    (folder / "random.py").write_text("open('imported', 'w')\nraise SystemExit(7)")
    words = command("sweep", "s.toml", "--machine", "m", "--no-charts")
    done = subprocess.run(
        [words[0], "-P", *words[1:]], cwd=folder, capture_output=True, timeout=200, errors="backslashreplace"
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def record(place: Path) -> TrialRecord:
    (record,) = read_records(place / "results")
    return record


def test_ranks_meet_whatever_the_folders_name_is(place: Path, record: TrialRecord) -> None:
    assert record.outcome is Outcome.OK
    # No results beside the folder, and nothing in the current folder was imported.
    assert {path.name for path in place.iterdir()} == {"s.toml", "random.py", "results"}
    assert not (place / "results" / "m" / "s" / ".scratch").exists()


def test_a_trial_whose_loss_diverges_is_ok_and_keeps_what_it_measured(place: Path, record: TrialRecord) -> None:
    assert (record.reason or "").startswith("loss became nan at step ")
    for rank in record.ranks:
        assert len(rank.losses) == 5
        assert rank.memory is not None
        assert len(rank.step_seconds) == 3
    assert record.final_loss is None
    assert load_results(place / "results")["reason"][0] == record.reason


def test_results_are_found_and_named_in_a_folder_whose_name_is_not_utf8(
    place: Path, record: TrialRecord, tmp_path: Path
) -> None:
    """Python holds the byte e9 as the surrogate U+DCE9 (PEP 383), which no terminal can show."""
    shutil.copytree(place / "results", tmp_path / ODD)
    words = ("sweep", place / "s.toml", "--results", ODD, "--machine", "m", "--no-charts")
    done = run_command(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert r"1 already recorded; results in run#2?a=b\ncaf\udce9 %20/m/s" in done.stderr
    name = f"m/s/trials/{record.id}.json"
    assert (tmp_path / ODD / name).read_bytes() == (place / "results" / name).read_bytes()


def test_a_server_that_does_not_start_is_no_trials_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a torch that cannot be imported."""
    broken = tmp_path / "broken"
    (broken / "torch").mkdir(parents=True)
    (broken / "torch" / "__init__.py").write_text("raise ImportError('libcudart is missing')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(broken), os.environ.get("PYTHONPATH", "")]))
    done = run_command("sweep", write_tiny_sweep(tmp_path, *DIVERGING), "--results", tmp_path / "r", "--machine", "m")
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert "did not start" in last
    assert "ImportError: libcudart is missing" in last
    assert not list((tmp_path / "r" / "m" / "s" / "trials").iterdir())
    shutil.rmtree(broken)
