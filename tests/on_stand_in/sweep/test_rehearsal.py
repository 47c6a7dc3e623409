"""Rehearsed sweeps: rank 0 of every trial in PyTorch's CUDA build, on a GPU that is not there."""

from collections.abc import Callable
from pathlib import Path

import pytest

from fsdp_bench.spec.frontier import read_frontier
from fsdp_bench.spec.rank_report import Outcome
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.validate.memory import compare_with_record
from tests.conftest import records_of_sweep, run_command, write_tiny_sweep
from tests.sweep.test_emulation import RUN

EVERY_STRATEGY = """
world_size = 8
api = ["fsdp1", "fsdp2"]
precision = "bf16-mixed"
strategy = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]
"""


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> list[TrialRecord]:
    """Every strategy, rehearsed as rank 0 of eight; one batch that is too large."""
    folder = tmp_path_factory.mktemp("rehearsed")
    too_large = "\n[[include]]\napi='fsdp2'\nprecision='fp32'\nstrategy='FULL_SHARD'\nmicro_batch_size=1000000\n"
    file = write_tiny_sweep(folder, EVERY_STRATEGY + "micro_batch_size = 1" + too_large, RUN)
    return records_of_sweep(file)


def test_records_have_memory_and_no_times(swept: list[TrialRecord]) -> None:
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
        assert rank.memory.peak_device_bytes is rank.memory.peak_host_bytes is None


def test_every_strategy_allocates_what_is_predicted_of_rank_0(swept: list[TrialRecord]) -> None:
    """To the byte, in every phase; predicted for a host that never waits for a GPU to get there."""
    for record in swept:
        found = compare_with_record(record)
        assert found.fit.predicted == found.fit.measured == record.fits
        if record.fits:
            assert found.is_equal, found
            assert found.reserved.predicted_bytes == found.reserved.reference_bytes


def test_running_out_of_the_rehearsed_gpus_memory_is_an_outcome(swept: list[TrialRecord]) -> None:
    (record,) = [record for record in swept if record.outcome is not Outcome.OK]
    assert record.outcome is Outcome.OOM_GPU
    assert "GPU 0 has a total capacity of 22.06 GiB" in (record.reason or "")


def test_the_largest_batch_is_found(write_sweep: Callable[..., Path], tmp_path: Path) -> None:
    file = write_sweep("world_size = 8\napi = 'fsdp2'", f"{RUN}\nmemory_limit = '256MiB'")
    file.write_text(file.read_text() + "\n[frontier]\ndial = 'micro_batch_size'\n")
    done = run_command("sweep", file, "--results", tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "rehearsed" / "tiny"
    record = read_frontier((folder / "frontier.json").read_bytes(), "frontier.json")
    assert (record.source, record.device) == ("rehearsed", "rehearsed")
    (cell,) = record.cells
    assert 0 < cell.measured.fits <= cell.measured.runs
    assert (folder / "max-size.png").exists()
    assert "rehearsed" in done.stdout
    assert "measured" not in done.stdout
