"""Predicted against records: what is compared, what is counted, what is printed. Records are made by hand."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from fsdp_bench.catalog.loader import gpu_by_product_name
from fsdp_bench.plan.estimate import read_allocator
from fsdp_bench.report.validation import format_time
from fsdp_bench.simulate.operators.kernels import CPU_EMULATED, CUDA, kernels_on
from fsdp_bench.simulate.step import SimulatedSteps
from fsdp_bench.spec.calibration_profile import Profile, RankProfile
from fsdp_bench.spec.codec import to_json
from fsdp_bench.spec.rank_report import MemoryReading, Outcome, RankReport
from fsdp_bench.spec.record import Device, RunPlan, TrialRecord
from fsdp_bench.spec.units import GIB, MIB
from fsdp_bench.validate.memory import agreements, compare_with_record, kernels_of, summarize
from fsdp_bench.validate.predictable import cell_label
from fsdp_bench.validate.step_time import TimeComparison, compare_time, summarize_time
from tests.conftest import refused, stdout_of
from tests.shapes import memory_of
from tests.spec.test_record import record_with
from tests.train.training import LLAMA, S, setup_of

MODEL = msgspec.structs.replace(LLAMA, hidden_size=48)
"""Heads of 8, which every fused kernel takes."""
SETUP = setup_of(2, strategy=S.FULL_SHARD)


def record_of(
    memory: MemoryReading | None,
    device: Device = "cpu",
    outcome: Outcome = Outcome.OK,
    limit: int | None = None,
    name: str = "NVIDIA H200",
    steps: int = 1,
    environment: dict[str, str] | None = None,
    **fields: Any,
) -> TrialRecord:
    """A record of one trial, with one measured step."""
    rank = RankReport(
        rank=0,
        outcome=outcome,
        device_name=name,
        memory=memory,
        step_seconds=(1.0,),
        environment={"torch": "2.13", **(environment or {})},
    )
    run = RunPlan(steps=steps, memory_limit_bytes=limit)
    common = {"model": MODEL, "setup": SETUP, "device": device, "run": run, "outcome": outcome, "ranks": (rank,)}
    return record_with(**{**common, **fields})


def reading(phases: dict[str, int], **fields: int) -> MemoryReading:
    """A reading with such peaks."""
    return MemoryReading(peak_allocated_bytes=max(phases.values()), peak_phase="backward", phases=phases, **fields)


def test_an_error_is_the_predictions_and_in_the_phase_where_it_is() -> None:
    """One phase of which the record has 5 % more than is predicted; a phase that nothing predicts is left out."""
    predicted = memory_of(MODEL, SETUP, CPU_EMULATED).phases
    phases = {**predicted, "forward": int(predicted["forward"] * 1.05), "elsewhere": 1}
    found = compare_with_record(record_of(reading(phases), "emulated", emulated_on="cpu"))
    assert found.worst == ("forward", pytest.approx(1 / 1.05 - 1, abs=1e-4))
    assert set(found.phases) == set(predicted)
    summary = summarize([found], "by hand")
    assert (summary.num_equal, summary.num_compared) == (0, 1)
    assert summary.phases["backward"].num_equal == 1
    assert summary.phases["forward"].worst == pytest.approx(1 - 1 / 1.05, abs=1e-4)


def test_a_trial_on_a_gpu_is_compared_in_what_is_reserved_and_in_whether_it_fits() -> None:
    """With the card's own workspace for matrix products; what NVML shows beyond is the context, and no error."""
    gpu = gpu_by_product_name("NVIDIA H200")
    kernels = kernels_on(CUDA, gpu)
    predicted, allocator = (
        memory_of(MODEL, SETUP, kernels),
        read_allocator(SimulatedSteps(MODEL, SETUP, kernels), None),
    )
    memory = reading(
        predicted.phases,
        peak_reserved_bytes=allocator.peak_reserved_bytes + 2 * MIB,
        peak_device_bytes=allocator.peak_reserved_bytes + 502 * MIB,
        num_alloc_retries=0,
    )
    found = compare_with_record(record_of(memory, "cuda", name="NVIDIA H200"))
    assert found.is_equal
    assert found.reserved.reference_bytes - found.reserved.predicted_bytes == 2 * MIB
    assert found.outside_bytes == 500 * MIB
    later = record_of(memory, "cuda", name="NVIDIA H200", environment={"trials_in_process": "2"})
    assert compare_with_record(later).outside_bytes is None
    assert (found.fit.predicted, found.fit.measured) == (True, True)


@pytest.mark.parametrize(("environment", "is_cudnn"), [
    ({}, True), ({"torch": "2.10.0+cu128"}, False), ({"torch": "2.11.0+cu130"}, True),
    ({"attention": "flash_attention"}, False), ({"torch": "2.9.1+cu130", "attention": "cudnn_attention"}, True),
])  # fmt: skip
def test_attention_is_that_of_the_trials_torch(environment: dict[str, str], is_cudnn: bool) -> None:
    """torch has a cuDNN that it prefers since 2.11; trials of benchmark models note what it chose."""
    assert kernels_of(record_of(None, "cuda", name="NVIDIA H200", environment=environment)).cudnn_attention is is_cudnn


