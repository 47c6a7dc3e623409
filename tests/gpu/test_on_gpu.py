"""What needs a GPU: the allocator's replay against the allocator, and sweeps over NCCL. Skipped where there is none."""

import json
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdp_bench.replay.caching_allocator.allocator import CachingAllocator
from fsdp_bench.replay.caching_allocator.blocks import pool_of, rounded
from fsdp_bench.replay.caching_allocator.expandable_segments import ExpandableAllocator
from fsdp_bench.spec.frontier import read_frontier
from fsdp_bench.spec.rank_report import Outcome
from fsdp_bench.sweep.machine import probe_machine
from tests.conftest import records_of_sweep, run_command

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not probe_machine().gpus, reason="no GPU here")]

MIB = 1 << 20
CARD_BYTES = 1024 * MIB

REAL = """
import json, sys
import torch

actions, card_bytes = json.load(sys.stdin)
if card_bytes is not None:
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((card_bytes + 512) / total)
streams = [torch.cuda.default_stream(), torch.cuda.Stream()]
live, readings = {}, []
for action, tensor, num_bytes, stream in actions:
    torch.cuda.synchronize()
    if action == "allocate":
        with torch.cuda.stream(streams[stream]):
            live[tensor] = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    elif action == "record_stream":
        live[tensor].record_stream(streams[stream])
    elif action == "empty_cache":
        torch.cuda.empty_cache()
    else:
        del live[tensor]
    stats = torch.cuda.memory_stats()
    readings.append(
        [stats["allocated_bytes.all.current"], stats["reserved_bytes.all.current"], stats["num_alloc_retries"]]
    )
print(json.dumps(readings))
"""


def random_actions(seed: int, limit_bytes: int) -> list[tuple[str, int, int, int]]:
    """Allocations of all sizes, uses on the other stream, frees and flushes, with at most ``limit_bytes`` alive."""
    generator = random.Random(seed)
    actions: list[tuple[str, int, int, int]] = []
    live: dict[int, int] = {}
    for index in range(600):
        num_bytes = generator.randrange(1, generator.choice([4096, 2 * MIB, 12 * MIB, 90 * MIB]))
        if live and (generator.random() < 0.45 or sum(live.values()) + num_bytes > limit_bytes):
            tensor = generator.choice(list(live))
            if generator.random() < 0.2:
                actions.append(("record_stream", tensor, 0, generator.randrange(2)))
            actions.append(("free", tensor, 0, 0))
            del live[tensor]
        elif generator.random() < 0.01:
            actions.append(("empty_cache", 0, 0, 0))
        else:
            actions.append(("allocate", index, num_bytes, generator.randrange(2)))
            live[index] = num_bytes
    return actions


def replayed(
    actions: list[tuple[str, int, int, int]], card_bytes: int | None, expandable: bool
) -> list[tuple[int, int, int]]:
    """After each action: allocated, reserved, retries. The GPU is idle at each, so events happen at once."""
    allocator = (ExpandableAllocator if expandable else CachingAllocator)(card_bytes)
    readings = []
    for action, tensor, num_bytes, stream in actions:
        allocator.num_completed = allocator.num_recorded
        if action == "allocate":
            size = rounded(num_bytes)
            assert allocator.allocate(tensor, size, pool_of(size, stream))
        elif action == "record_stream":
            allocator.record_stream(tensor, stream)
        elif action == "empty_cache":
            allocator.release_cached_blocks()
        else:
            allocator.free(tensor)
        readings.append((allocator.allocated, allocator.reserved, allocator.num_retries))
    return readings


@pytest.mark.parametrize("seed", [1, 6, 9])  # on the full card each of these needs a retry, and each flushes the cache
@pytest.mark.parametrize(
    ("card_bytes", "expandable"),
    [(None, False), (CARD_BYTES, False), (None, True)],
    ids=["fixed", "full", "expandable"],
)
def test_every_allocation_reads_as_on_the_device(card_bytes: int | None, expandable: bool, seed: int) -> None:
    """With a limit, only fixed segments: torch compares it with another size than it maps when segments expand."""
    actions = random_actions(seed, limit_bytes=CARD_BYTES // 2)
    done = subprocess.run(
        [sys.executable, "-c", REAL],
        input=json.dumps([actions, card_bytes]),
        env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{expandable}"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    real = [tuple(reading) for reading in json.loads(done.stdout)]
    for action, device, replay in zip(actions, real, replayed(actions, card_bytes, expandable), strict=True):
        assert device == replay, action


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
