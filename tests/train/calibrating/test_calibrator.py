"""Calibrating on real ranks, with small grids: every table is filled, by all ranks together."""

import time
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from fsdp_bench.spec.calibration_profile import RankMeasurements, Scaling, read_calibration, read_profile
from fsdp_bench.sweep.calibration import DRIVER_SECONDS
from fsdp_bench.train.calibrating import calibrator, operator_times
from tests.conftest import refused, stdout_of
from tests.train.ranks import run_ranks


def measure_little() -> RankMeasurements:
    """Measure everything on grids of two sizes, and a small model's steps."""
    operator_times.SIDES = {"cpu": (8, 64)}  # type: ignore[assignment]
    operator_times.LENGTHS = {"cpu": (16,)}  # type: ignore[assignment]
    operator_times.NUMELS = {"cpu": (2**9, 2**11)}  # type: ignore[assignment]
    operator_times.TENSORS = {"cpu": ((2, 2**10),)}  # type: ignore[assignment]
    calibrator.MESSAGES = {"cpu": (2**8, 2**12)}  # type: ignore[assignment]
    operator_times.COLD_BYTES = {"cpu": 2**14}
    calibrator.SIDE = {"cpu": 64}
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 64}
    calibrator.CALIBRATION_MODEL = replace(calibrator.CALIBRATION_MODEL, **sizes)
    calibrator.ROUND_SECONDS = {"cpu": 1e-4}
    return calibrator.measure(torch.device("cpu"), lambda part: None)


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_every_table_is_filled_and_all_ranks_agree(world_size: int, tmp_path: Path) -> None:
    found = run_ranks(world_size, tmp_path, measure_little)
    measured = found[0]
    assert (measured.num_ranks, measured.versions["backend"]) == (world_size, "gloo")
    assert {(one.layout, one.dtype) for one in measured.matmul} == {
        (layout, dtype) for layout in ("nt", "nn", "tn") for dtype in ("fp32", "bf16")
    }
    assert len(measured.matmul) == 3 * 2 * 2**3
    assert {one.backward for one in measured.attention} == {True, False}
    assert {one.kind for one in measured.optimizer} == {"adamw-foreach", "adamw-fused", "adamw-for-loop", "sgd"}
    assert {one.group_size for one in measured.collective} == ({2} if world_size == 2 else {2, 4})
    assert {one.kind for one in measured.collective} == {"all_gather", "reduce_scatter", "all_reduce"}
    assert set(measured.model_step_seconds) == {"none", "fsdp1", "fsdp2"}
    assert min(measured.model_step_seconds.values()) > 0
    assert all(one.collective == measured.collective for one in found)  # means over ranks


def measure_host() -> RankMeasurements:
    """Measure the host alone, in a few short rounds."""
    watch = calibrator.HOST_WATCH
    calibrator.HOST_WATCH = operator_times.Stopwatch(watch.device, 1e-4, 2, min, time.thread_time)
    return calibrator.measure(torch.device("cpu"), lambda part: None, only_host=True)


def test_of_the_host_alone_only_steps_are_timed(tmp_path: Path) -> None:
    (measured,) = run_ranks(1, tmp_path, measure_host)
    assert not measured.matmul
    assert not measured.collective
    steps = measured.model_step_seconds
    assert 0 < steps["none"] < min(steps["fsdp1"], steps["fsdp2"])


@pytest.mark.slow
def test_the_command_writes_a_hosts_times_that_predict_reads(tmp_path: Path) -> None:
    path = tmp_path / "host.toml"
    assert "us an operator on tiny tensors of a CPU, and 7.2 us" in " ".join(
        stdout_of("calibrate", "--host", "--out", path).split()
    )
    found = read_calibration(path)
    assert isinstance(found, Scaling)
    assert DRIVER_SECONDS < (found.launch_seconds or 0) < 1e-3
    assert set(found.hook_seconds) == {"fsdp1", "fsdp2"}
    words = ("predict", "--params", "100M", "--server", "p5.48xlarge", "--calibration", path)
    assert "rates: datasheet, the host measured: " in " ".join(stdout_of(*words).split())


@pytest.mark.slow
def test_the_command_writes_a_file_that_predict_reads(tmp_path: Path) -> None:
    path = tmp_path / "here.toml"
    assert "2 ranks: " in stdout_of("calibrate", "--ranks", 2, "--out", path)
    profile = read_profile(path)
    assert [one.num_ranks for one in profile.ranks] == [2]
    words = ("--params", "10M", "--seq", 128, "--world-size", 2, "--kernels", "cpu", "--calibration", path)
    assert "tokens/s per GPU" in stdout_of("predict", *words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        *((f"--out {out}", f"out: {out} cannot be written: ") for out in ("/proc/none/here.toml", "/proc/here.toml")),
        *((f"--ranks {ranks} --out here.toml", "numbers from 1 to") for ranks in ("two", "0", "2,,4")),
    ],
)
def test_what_cannot_be_measured_or_written_is_refused_before_measuring(words: str, said: str, tmp_path: Path) -> None:
    assert said in refused("calibrate", *words.split(), cwd=tmp_path)
    assert not list(tmp_path.iterdir())
