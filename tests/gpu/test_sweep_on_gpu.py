"""The same sweep over NCCL. Skipped where there is no GPU."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdp_bench.spec.frontier import read_frontier
from fsdp_bench.spec.rank_report import Outcome
from fsdp_bench.sweep.machine import probe_machine
from tests.conftest import records_of_sweep, run_command

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not probe_machine().gpus, reason="no GPU here")]

ALONE = "emulate = true\nattention = 'flash'"
"""Neither NCCL nor cuDNN: the stand-in for NVIDIA's libraries has none (on_stand_in/rehearse/test_gpu_tests.py)."""

GRID = """
world_size = 1
api = ["fsdp1", "fsdp2"]
precision = ["fp32", "bf16-mixed", "fp16-mixed"]
checkpointing = ["none", "selective", "full"]
"""


@pytest.mark.skipif("libstand_in" in os.environ.get("LD_PRELOAD", ""), reason="the stand-in has no NCCL")
@pytest.mark.parametrize("launcher", ["fork", "torchrun"])
def test_every_trial_of_one_gpu_ends_ok_with_the_allocators_peaks(
    launcher: str, write_sweep: Callable[..., Path]
) -> None:
    file = write_sweep(GRID, f"device = 'cuda'\nlauncher = '{launcher}'\ncommunication_steps = 1")
    for record in records_of_sweep(file):
        assert record.outcome is Outcome.OK
        (rank,) = record.ranks
        assert rank.environment["launcher"] == launcher
        memory = rank.memory
        assert memory.peak_allocated_bytes >= max(memory.phases.values())
        assert (memory.peak_reserved_bytes or 0) >= memory.peak_allocated_bytes
        assert memory.num_alloc_retries == 0


def test_the_largest_batch_is_found_on_a_gpu_that_is_limited_to_a_small_ones_memory(
    write_sweep: Callable[..., Path], tmp_path: Path
) -> None:
    file = write_sweep("api = 'fsdp2'", f"device = 'cuda'\n{ALONE}")
    file.write_text(file.read_text() + "\n[frontier]\ndial = 'micro_batch_size'\n")
    done = run_command("sweep", file, "--results", tmp_path, "--gpu-memory", "256MiB")
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*/tiny-on-256MiB/frontier.json")
    record = read_frontier(path.read_bytes(), path.name)
    assert (record.gpu_is_limited, record.run.memory_limit_bytes) == (True, 256 * 1024**2)
    (cell,) = record.cells
    assert cell.status == "found"
    assert 0 < cell.measured.fits <= cell.measured.runs
    assert cell.measured.limited_by.place == "gpu"


def test_running_out_on_a_limited_gpu_is_an_outcome_whose_snapshot_shows_what_was_allocated(
    write_sweep: Callable[..., Path],
) -> None:
    """The next trial is unaffected. Recording begins with the process: the snapshot has the parameters' allocations."""
    file = write_sweep("micro_batch_size = [65536, 1]", f"device = 'cuda'\nmemory_limit = '256MiB'\n{ALONE}")
    by_batch = {record.setup.micro_batch_size: record for record in records_of_sweep(file, "--memory-snapshot")}
    assert {batch: record.outcome for batch, record in by_batch.items()} == {1: Outcome.OK, 65536: Outcome.OOM_GPU}
    failure = by_batch[65536].ranks[0].failure
    assert "memory" in (failure.allocator_summary or "").lower()
    for record in by_batch.values():
        (found,) = file.parent.glob(f"results/*/tiny/snapshots/{record.id}/*.pickle")
        snapshot = pickle.loads(found.read_bytes())
        assert any(block["state"] == "active_allocated" for s in snapshot["segments"] for block in s["blocks"])
        actions = [entry["action"] for entry in snapshot["device_traces"][0]]
        assert ("oom" in actions) == (record.outcome is Outcome.OOM_GPU)
        assert record.suspect == ("allocations were recorded, which slows the host down",)
