"""Sweep files: what they cross, and what is said about one that is wrong."""

from pathlib import Path

import msgspec
import pytest

from fsdp_bench.spec.errors import FsdpBenchError, SweepFileError
from fsdp_bench.spec.record import RunPlan, read_record
from fsdp_bench.spec.setup import Precision, ShardingStrategy
from fsdp_bench.sweep.config.trial import Trial, trial_id
from fsdp_bench.sweep.machine import GpuDevice, Machine, torch_version
from tests.conftest import TINY_MODEL, message_of
from tests.sweep.conftest import read_sweep

RESULTS = Path(__file__).parents[3] / "results"
GPUS = tuple(GpuDevice(index=i, name="NVIDIA H100 80GB HBM3", memory_bytes=80 * 1024**3) for i in range(8))


def machine(gpus: tuple[GpuDevice, ...] = ()) -> Machine:
    return Machine(
        cpu_name="test",
        num_cores=2,
        memory_bytes=1 << 34,
        cgroup_limit_bytes=None,
        gpus=gpus,
        driver_version=None,
        gpu_links=(),
        platform="test",
        versions={},
    )


def read(tmp_path: Path, text: str, gpus: tuple[GpuDevice, ...] = ()) -> tuple[Trial, ...]:
    path = tmp_path / "file.toml"
    path.write_text(text + TINY_MODEL)
    return read_sweep(path, machine(gpus))


def test_lists_are_crossed_and_the_last_key_varies_fastest(tmp_path: Path) -> None:
    plan = read(tmp_path, "[grid]\nmodel='tiny'\nworld_size=2\napi=['fsdp1','fsdp2']\nstrategy=['zero3','ddp']")
    cells = [(t.spec.setup.api.value, t.spec.setup.strategy.value) for t in plan]
    assert cells == [("fsdp1", "FULL_SHARD"), ("fsdp1", "NO_SHARD"), ("fsdp2", "FULL_SHARD"), ("fsdp2", "NO_SHARD")]


def test_an_include_inherits_what_the_grid_fixes_and_must_say_what_the_grid_lists(tmp_path: Path) -> None:
    grid = "[grid]\nmodel='tiny'\nsequence_length=32\nworld_size=2\nstrategy=['zero3','ddp']\n"
    plan = read(tmp_path, grid + "[[include]]\nworld_size=4\nstrategy=['hsdp','hybrid_shard_zero2']")
    assert [t.spec.setup.world_size for t in plan] == [2, 2, 4, 4]
    assert {t.spec.setup.sequence_length for t in plan} == {32}


def test_an_excluded_cell_is_skipped_with_its_reason_and_matched_by_meaning_not_spelling(tmp_path: Path) -> None:
    grid = "[grid]\nmodel='tiny'\nworld_size=2\nstrategy=['zero3','ddp']\nprecision=['fp32','bf16-mixed']\n"
    plan = read(tmp_path, grid + "[[exclude]]\nstrategy='NO_SHARD'\nprecision='fp32/bf16/fp32'\nreason='known'")
    skipped = [t for t in plan if t.skip_reason]
    assert [(t.spec.setup.strategy, t.spec.setup.precision) for t in skipped] == [
        (ShardingStrategy.NO_SHARD, Precision.parse("bf16-mixed"))
    ]
    assert skipped[0].skip_reason == "excluded: known"


def test_equal_cells_are_one_trial(tmp_path: Path) -> None:
    assert len(read(tmp_path, "[grid]\nmodel='tiny'\nworld_size=2\nstrategy=['zero3','FULL_SHARD','1']")) == 1


def test_a_cell_that_cannot_work_here_is_skipped_with_what_would_work(tmp_path: Path) -> None:
    text = "[grid]\nmodel='tiny'\nworld_size=[2,16]\nstrategy=['FULL_SHARD','HYBRID_SHARD']"
    reasons = [t.skip_reason for t in read(tmp_path, text, GPUS)]
    assert reasons[0] is None
    assert "use 4 or more ranks" in (reasons[1] or "")
    assert reasons[2] == reasons[3] == "world size 16 needs as many GPUs, or emulate = true; this machine has 8"


