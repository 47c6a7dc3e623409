"""fsdp-bench submit and status, without Slurm: the batch script, bad options, how far a sweep is."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import json_of, refused, stdout_of, write_tiny_sweep
from tests.processes import Sweep, wait_until

SUBMIT = "--nodes 2 --gpus-per-node 4 --time 15"


@pytest.fixture
def without_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without Slurm's commands."""
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))


@pytest.mark.usefixtures("without_slurm")
def test_the_script_says_what_it_does_and_runs_the_sweep_from_anywhere(tmp_path: Path) -> None:
    folder = tmp_path / "with blank"
    folder.mkdir()
    file = write_tiny_sweep(folder, "world_size = 8\nstrategy = ['FULL_SHARD', 'NO_SHARD']")
    extra = (
        "--partition a100 --account me --qos high --sbatch constraint=h100 --retry crashed --only strategy=FULL_SHARD"
    )
    words = (*SUBMIT.split(), *extra.split(), "--before", "module load cuda", "--results", folder / "r", "--print")
    printed = stdout_of("submit", file, *words)
    script = folder / "r" / "2x4-a100" / "tiny" / "submit.sbatch"
    text = script.read_text()
    assert printed == text
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+|'.*?'))?", text, re.MULTILINE))
    expected = {
        **{"nodes": "2", "ntasks-per-node": "1", "gpus-per-node": "4", "time": "15", "signal": "B:USR1@60"},
        **{"partition": "a100", "account": "me", "qos": "high", "constraint": "h100", "mem": "0"},
        **{"exclusive": "", "requeue": "", "no-kill": "", "open-mode": "append"},
    }
    assert expected.items() <= options.items()
    assert "module load cuda" in text.splitlines()
    words = shlex.split(text.splitlines()[-1])
    assert words[:6] == ["exec", sys.executable, "-P", "-m", "fsdp_bench", "sweep"]
    assert Path(words[6]) == file
    assert words[7:] == [
        *("--results", str(folder / "r"), "--machine", "2x4-a100", "--slurm", "--ranks-per-node=4"),
        *("--only", "strategy=FULL_SHARD", "${retry[@]}"),
    ]
    assert "retry=(--retry crashed)" in text  # in the first run of the job alone
    checked = subprocess.run(["/bin/bash", "-n", str(script)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.usefixtures("without_slurm")
@pytest.mark.parametrize("name", ["r\ntouch RAN #", "back\\slash"])
def test_a_folder_that_a_batch_script_cannot_name_is_refused(name: str, tmp_path: Path) -> None:
    """A line break ends the comment that names it, so that the next line runs; sbatch reads a backslash itself."""
    file = write_tiny_sweep(tmp_path, "world_size = 8")
    said = refused("submit", file, *SUBMIT.split(), "--results", tmp_path / name)
    assert "a batch script cannot name line breaks and backslashes" in said
    assert not (tmp_path / name).exists()


@pytest.mark.usefixtures("without_slurm")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--nodes 2 --time 15", "--gpus-per-node: how many GPUs of each node"),
        ("--nodes 2 --gpus-per-node 4 --time soon", "--time: 'soon' is not allowed; minutes"),
        ("--nodes 2 --gpus-per-node 4 --time 0", "--time: '0' is not allowed"),
        ("--nodes 2 --gpus-per-node 4 --time 5", "a single trial may take 300 s"),
        ("--nodes 2 --gpus-per-node 4 --time ²", "--time: '²' is not allowed"),
        ("--nodes 0 --gpus-per-node 4 --time 15", "nodes: '0' is not allowed"),
        (f"{SUBMIT} --machine ../x", "--machine"),
        (f"{SUBMIT} --only nothing=1", "nothing"),
        (f"{SUBMIT} --sbatch=", "--sbatch: one line each"),
        (SUBMIT, "sbatch is not installed here; this needs Slurm's commands in PATH"),
    ],
)
def test_a_sweep_that_cannot_be_submitted_is_refused_in_one_line(options: str, said: str, tmp_path: Path) -> None:
    file = write_tiny_sweep(tmp_path, "world_size = 8")
    assert said in refused("submit", file, *options.split(), "--results", tmp_path / "r")


def test_status_of_a_sweep_that_has_ended_and_of_one_that_was_interrupted(tmp_path: Path) -> None:
    file = write_tiny_sweep(tmp_path, "world_size = 1\nseed = [0, 1, 2]")
    for words in (("--only", "seed=0"), ()):
        stdout_of("sweep", file, "--results", tmp_path / "r", "--no-charts", *words)
        told = " ".join(stdout_of("status", tmp_path / "r").split())
        num = 1 if words else 3
        assert f"done, {num} of {num} trials done, 0 left; {num} record" in told
    (progress,) = (tmp_path / "r").glob("*/*/progress.json")
    half = {**json.loads(progress.read_text()), "done": 1, "to_run": 2, "has_ended": False}
    progress.write_text(json.dumps(half))
    (found,) = json_of("status", tmp_path / "r")["sweeps"]
    assert (found["state"], found["done"], found["total"]) == ("interrupted", 1, 3)
    assert found["seconds_left"] > 0
    assert "the same command goes on where it ended" in stdout_of("status", progress.parent)


def test_status_while_a_sweep_runs(new_sweep: Callable[..., Sweep]) -> None:
    sweep = new_sweep("world_size = 1\ngradient_accumulation_steps = [1, 100000]")
    wait_until(sweep.records, sweep.start())
    (found,) = json_of("status", sweep.results)["sweeps"]
    assert (found["state"], found["total"]) == ("running", 2)
    sweep.end()
    (found,) = json_of("status", sweep.results)["sweeps"]
    assert (found["state"], found["done"], found["outcomes"]) == ("interrupted", 1, {"ok": 1})


def test_status_of_nothing_is_one_line(tmp_path: Path) -> None:
    assert "no sweep has run or was submitted here" in refused("status", tmp_path)


@pytest.mark.usefixtures("without_slurm")
def test_a_sweep_for_gpus_is_submitted_where_there_are_none(tmp_path: Path) -> None:
    """As login nodes are."""
    printed = stdout_of("submit", "sweeps/gpu.toml", *SUBMIT.split(), "--results", tmp_path / "r", "--print")
    assert "#SBATCH --gpus-per-node=4" in printed
