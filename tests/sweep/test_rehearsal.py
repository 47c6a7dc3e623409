"""Rehearsed sweeps: rank 0 of every trial in PyTorch's CUDA build, on a GPU that is not there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdp_bench.spec.errors import MachineError, SweepFileError
from fsdp_bench.spec.units import GIB, MIB
from fsdp_bench.sweep.config.sweep_file import read_file
from fsdp_bench.sweep.frontier.file import gpu_of
from fsdp_bench.sweep.run import rehearsed
from fsdp_bench.sweep.run.rehearsed import rehearsed_gpu
from tests.conftest import message_of, run_command
from tests.sweep.config.test_grid import machine
from tests.sweep.conftest import read_sweep

RUN = "device = 'rehearsed'\ngpu = 'A10G'"


def test_the_gpu_is_the_catalogues_and_rank_0_runs_alone(write_sweep: Callable[..., Path]) -> None:
    file = read_file(write_sweep("world_size = 8", RUN), machine())
    (trial,) = read_sweep(file.path, machine())
    assert trial.label.startswith("tiny world 8 rehearsed")
    run = trial.spec.run
    assert (run.alone, trial.spec.device, trial.spec.num_processes, run.communication_steps) == (
        "rehearsed",
        "cuda",
        1,
        0,
    )
    assert run.rehearsed_on == rehearsed_gpu("A10G")
    assert (file.launcher, file.machine.name, file.machine.describe()) == (
        "fork",
        "rehearsed",
        "NVIDIA A10G (rehearsed)",
    )


def test_memory_that_is_kept_free_is_not_torchs(write_sweep: Callable[..., Path]) -> None:
    """22587 MiB of an A10G; 2 GiB is what ``rehearse --gpu`` keeps free where nothing else is known."""
    for line, kept in (("", 2 * GIB), ("headroom = '512MiB'", 512 * MIB)):
        gpu = gpu_of(read_file(write_sweep("world_size = 8", f"{RUN}\n{line}"), machine()))
        assert gpu.usable_memory_bytes == 22587 * MIB - kept


def test_the_gpu_decides_the_id(write_sweep: Callable[..., Path]) -> None:
    ids = set()
    for run in ("device = 'cpu'", RUN, RUN.replace("A10G", "L40S"), f"{RUN}\nheadroom = '1GiB'"):
        (trial,) = read_sweep(write_sweep("world_size = 8", run), machine())
        ids.add(trial.spec.id)
    assert len(ids) == 4


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ("device = 'rehearsed'", 'gpu: device = "rehearsed" needs the name of a GPU'),
        ("device = 'rehearsed'\ngpu = 'H100-SMX'", "gpu: 'H100-SMX' is not in the catalogue (did you mean"),
        ("device = 'rehearsed'\ngpu = 'MI300X'", "MI300X cannot be rehearsed; only GPUs by NVIDIA"),
        ("device = 'rehearsed'\ngpu = 'H100-SXM-96GB'", "the catalogue has no product name for it"),
        ("device = 'cpu'\ngpu = 'A10G'", '[run] gpu: is for device = "rehearsed"'),
        (f"{RUN}\nheadroom = '40GiB'", "headroom: 40.0 GiB is not allowed"),
        (f"{RUN}\nemulate = false", "emulate: False is not allowed where trials are rehearsed"),
        (f"{RUN}\nsteps_without_communication = 3", "steps_without_communication: 3 is not allowed"),
        (f"{RUN}\nbackend = 'gloo'", "backend: "),
    ],
)
def test_an_impossible_rehearsed_sweep_is_refused_in_one_line(run: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "sweep.toml"
    file.write_text(f"[run]\n{run}\n[grid]\nparams = '10M'\nworld_size = 8\n")
    assert said in message_of(lambda: read_file(file, machine()), SweepFileError)


def test_any_sweep_can_be_rehearsed_with_an_option(write_sweep: Callable[..., Path]) -> None:
    """Without the keys that need other ranks, in a folder of its own."""
    path = write_sweep("world_size = 8", "device = 'cuda'\ncommunication_steps = 2\nbackend = 'gloo'")
    file = read_file(path, machine(), rehearse_gpu="H100-SXM")
    assert (file.name, file.run.alone, file.run.communication_steps) == ("tiny-H100-SXM", "rehearsed", 0)


def test_a_machine_that_cannot_rehearse_says_why_before_any_trial(
    write_sweep: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(MachineError, match="the stand-in for NVIDIA's libraries cannot be made: exit code 1"):
        rehearsed.stand_in_environment(rehearsed_gpu("A10G"))
    done = run_command("sweep", write_sweep("world_size = 8", RUN), "--results", tmp_path / "results")
    assert done.returncode == 2
    assert not (tmp_path / "results").exists()