@pytest.mark.parametrize(("limit", "outcome", "right"), [
    (4 * MIB, Outcome.OOM_GPU, True), (4 * GIB, Outcome.OOM_GPU, False), (4 * GIB, Outcome.OK, True),
    (4 * MIB, Outcome.OK, False),
])  # fmt: skip
def test_running_out_of_memory_is_compared_with_what_is_predicted_to_run_out(
    limit: int, outcome: Outcome, right: bool
) -> None:
    """A trial that ran out has no peaks to compare; that it did is the comparison."""
    memory = reading({"forward": 3 * MIB}, num_alloc_retries=0)
    found = compare_with_record(record_of(memory, "cuda", outcome, limit))
    assert (found.phases == {}) == (outcome is not Outcome.OK)
    summary = summarize([found], "by hand")
    assert (summary.num_fits, summary.num_fits_right) == (1, int(right))


def test_retries_are_no_fit() -> None:
    """It ended, but only by freeing the whole cache."""
    found = compare_with_record(record_of(reading({"forward": MIB}, num_alloc_retries=2), "cuda", limit=4 * GIB))
    assert not found.fit.measured


def test_a_trial_that_is_not_predicted_says_why_and_the_others_are_compared() -> None:
    """Heads of 6 in fp32: no fused kernel takes them."""
    record = record_of(reading({"forward": MIB}), "cuda", model=LLAMA, steps=3)
    assert "head size 6" in (compare_with_record(record).error or "")
    assert "head size 6" in (compare_time(record, None).reason or "")


def test_only_trials_that_are_the_same_in_everything_else_are_held_against_each_other() -> None:
    """An emulated one and real ranks, on the same device; not another device, and not one that ran out."""
    alone = record_of(reading({"forward": 102}), "emulated", emulated_on="cuda")
    real = record_of(reading({"forward": 100}), "cuda")
    (found,) = agreements([alone, real])
    assert (found.alone_bytes, found.among_peers_bytes, found.relative) == (102, 100, pytest.approx(0.02))
    assert not agreements([alone, record_of(reading({"forward": 100}), "cpu")])
    assert not agreements([alone, record_of(reading({"forward": 100}), "cuda", name="NVIDIA L4")])
    assert not agreements([alone, record_of(reading({"forward": 100}), "cuda", Outcome.OOM_GPU)])
    assert not agreements([alone, alone])
    assert not agreements([alone, record_of(reading({"forward": 100}), "rehearsed", emulated_on="cuda")])