def test_a_budget_and_compiled_code_do_not_go_together_on_a_cpu(tmp_path: Path) -> None:
    trials = read(tmp_path, "[run]\nmemory_limit='1GiB'\n[grid]\nmodel='tiny'\ncompile=[false,true]")
    assert [bool(one.skip_reason) for one in trials] == [False, True]
    assert "memory_limit follows operators" in trials[1].skip_reason


def test_the_id_changes_with_what_decides_the_outcome_and_with_nothing_else(tmp_path: Path) -> None:
    def only_id(text: str) -> str:
        return read(tmp_path, text)[0].spec.id

    grid = "[grid]\nmodel='tiny'\nworld_size=2\n"
    base = only_id(grid)
    assert only_id("[run]\nname='other'\ntimeout_seconds=7\n" + grid) == base
    assert only_id("[run]\nsteps=4\n" + grid) != base
    assert only_id("[run]\nmemory_limit='1GiB'\n" + grid) != base
    assert only_id(grid + "seed=1\n") != base
    assert only_id(grid + "batch=2\n") != base


def test_a_plan_that_earlier_versions_knew_has_the_id_that_it_had_then() -> None:
    """The ID of a committed trial, from before steps without communication existed."""
    (path, *_) = sorted((RESULTS / "xeon-2-cores" / "max-size-quick" / "trials").glob("*.json"))
    record = read_record(path.read_bytes(), path.name)
    torch = record.ranks[0].environment["torch"]
    if torch != torch_version():
        pytest.skip(f"the committed trial ran on torch {torch}, which is part of its ID")
    assert trial_id(record.model, record.setup, record.run, record.device) == record.id


def test_a_share_of_the_card_chooses_the_largest_rung_below_it(tmp_path: Path) -> None:
    (trial,) = read(tmp_path, "[grid]\nparams='25% of card'\nworld_size='gpus'", GPUS)
    # 80 GiB x 25 % / 16 bytes (fp32 parameter, gradient, two Adam states)
    assert trial.spec.model.num_parameters <= 80 * 1024**3 // 4 // 16
    assert trial.spec.model.num_parameters > 0.9 * 80 * 1024**3 // 4 // 16
    assert trial.spec.setup.world_size == 8


TINY = "[grid]\nmodel='tiny'\nworld_size=2\n"
REFUSED = [
    (f"{TINY}strategy=['zero3','ddp']\n[[include]]\nworld_size=4", 0, "[[include]] 1 does not say 'strategy'"),
    (f"{TINY}[[exclude]]\nstrategy='NO_SHARD'", 0, "needs a reason"),
    (f"{TINY}strategy='HYBRID_SHARD'", 0, "no trial can run here: HYBRID_SHARD needs"),
    ("[grid]\nparams='25% of GPU'", 0, "needs a GPU"),
    (f"[run]\ndevice='cuda'\n{TINY}", 0, "no GPU"),
    (f"[run]\nbackend='gloo'\ncommunication_steps=1\n{TINY}", 1, "communication is not measured"),
    (f"[run]\nbackend='nccl'\n{TINY}", 1, "backend: 'nccl'"),
    (f"[run]\nbackend='gloo'\nemulate=true\n{TINY}", 1, "not allowed with emulate"),
    (f"[run]\nattention='cudnn'\n{TINY}", 1, "attention: 'cudnn'"),
]


@pytest.mark.parametrize(("text", "num_gpus", "said"), REFUSED)
def test_what_cannot_run_on_a_machine_is_refused_with_the_reason(
    text: str, num_gpus: int, said: str, tmp_path: Path
) -> None:
    assert said in message_of(lambda: read(tmp_path, text, GPUS[:num_gpus]), FsdpBenchError)


