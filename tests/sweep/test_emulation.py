"""``emulate = true``: one process trains as rank 0 of a world, on real tensors, and has that rank's memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_bench.simulate.operators.kernels import CPU_EMULATED
from fsdp_bench.spec.frontier import read_frontier
from fsdp_bench.spec.rank_report import Outcome
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.spec.setup import ShardingStrategy
from fsdp_bench.spec.units import GIB
from fsdp_bench.sweep.config.sweep_file import read_file
from fsdp_bench.sweep.frontier.file import searches_of
from fsdp_bench.sweep.machine import GpuDevice
from tests.conftest import records_of_sweep, refused, run_command
from tests.predicted import memory_of
from tests.sweep.config.test_grid import machine
from tests.sweep.conftest import read_sweep

HEAD = """
[run]
device = "cpu"
steps = 1
threads_per_rank = 1
{run}
[models.small]
family = "llama"
num_hidden_layers = 3
hidden_size = 64
num_attention_heads = 4
num_key_value_heads = 2
intermediate_size = 160
vocab_size = 512
max_position_embeddings = 64
[grid]
model = "small"
sequence_length = 32
"""

GRID = """
world_size = 8
api = ["fsdp1", "fsdp2"]
precision = "bf16-mixed"
strategy = ["FULL_SHARD", "_HYBRID_SHARD_ZERO2"]
learning_rate = 0.01
"""
EVERY_STRATEGY = GRID.replace('"bf16-mixed"', '["fp32", "bf16-mixed"]').replace(
    '["FULL_SHARD", ', '["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", '
)
NEARLY_EMPTY_SHARDS = GRID.replace('"_HYBRID_SHARD_ZERO2"', '"HYBRID_SHARD", "NO_SHARD"') + 'checkpointing = "full"\n'


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((GRID, "emulate = true", (), 4), id="8 ranks"),
        pytest.param((NEARLY_EMPTY_SHARDS, "communication_steps = 1", ("--emulate-world", 1024), 6), id="1024 ranks"),
        pytest.param((EVERY_STRATEGY, "emulate = true", (), 20), id="every strategy", marks=pytest.mark.slow),
    ],
)
def emulated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[TrialRecord]:
    """Records of rank 0 of a world, emulated by one process."""
    grid, run, words, num_trials = request.param
    records = sweep(tmp_path_factory.mktemp("emulated"), grid, *words, run=run)
    assert [record.setup.world_size for record in records] == [words[-1] if words else 8] * num_trials
    return records


def sweep(folder: Path, grid: str, *words: object, run: str = "emulate = true") -> list[TrialRecord]:
    """Run a sweep; return its records."""
    return records_of_sweep(write(folder, grid, run), *words)


def write(folder: Path, grid: str, run: str = "emulate = true") -> Path:
    file = folder / "sweep.toml"
    file.write_text(HEAD.format(run=run) + grid)
    return file


def test_rank_0_has_the_predicted_peaks_in_every_phase(emulated: list[TrialRecord]) -> None:
    """To the byte. Where shards are nearly empty, FSDP1's padding shows, and every unit in full precision before the
    first forward. tests/simulate/test_against_ranks.py compares the same predictions with real ranks.
    """
    for record in emulated:
        assert (record.outcome, record.device, record.hardware) == (Outcome.OK, "emulated", "cpu"), record.reason
        (rank,) = record.ranks
        expected = memory_of(record.model, record.setup, CPU_EMULATED, rank=0).phases
        assert rank.memory.phases == expected, record.setup


def test_losses_are_finite_and_change_and_communication_is_not_timed(emulated: list[TrialRecord]) -> None:
    """A collective returns the rank's own shard and gradient, not memory that nobody wrote.

    Communication is not timed even where the file asks for it and ``--emulate-world`` is given.
    """
    for record in emulated:
        assert record.step_seconds
        assert record.communication_seconds is None
        losses = record.ranks[0].losses
        assert all(0 < loss < 10 for loss in losses)  # ln 512 = 6.2 of a model that knows nothing
        assert losses[-1] != losses[0] or record.setup.world_size == 1024  # of which rank 0 updates too little


def test_a_search_with_emulated_trials_finds_the_predicted_largest_batch(tmp_path: Path) -> None:
    run = 'emulate = true\nmemory_limit = "8 MiB"'
    grid = 'world_size = 8\napi = "fsdp2"\nstrategy = "FULL_SHARD"\n[frontier]\ndial = "micro_batch_size"\n'
    sweep(tmp_path, grid, run=run)
    (path,) = (tmp_path / "results").glob("*/sweep/frontier.json")
    (cell,) = read_frontier(path.read_bytes(), path.name).cells
    assert cell.status == "found"
    assert cell.measured.fits > 1
    assert (cell.steps_apart, len(cell.trials)) == (0, 2)


def test_timing_communication_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path, "world_size = 4\n", "emulate = true\ncommunication_steps = 2")
    said = refused("sweep", file, "--results", tmp_path / "results")
    assert "communication_steps: 2 is not allowed with emulate = true" in said


@pytest.mark.parametrize("part", ["0/4", "5/4", "2", "1/1000", "a/b"])
def test_an_impossible_part_is_refused(part: str, tmp_path: Path) -> None:
    said = refused("sweep", write(tmp_path, EVERY_STRATEGY), "--results", tmp_path, "--list", "--part", part)
    assert f"--part: {part!r} is not allowed; K/N with 1 <= K <= N <= " in said


def test_parts_follow_each_other_in_the_order_of_the_whole_sweep(tmp_path: Path) -> None:
    file = write(tmp_path, EVERY_STRATEGY)

    def listed(*words: object) -> list[str]:
        done = run_command("sweep", file, "--results", tmp_path, "--list", *words)
        return [line.split()[1] for line in done.stdout.replace("\n  ", " ").splitlines()[:-1]]

    pieces = [listed("--part", f"{number}/3") for number in (1, 2, 3)]
    assert [trial for piece in pieces for trial in piece] == listed()
    assert {len(piece) for piece in pieces} == {6, 7}  # of 20 trials


def test_shipped_sweeps_emulate_large_worlds_on_one_gpu() -> None:
    """No trial is skipped for lack of GPUs; the first trials of sweeps/h200.toml have every strategy."""
    one = machine((GpuDevice(index=0, name="NVIDIA H200", memory_bytes=141 * GIB),))
    plan = read_sweep(Path("sweeps/h200.toml"), one)
    assert 120 <= len(plan) <= 160
    assert {trial.spec.setup.world_size for trial in plan} == {1, 8, 64, 512}
    assert {trial.spec.setup.strategy for trial in plan[:20]} == set(ShardingStrategy)
    assert all(trial.spec.run.emulate and trial.spec.num_processes == 1 for trial in plan)
    skipped = {trial.skip_reason for trial in plan if trial.skip_reason}
    assert not any("GPUs" in reason for reason in skipped), skipped
    frontier = searches_of(read_file(Path("sweeps/a10g-emulated.toml"), one))
    assert len(frontier.cells) == 14
    assert frontier.file.run.emulate
    throughput = read_sweep(Path("sweeps/throughput.toml"), one)
    assert [(trial.spec.setup.compile, trial.skip_reason) for trial in throughput] == [(False, None)] * 4 + [
        (True, None)
    ] * 4