def test_a_page_tells_every_term_and_where_the_numbers_are_from(tmp_path: Path) -> None:
    """From records on disk; nothing else is written, and a place that cannot be written is named."""
    predicted = memory_of(MODEL, SETUP, CPU_EMULATED).phases
    folder = tmp_path / "results" / "machine" / "by-hand" / "trials"
    folder.mkdir(parents=True)
    record = record_of(reading(predicted), "emulated", emulated_on="cpu", name="a processor")
    (folder / f"{record.id}.json").write_bytes(to_json(record))
    stdout_of("validate", "--against", tmp_path / "results", "--page", tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    assert "- ran on: emulated on cpu" in page
    assert "- device: a processor" in page
    assert "peak allocated 1 of 1 0.000% 0.000%" in " ".join(page.split())
    assert "one measured step, which has no spread" in page
    assert "--page" in refused("validate", "--against", tmp_path / "results", "--page", tmp_path / "none" / "p.md")


def test_the_time_of_a_process_that_had_all_cores_is_not_compared_with_ranks_that_share_them() -> None:
    """On a CPU a trial that was emulated ran alone; a calibration of one rank would be of its kind."""
    record = record_of(None, "emulated", emulated_on="cpu", steps=2)
    of_two = RankProfile(num_ranks=2, threads_per_rank=1, launch_seconds=0.0, hook_seconds={})
    profile = Profile(
        machine="by hand", device="cpu", device_name="", measured_on="2026-11-21", versions={}, ranks=(of_two,)
    )
    assert "ranks shared them" in (compare_time(record, profile).reason or "")
    alone = msgspec.structs.replace(profile, ranks=(msgspec.structs.replace(of_two, num_ranks=1), of_two))
    assert (compare_time(record, alone).reason or "").startswith("unknown: ")  # nothing was timed


def emulated(seconds: float, **fields: Any) -> TrialRecord:
    """A record of rank 0 of eight, alone on a GPU, with two measured steps of so many seconds."""
    record = record_of(None, "emulated", emulated_on="cuda", steps=2)
    rank = msgspec.structs.replace(record.ranks[0], step_seconds=(seconds, seconds))
    return msgspec.structs.replace(record, setup=setup_of(8, **fields), ranks=(rank,))


def test_a_strategy_that_shards_is_compared_with_a_hybrid_whose_shard_groups_have_a_stated_size() -> None:
    """Only hybrids have that setting: it belongs to the strategy, in which compared trials differ."""
    trials = emulated(1.0, strategy=S.FULL_SHARD), emulated(2.0, strategy=S.HYBRID_SHARD, shard_size=2)
    found = summarize_time([compare_time(record, None) for record in trials])
    assert (found.num_trials, found.strategies.num_pairs, found.apis.num_pairs) == (2, 1, 0)
    assert found.not_compared == {}


def test_trials_whose_time_is_not_compared_are_counted_by_reason() -> None:
    whole, full = emulated(1.0, strategy=S.FULL_SHARD), record_of(None, "cuda", Outcome.OOM_GPU)
    times = [compare_time(record, None) for record in (whole, full, full)]
    summary = summarize_time(times)
    assert (summary.num_trials, summary.not_compared) == (1, {"the trial ended oom_gpu": 2})
    assert "trials that are not compared                  2: the trial ended oom_gpu" in format_time(times, summary, "")


def test_a_label_has_every_seldom_changed_field_that_is_changed() -> None:
    setup = setup_of(4, strategy=S.HYBRID_SHARD, shard_size=2, max_grad_norm=1.0, reshard_last_block=False)
    label = cell_label(MODEL, setup)
    assert "HYBRID_SHARD (2) under fsdp1" in label
    assert "max grad norm 1.0, reshard last block off" in label


def test_hybrids_with_different_shard_groups_are_no_repeated_runs_of_one_trial() -> None:
    """Repeated runs are joined, from 1 s to 3 s, and what took 2 s would then be neither faster nor slower."""
    hybrids = (emulated(seconds, strategy=S.HYBRID_SHARD, shard_size=size) for seconds, size in ((1.0, 4), (3.0, 2)))
    trials = (*hybrids, emulated(2.0, strategy=S.FULL_SHARD))
    found = summarize_time([compare_time(record, None) for record in trials])
    assert (found.strategies.num_pairs, found.apis.num_pairs) == (3, 0)


def timed(strategy: str, api: str, predicted: float, fastest: float, slowest: float, **more: float) -> TimeComparison:
    """A trial's step by hand; what it has in common with the others is said to be everything else."""
    return TimeComparison(
        label="",
        family="all else",
        strategy=strategy,
        api=api,
        predicted_seconds=predicted,
        measured_seconds=(fastest + slowest) / 2,
        fastest_seconds=fastest,
        slowest_seconds=slowest,
        **more,
    )


def order_of(*trials: TimeComparison) -> tuple[int, int, int, int]:
    """Pairs of strategies and those in order, then pairs of apis and those in order."""
    found = summarize_time(trials)
    return (*msgspec.structs.astuple(found.strategies), *msgspec.structs.astuple(found.apis))


def test_strategies_are_in_an_order_only_where_no_steps_of_any_run_overlap() -> None:
    """Two strategies; one is measured again, and as slow as the other then."""
    fast, slow = timed("FULL_SHARD", "fsdp1", 1.2, 1.0, 1.1), timed("NO_SHARD", "fsdp1", 1.1, 1.2, 1.3)
    assert order_of(fast, slow) == (1, 0, 0, 0)
    assert order_of(fast, slow, timed("FULL_SHARD", "fsdp1", 1.2, 1.05, 1.25)) == (0, 0, 0, 0)
    assert order_of(fast, slow, timed("NO_SHARD", "fsdp1", 1.1, 1.15, 1.4)) == (1, 0, 0, 0)


def test_the_same_strategy_in_the_other_api_is_counted_apart() -> None:
    """Measured: fsdp1 NO_SHARD, fsdp2 NO_SHARD, fsdp1 FULL_SHARD; predicted, the first two change places."""
    first, second = timed("NO_SHARD", "fsdp1", 1.1, 1.0, 1.1), timed("NO_SHARD", "fsdp2", 1.0, 1.2, 1.3)
    assert order_of(first, second, timed("FULL_SHARD", "fsdp1", 2.0, 1.4, 1.5)) == (2, 2, 1, 0)


def test_exposed_communication_is_near_as_a_part_of_itself_or_of_the_step() -> None:
    """Steps of a second; predicted 0.30 s of exposed communication, against three measurements of it."""
    measured = [(0.40, 0.24), (0.26, 0.35), (-0.01, 0.50)]
    trials = [
        timed("NO_SHARD", "fsdp1", 1.0, 1.0, 1.0, predicted_exposed_seconds=0.30,
              exposed_by_difference_seconds=difference, exposed_by_profiler_seconds=profiler)
        for difference, profiler in measured
    ]  # fmt: skip
    found = summarize_time(trials)
    assert (found.num_exposed, found.num_exposed_near_difference, found.num_exposed_near_profiler) == (3, 1, 1)
    assert found.num_exposed_near_either == 1
    assert (found.num_with_exposed_by_difference, found.num_with_exposed_by_profiler) == (2, 3)
    assert found.median_exposed_error_by_difference == pytest.approx((0.25 + 0.04 / 0.26) / 2)
    assert found.median_exposed_error_by_profiler == pytest.approx(0.25)  # 25 %, 14.3 %, 40 %
