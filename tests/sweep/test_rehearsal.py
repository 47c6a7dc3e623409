"""Rehearsed sweeps: rank 0 of every trial in PyTorch's CUDA build, on a GPU that is not there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from fsdp_bench.rates.without_time import RatesWithoutTime
from fsdp_bench.spec.errors import MachineError, SweepFileError
from fsdp_bench.spec.frontier import read_frontier
from fsdp_bench.spec.rank_report import Outcome
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.spec.units import GIB, MIB
from fsdp_bench.sweep.config.grid import read_sweep
from fsdp_bench.sweep.config.sweep_file import read_file
from fsdp_bench.sweep.frontier.file import gpu_of
from fsdp_bench.sweep.results.load import read_records
from fsdp_bench.sweep.run import rehearsed
from fsdp_bench.sweep.run.rehearsed import rehearsed_gpu
from fsdp_bench.validate.memory import compare_with_record
from tests.conftest import run_command
from tests.on_stand_in.rehearsing import on_stand_in
from tests.sweep.config.test_grid import machine

RUN = "device = 'rehearsed'\ngpu = 'A10G'"
EVERY_STRATEGY = """
world_size = 8
api = ["fsdp1", "fsdp2"]
precision = "bf16-mixed"
strategy = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]
"""


def test_the_gpu_is_the_catalogues_and_rank_0_runs_alone(write_sweep: Callable[..., Path]) -> None:
    file = read_file(write_sweep("world_size = 8", RUN), machine())
    (trial,) = read_sweep(file.path, machine()).trials
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
        "resident",
        "rehearsed",
        "NVIDIA A10G (rehearsed)",
    )


def test_what_is_kept_free_is_not_torchs(write_sweep: Callable[..., Path]) -> None:
    """22587 MiB of an A10G; 2 GiB is what ``rehearse --gpu`` keeps free where nothing else is known."""
    for line, kept in (("", 2 * GIB), ("headroom = '512MiB'", 512 * MIB)):
        gpu = gpu_of(read_file(write_sweep("world_size = 8", f"{RUN}\n{line}"), machine()))
        assert gpu is not None
        assert gpu.usable_memory_bytes == 22587 * MIB - kept


def test_the_gpu_decides_the_id(write_sweep: Callable[..., Path]) -> None:
    ids = set()
    for run in ("device = 'cpu'", RUN, RUN.replace("A10G", "L40S"), f"{RUN}\nheadroom = '1GiB'"):
        (trial,) = read_sweep(write_sweep("world_size = 8", run), machine()).trials
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
def test_what_a_rehearsed_sweep_cannot_be_is_one_line(run: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "sweep.toml"
    file.write_text(f"[run]\n{run}\n[grid]\nparams = '10M'\nworld_size = 8\n")
    with pytest.raises(SweepFileError) as raised:
        read_file(file, machine())
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_any_sweep_can_be_rehearsed_with_an_option(write_sweep: Callable[..., Path]) -> None:
    """Without the keys that need other ranks, in a folder of its own."""
    path = write_sweep("world_size = 8", "device = 'cuda'\ncommunication_steps = 2\nbackend = 'gloo'")
    file = read_file(path, machine(), rehearse_gpu="H100-SXM")
    assert (file.name, file.run.alone, file.run.communication_steps) == ("tiny-H100-SXM", "rehearsed", 0)


def test_a_machine_that_cannot_rehearse_says_why_before_any_trial(
    write_sweep: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rehearsed.sys, "executable", "/bin/false")
    with pytest.raises(MachineError, match="the stand-in for NVIDIA's libraries cannot be made: exit code 1"):
        rehearsed.stand_in_environment(rehearsed_gpu("A10G"))
    done = run_command("sweep", write_sweep("world_size = 8", RUN), "--results", tmp_path / "results")
    assert done.returncode == 2
    assert not (tmp_path / "results").exists()


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> list[TrialRecord]:
    """Every strategy, rehearsed as rank 0 of eight; one batch that is too large."""
    folder = tmp_path_factory.mktemp("rehearsed")
    from tests.conftest import write_tiny_sweep

    too_large = "\n[[include]]\napi='fsdp2'\nprecision='fp32'\nstrategy='FULL_SHARD'\nmicro_batch_size=4000000\n"
    file = write_tiny_sweep(folder, EVERY_STRATEGY + "micro_batch_size = 1" + too_large, RUN)
    done = run_command("sweep", file, "--results", folder / "results", "--no-charts")
    assert done.returncode == 0, done.stderr
    return read_records(folder / "results" / "rehearsed" / "tiny")


class TestOnTheStandIn:
    pytestmark = on_stand_in

    def test_records_have_memory_and_no_times(self, swept: list[TrialRecord]) -> None:
        ran = [record for record in swept if record.outcome is Outcome.OK]
        assert len(ran) == 10
        for record in ran:
            assert (record.source, record.device, record.hardware) == ("rehearsed", "rehearsed", "cuda")
            assert record.step_seconds is None
            assert record.tokens_per_second_per_gpu is None
            assert record.communication_seconds is None
            assert record.final_loss is None
            (rank,) = record.ranks
            assert (rank.device_name, rank.telemetry, rank.warmup_seconds) == ("NVIDIA A10G", None, ())
            assert rank.memory is not None
            assert rank.memory.peak_device_bytes is rank.memory.peak_host_bytes is None

    def test_every_strategy_allocates_what_is_predicted_of_rank_0(self, swept: list[TrialRecord]) -> None:
        """To the byte, in every phase; predicted for a host that never waits for a GPU to get there."""
        assert RatesWithoutTime.launch_seconds == 0
        for record in swept:
            found = compare_with_record(record)
            assert found.fit is not None
            assert found.fit.predicted == found.fit.measured == record.fits
            if record.fits:
                assert found.is_equal, found
                assert found.reserved is not None
                assert found.reserved.predicted_bytes == found.reserved.reference_bytes

    def test_running_out_of_the_gpu_that_is_not_there_is_an_outcome(self, swept: list[TrialRecord]) -> None:
        (record,) = [record for record in swept if record.outcome is not Outcome.OK]
        assert record.outcome is Outcome.OOM_GPU
        assert "GPU 0 has a total capacity of 22.06 GiB" in (record.reason or "")

    def test_the_largest_batch_is_found(self, write_sweep: Callable[..., Path], tmp_path: Path) -> None:
        file = write_sweep("world_size = 8\napi = 'fsdp2'", f"{RUN}\nmemory_limit = '256MiB'")
        file.write_text(file.read_text() + "\n[frontier]\ndial = 'micro_batch_size'\n")
        done = run_command("sweep", file, "--results", tmp_path)
        assert done.returncode == 0, done.stderr
        folder = tmp_path / "rehearsed" / "tiny"
        record = read_frontier((folder / "frontier.json").read_bytes(), "frontier.json")
        assert (record.source, record.device) == ("rehearsed", "rehearsed")
        (cell,) = record.cells
        assert cell.measured is not None
        assert 0 < cell.measured.fits <= cell.measured.runs
        assert (folder / "max-size.png").exists()
        assert "rehearsed" in done.stdout
        assert "measured" not in done.stdout

    def test_a_resumed_sweep_repeats_nothing(self, write_sweep: Callable[..., Path], tmp_path: Path) -> None:
        file = write_sweep("world_size = 8", RUN)
        for _ in range(2):
            done = run_command("sweep", file, "--results", tmp_path)
            assert done.returncode == 0, done.stderr
        assert "1 trials on NVIDIA A10G (rehearsed), 1 already recorded" in done.stderr
        (record,) = read_records(tmp_path)
        assert msgspec.structs.replace(record).outcome is Outcome.OK
