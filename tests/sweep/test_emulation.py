"""One process as rank 0 of a world: on real tensors by ``emulate = true``; rehearsed, on a GPU that is not there.

tests/on_stand_in/sweep rehearses trials.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdp_bench.simulate.operators.kernels import CPU_EMULATED
from fsdp_bench.spec.errors import MachineError, SweepFileError
from fsdp_bench.spec.frontier import read_frontier
from fsdp_bench.spec.rank_report import Outcome
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.spec.setup import ShardingStrategy
from fsdp_bench.spec.units import GIB, MIB
from fsdp_bench.sweep.config.sweep_file import read_file
from fsdp_bench.sweep.frontier.file import gpu_of, searches_of
from fsdp_bench.sweep.machine import GpuDevice
from fsdp_bench.sweep.run import rehearsed
from fsdp_bench.sweep.run.rehearsed import rehearsed_gpu
from tests.conftest import message_of, records_of_sweep, refused, stdout_of, write_tiny_sweep
from tests.shapes import memory_of
from tests.sweep.config.test_grid import machine
from tests.sweep.conftest import read_sweep

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
        pytest.param((NEARLY_EMPTY_SHARDS, "communication_steps = 1", ("--emulate-world", 256), 6), id="256 ranks"),
        pytest.param((EVERY_STRATEGY, "emulate = true", (), 20), id="every strategy", marks=pytest.mark.slow),
    ],
)
def emulated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[TrialRecord]:
    """Records of rank 0 of a world, emulated by one process."""
    grid, run, words, num_trials = request.param
    records = records_of_sweep(write_tiny_sweep(tmp_path_factory.mktemp("emulated"), grid, run), *words)
    assert [record.setup.world_size for record in records] == [words[-1] if words else 8] * num_trials
    return records


def test_rank_0_has_the_predicted_peaks_in_every_phase(emulated: list[TrialRecord]) -> None:
    """To the byte. Where shards are nearly empty, FSDP1's padding shows, and every unit in full precision before the
    first forward.
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
        assert all(0 < loss < 10 for loss in losses)  # ln 128 = 4.9 of a model that knows nothing
        assert losses[-1] != losses[0] or record.setup.world_size == 256  # of which rank 0 updates too little


def test_a_search_with_emulated_trials_finds_the_predicted_largest_batch(tmp_path: Path) -> None:
    run = 'emulate = true\nmemory_limit = "8 MiB"'
    grid = 'world_size = 8\napi = "fsdp2"\nstrategy = "FULL_SHARD"\n[frontier]\ndial = "micro_batch_size"\n'
    records_of_sweep(write_tiny_sweep(tmp_path, grid, run))
    (path,) = (tmp_path / "results").glob("*/tiny/frontier.json")
    (cell,) = read_frontier(path.read_bytes(), path.name).cells
    assert cell.status == "found"
    assert cell.measured.fits > 1
    assert (cell.steps_apart, len(cell.trials)) == (0, 2)


def test_parts_follow_each_other_in_the_order_of_the_whole_sweep(tmp_path: Path) -> None:
    file = write_tiny_sweep(tmp_path, EVERY_STRATEGY, "emulate = true")

    def listed(*words: object) -> list[str]:
        printed = stdout_of("sweep", file, "--results", tmp_path, "--list", *words)
        return [line.split()[1] for line in printed.replace("\n  ", " ").splitlines()[:-1]]

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
    refused("sweep", write_sweep("world_size = 8", RUN), "--results", tmp_path / "results")
    assert not (tmp_path / "results").exists()
