"""One process as rank 0 of a whole world, with real tensors: its memory is the job's."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_bench.plan.estimate import predict_memory
from fsdp_bench.simulate.operators.kernels import CPU_EMULATED, CPU_GLOO
from fsdp_bench.spec.frontier import read_frontier
from fsdp_bench.spec.rank_report import Outcome
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.spec.setup import ShardingStrategy
from fsdp_bench.spec.units import GIB
from fsdp_bench.sweep.config.grid import read_sweep
from fsdp_bench.sweep.config.sweep_file import read_file
from fsdp_bench.sweep.frontier.file import searches_of
from fsdp_bench.sweep.machine import GpuDevice
from fsdp_bench.sweep.results.load import read_records
from tests.conftest import run_command
from tests.sweep.config.test_grid import machine

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

EVERY_STRATEGY = """
world_size = 8
api = ["fsdp1", "fsdp2"]
precision = ["fp32", "bf16-mixed"]
strategy = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]
learning_rate = 0.01
"""


SOME = """
world_size = 8
api = ["fsdp1", "fsdp2"]
precision = "bf16-mixed"
strategy = ["FULL_SHARD", "_HYBRID_SHARD_ZERO2"]
learning_rate = 0.01
"""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((SOME, 4), id="two strategies"),
        pytest.param((EVERY_STRATEGY, 20), id="every strategy", marks=pytest.mark.slow),
    ],
)
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[TrialRecord]:
    """Strategies, emulated: rank 0 of eight."""
    grid, num_trials = request.param
    records = sweep(tmp_path_factory.mktemp("alone"), grid)
    assert len(records) == num_trials
    return records


def sweep(folder: Path, grid: str, *words: object, run: str = "emulate = true", code: int = 0) -> list[TrialRecord]:
    """Run a sweep; return its records."""
    file = folder / "sweep.toml"
    file.write_text(HEAD.format(run=run) + grid)
    done = run_command("sweep", file, "--results", folder / "results", "--no-charts", *words)
    assert done.returncode == code, done.stderr
    return read_records(folder / "results")


def test_every_strategy_has_the_peaks_of_a_rank_among_eight(alone: list[TrialRecord]) -> None:
    """Rank 0 alone allocates what is predicted of rank 0 of eight, in every phase, to the byte."""
    for record in alone:
        assert (record.outcome, record.device, record.hardware) == (Outcome.OK, "emulated", "cpu"), record.reason
        assert len(record.ranks) == 1
        assert_predicted(record)


def assert_predicted(record: TrialRecord) -> None:
    """Every phase is predicted to the byte."""
    memory = record.ranks[0].memory
    assert memory is not None
    assert memory.phases == predict_memory(record.model, record.setup, CPU_EMULATED, rank=0).phases, record.setup


def test_it_agrees_with_real_ranks_but_for_what_gloo_copies(tmp_path: Path) -> None:
    """Two real ranks, and rank 0 of two alone: the difference is the copy that gloo makes of a message."""
    grid = 'world_size = 2\napi = ["fsdp1", "fsdp2"]\nstrategy = "FULL_SHARD"\n'
    (tmp_path / "real").mkdir()
    (tmp_path / "alone").mkdir()
    real = {r.setup: r for r in sweep(tmp_path / "real", grid, run="communication_steps = 0")}
    alone = {r.setup: r for r in sweep(tmp_path / "alone", grid)}
    assert real.keys() == alone.keys()
    for setup, record in real.items():
        model = record.model
        copies = (
            predict_memory(model, setup, CPU_GLOO).peak_allocated_bytes
            - predict_memory(model, setup, CPU_EMULATED).peak_allocated_bytes
        )
        ours, theirs = alone[setup].ranks[0].memory, record.ranks[0].memory
        assert ours is not None
        assert theirs is not None
        assert ours.peak_allocated_bytes == (theirs.peak_allocated_bytes or 0) - copies


def test_a_world_of_a_thousand_is_one_process_and_what_is_whole_for_a_moment_is_predicted(tmp_path: Path) -> None:
    """Where shards are next to nothing, of FSDP1: the padding that it concatenates, and every unit once in full
    precision before the first forward.
    """
    grid = 'api = ["fsdp1", "fsdp2"]\nstrategy = ["FULL_SHARD", "HYBRID_SHARD", "NO_SHARD"]\n'
    grid += 'precision = "bf16-mixed"\ncheckpointing = "full"\n'
    records = sweep(tmp_path, grid, "--emulate-world", 1024, run="communication_steps = 1")
    assert [record.setup.world_size for record in records] == [1024] * 6
    assert {record.outcome for record in records} == {Outcome.OK}
    assert all(record.step_seconds for record in records)
    assert {record.communication_seconds for record in records} == {None}
    for record in records:
        assert_predicted(record)


def test_buffers_hold_numbers_and_training_goes_on(alone: list[TrialRecord]) -> None:
    """What is gathered and reduced is the own shard and the own gradient: losses are finite, and parameters change."""
    for record in alone:
        losses = record.ranks[0].losses
        assert all(0 < loss < 10 for loss in losses)
        assert losses[-1] != losses[0]


def test_the_largest_batch_of_a_rank_of_eight_is_the_predicted_one(tmp_path: Path) -> None:
    """Searched with real trials of rank 0 alone, within a budget: no gloo that copies, so its own prediction."""
    run = 'emulate = true\nmemory_limit = "8 MiB"'
    grid = 'world_size = 8\napi = "fsdp2"\nstrategy = "FULL_SHARD"\n[frontier]\ndial = "micro_batch_size"\n'
    sweep(tmp_path, grid, run=run)
    (path,) = (tmp_path / "results").glob("*/sweep/frontier.json")
    (cell,) = read_frontier(path.read_bytes(), path.name).cells
    assert cell.status == "found"
    assert cell.measured is not None
    assert cell.measured.fits > 1
    assert (cell.steps_apart, len(cell.trials)) == (0, 2)


def test_what_needs_peers_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "sweep.toml"
    file.write_text(HEAD.format(run="emulate = true\ncommunication_steps = 2") + "world_size = 4\n")
    refused = run_command("sweep", file, "--results", tmp_path / "results")
    assert refused.returncode == 2
    assert "communication_steps: 2 is not allowed with emulate = true" in refused.stderr


@pytest.mark.parametrize("part", ["0/4", "5/4", "2", "1/1000", "a/b"])
def test_a_part_that_is_none_is_refused(part: str, tmp_path: Path) -> None:
    file = tmp_path / "sweep.toml"
    file.write_text(HEAD.format(run="emulate = true") + EVERY_STRATEGY)
    refused = run_command("sweep", file, "--results", tmp_path, "--list", "--part", part)
    assert refused.returncode == 2
    assert f"--part: {part!r} is not allowed; K/N with 1 <= K <= N <= " in refused.stderr


def test_parts_are_the_whole_in_its_order(tmp_path: Path) -> None:
    file = tmp_path / "sweep.toml"
    file.write_text(HEAD.format(run="emulate = true") + EVERY_STRATEGY)

    def listed(*words: object) -> list[str]:
        lines = (
            run_command("sweep", file, "--results", tmp_path, "--list", *words).stdout.replace("\n  ", " ").splitlines()
        )
        return [line.split()[1] for line in lines[:-1]]

    pieces = [listed("--part", f"{number}/3") for number in (1, 2, 3)]
    assert [trial for piece in pieces for trial in piece] == listed()
    assert {len(piece) for piece in pieces} == {6, 7}


def test_the_shipped_sweeps_are_for_one_card() -> None:
    """Of worlds up to 512, nothing is skipped for want of GPUs; the most telling come first."""
    one = machine((GpuDevice(index=0, name="NVIDIA H200", memory_bytes=141 * GIB),))
    plan = read_sweep(Path("sweeps/h200.toml"), one)
    assert 120 <= len(plan.trials) <= 160
    assert {trial.spec.setup.world_size for trial in plan.trials} == {1, 8, 64, 512}
    assert {trial.spec.setup.strategy for trial in plan.trials[:20]} == set(ShardingStrategy)
    assert all(trial.spec.run.emulate and trial.spec.num_processes == 1 for trial in plan.trials)
    skipped = {trial.skip_reason for trial in plan.trials if trial.skip_reason}
    assert not any("GPUs" in reason for reason in skipped), skipped
    frontier = searches_of(read_file(Path("sweeps/a10g-emulated.toml"), one))
    assert len(frontier.searches) == 14
    assert frontier.run.emulate
    throughput = read_sweep(Path("sweeps/throughput.toml"), one).trials
    assert [(trial.spec.setup.compile, trial.skip_reason) for trial in throughput] == [(False, None)] * 4 + [
        (True, None)
    ] * 4