def test_the_run_table_becomes_the_plan(tmp_path: Path) -> None:
    (trial,) = read(tmp_path, "[run]\nsteps=7\nmemory_limit='1.5GiB'\n[grid]\nmodel='tiny'")
    plan = RunPlan(steps=7, steps_without_communication=3, memory_limit_bytes=3 * 512 * 1024**2)
    assert (trial.spec.run, trial.spec.device) == (plan, "cpu")


@pytest.mark.parametrize("name", ["quick.toml", "cpu.toml", "gpu.toml"])
def test_the_shipped_sweeps_resolve_on_eight_gpus(name: str) -> None:
    plan = read_sweep(Path(__file__).parents[3] / "sweeps" / name, machine(GPUS))
    assert any(trial.skip_reason is None for trial in plan)


def test_over_gloo_ranks_share_a_gpu_and_communication_is_not_measured(tmp_path: Path) -> None:
    """Its messages go through the host. On a CPU gloo is what there is, and naming it changes nothing."""
    one = GPUS[:1]
    grid = "[grid]\nmodel='tiny'\nworld_size=4\n"
    (trial,) = read(tmp_path, "[run]\nbackend='gloo'\n" + grid, one)
    assert trial.skip_reason is None
    assert trial.spec.num_processes == 4
    run = trial.spec.run
    assert (run.backend, run.communication_steps, run.steps_without_communication) == ("gloo", 0, 0)
    named, plain = (read(tmp_path, run + grid)[0].spec for run in ("[run]\nbackend='gloo'\n", ""))
    assert named == plain


def test_attention_is_a_choice_of_gpus_and_part_of_the_id(tmp_path: Path) -> None:
    """A plan that does not name it has the ID that it had before there was the choice."""
    grid = "[grid]\nmodel='tiny'\nworld_size=1\n"
    on_gpu = [read(tmp_path, run + grid, GPUS[:1])[0].spec for run in ("[run]\nattention='flash'\n", "")]
    assert [spec.run.attention for spec in on_gpu] == ["flash", None]
    assert on_gpu[0].id != on_gpu[1].id
    on_cpu = [read(tmp_path, run + grid)[0].spec for run in ("[run]\nattention='flash'\n", "")]
    assert on_cpu[0] == on_cpu[1]


def test_newer_fields_change_the_id_only_if_they_are_set(tmp_path: Path) -> None:
    """Else records that earlier versions wrote would be measured again."""
    grid = "[grid]\nmodel='tiny'\nworld_size=4\napi='fsdp2'\n"
    written = "reshard_after_forward='none'\nreshard_last_block=true\nfp32_head=false\n"
    written += "checkpointing_policy='none'\noptimizer_in_backward=false\n"
    (plain,), (defaults,) = (read(tmp_path, grid + more) for more in ("", written))
    assert plain.spec.id == defaults.spec.id
    trials = read(tmp_path, grid + "reshard_after_forward=['none', 2]\nreshard_last_block=[true, false]")
    assert len({trial.spec.id for trial in trials}) == 4
    assert trials[0].spec.id == plain.spec.id
    assert [trial.skip_reason for trial in trials] == [None] * 4


def test_an_emulated_world_needs_no_nodes(tmp_path: Path) -> None:
    """On two nodes of four ranks a world of 64 ranks has no place; one rank of it has."""
    nodes = msgspec.structs.replace(machine(GPUS[:4]), num_nodes=2, ranks_per_node=4)
    path, cell = tmp_path / "file.toml", f"[grid]\nmodel = 'tiny'\nworld_size = 64\n{TINY_MODEL}"
    path.write_text(f"[run]\ndevice = 'cuda'\n{cell}")
    with pytest.raises(SweepFileError, match="world size 64 needs 16 nodes of 4 ranks; here are 2"):
        read_sweep(path, nodes)
    path.write_text(f"[run]\ndevice = 'cuda'\nemulate = true\n{cell}")
    (trial,) = read_sweep(path, nodes)
    assert trial.skip_reason is None
