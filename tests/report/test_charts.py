"""What pictures say: stacks that add up, failures that are no bars, conditions that are complete."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from fsdp_bench.report.charts import communication, draw_all, ended, memory_stack, memory_text, throughput_range
from fsdp_bench.report.panels import MAX_ROWS, panels
from fsdp_bench.report.tables import print_table
from fsdp_bench.spec.ladder import rung
from fsdp_bench.spec.model import Family
from fsdp_bench.spec.record import (
    SCHEMA_VERSION,
    CommunicationReading,
    MemoryReading,
    Outcome,
    RankReport,
    RunPlan,
    TrialRecord,
)
from fsdp_bench.spec.setup import Api, Checkpointing, Offload, Precision, ShardingStrategy, TrainSetup

MODEL = rung(Family.LLAMA, 10**9)
GIB = 1024**3
replace = msgspec.structs.replace


def record(outcome: Outcome = Outcome.OK, device: str = "cuda", retries: int = 0, **setup: object) -> TrialRecord:
    made = TrainSetup(**({"world_size": 2, "sequence_length": 2048, "micro_batch_size": 3} | setup))  # type: ignore[arg-type]
    memory = MemoryReading(
        peak_allocated_bytes=10 * GIB,
        peak_phase="backward",
        phases={"backward": 10 * GIB},
        num_alloc_retries=retries,
        parameters_bytes=2 * GIB,
        optimizer_state_bytes=4 * GIB,
    )
    ranks = tuple(
        RankReport(
            rank=rank,
            outcome=outcome,
            memory=memory,
            step_seconds=(1.0 + rank, 2.0, 4.0),
            communication=(CommunicationReading(step_seconds=2.0, total_seconds=0.5, exposed_seconds=0.2),),
            environment={"torch": "2.99"},
        )
        for rank in range(2)
    )
    return TrialRecord(
        schema_version=SCHEMA_VERSION,
        id="0" * 12,
        sweep="s",
        source="measured",
        device=device,  # type: ignore[arg-type]
        model=MODEL,
        num_parameters=MODEL.num_parameters,
        setup=made,
        effective_strategy=made.strategy.value,
        run=RunPlan(),
        outcome=outcome,
        ranks=ranks,
        started_at="2026-01-01T00:00:00+00:00",
        wall_seconds=1.0,
    )


def test_a_stack_adds_up_to_the_peak() -> None:
    stack = memory_stack(record())
    assert sum(size for _, size in stack) == 10 * GIB
    assert [size for _, size in stack] == [2 * GIB, 4 * GIB, 4 * GIB]


def test_what_is_offloaded_is_not_stacked_as_if_it_were_on_the_device() -> None:
    assert memory_stack(record(offload=Offload.PARAMS)) == [("everything on the device", 10 * GIB)]
    on_cpu = memory_stack(record(device="cpu", offload=Offload.PARAMS, api=Api.FSDP2))
    assert len(on_cpu) == 3  # there both memories are one


@pytest.mark.parametrize("outcome", [Outcome.OOM_GPU, Outcome.OOM_HOST, Outcome.TIMEOUT, Outcome.CRASHED])
def test_a_trial_that_did_not_end_ok_has_a_word_and_no_bar(outcome: Outcome) -> None:
    failed = record(outcome)
    assert memory_stack(failed) == communication(failed) == []
    assert ended(failed) != "unknown"


def test_running_out_within_a_limit_names_the_limit() -> None:
    limited = replace(record(Outcome.OOM_GPU), run=RunPlan(memory_limit_bytes=24 * GIB))
    assert ended(limited) == "out of memory within 24.0 GiB"


def test_retries_are_said_to_not_fit() -> None:
    assert "does not fit" in memory_text(record(retries=1))
    assert "does not fit" not in memory_text(record())


def test_the_range_is_that_of_the_slowest_rank_in_each_step() -> None:
    # Steps take max(1, 2), max(2, 2) and max(4, 4) seconds for 3 x 2048 tokens.
    assert throughput_range(record()) == (3 * 2048 / 4, 3 * 2048 / 2)


def test_exposed_and_overlapped_add_up_to_the_total() -> None:
    assert [seconds for _, seconds in communication(record())] == pytest.approx([0.2, 0.3])


def test_conditions_name_everything_that_a_reader_needs() -> None:
    (panel,) = panels([record(), record(strategy=ShardingStrategy.NO_SHARD)], "8 x Test GPU")
    text = " ".join(panel.conditions)
    for part in ("measured", "8 x Test GPU", "cuda", "torch 2.99", "3 measured", MODEL.describe(), "2 ranks"):
        assert part in text
    for part in ("batch 3", "sequence 2048", "fp32", "fsdp1", "no checkpointing", "no offload", "adamw-foreach"):
        assert part in text


def test_what_differs_is_on_the_rows_and_not_in_the_conditions() -> None:
    both = [record(precision=Precision.parse(name)) for name in ("fp32", "bf16-mixed")]
    (panel,) = panels(both, "m")
    assert [row.label for row in panel.groups[0][1]] == ["fp32", "bf16-mixed"]
    assert "on the rows: precision" in panel.conditions[1]
    assert "bf16-mixed," not in panel.conditions[1]


def test_a_strategy_that_ran_as_another_says_so() -> None:
    changed = replace(record(), effective_strategy="NO_SHARD")
    (panel,) = panels([changed], "m")
    assert "(ran NO_SHARD)" in panel.groups[0][1][0].label


def test_devices_never_share_a_picture(tmp_path: Path) -> None:
    paths = draw_all([record(), record(device="cpu")], tmp_path, "m")
    assert len(paths) == len(set(paths)) == 6
    assert {path.name.split("-llama")[0].rsplit("-", 1)[-1] for path in paths} == {"cuda", "cpu"}


def test_too_many_rows_become_several_pictures_and_none_is_lost() -> None:
    many = [
        record(strategy=strategy, api=api, precision=Precision.parse(precision), checkpointing=checkpointing)
        for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD)
        for api in Api
        for precision in ("fp32", "bf16-mixed", "bf16-true")
        for checkpointing in Checkpointing
    ]
    made = panels(many, "m")
    assert len({panel.name for panel in made}) == len(made) > 1
    sizes = [sum(len(rows) for _, rows in panel.groups) for panel in made]
    assert sum(sizes) == len(many)
    assert max(sizes) <= MAX_ROWS


def test_pictures_are_pngs_of_slide_size(tmp_path: Path) -> None:
    paths = draw_all([record(), record(Outcome.OOM_GPU, strategy=ShardingStrategy.NO_SHARD)], tmp_path, "m")
    assert [path.name.split("-llama")[0] for path in paths] == ["peak-memory", "throughput", "communication"]
    for path in paths:
        data = path.read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        assert (int.from_bytes(data[16:20]), int.from_bytes(data[20:24])) == (1600, 900)


def test_nothing_to_draw_draws_nothing(tmp_path: Path) -> None:
    assert draw_all([], tmp_path, "m") == []
    assert draw_all([record(Outcome.SKIPPED), record(Outcome.CRASHED)], tmp_path, "m") == []
    assert not list(tmp_path.iterdir())


def test_the_table_tells_outcomes_reasons_and_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    skipped = replace(record(Outcome.SKIPPED), reason="excluded: slow", ranks=())
    suspect = replace(record(retries=2), suspect=("another process (7) was on GPU 0 before the trial",))
    ran_other = replace(record(), effective_strategy="NO_SHARD")
    print_table([suspect, ran_other, skipped], Console(width=300))
    text = capsys.readouterr().out
    for part in ("ok, with retries", "FULL_SHARD (ran NO_SHARD)", "skipped 1: excluded: slow", "another process (7)"):
        assert part in text
    for part in ("10.0 GiB", "backward", "2.0 s", "3,072", MODEL.describe(), "measured"):
        assert part in text
    known = replace(record(), peak_flops_per_second=2e14, peak_flops_source="Test GPU fp32: a datasheet, 2024")
    print_table([known], Console(width=300))
    assert "dense peak 200 TFLOP/s (Test GPU fp32: a datasheet, 2024)" in capsys.readouterr().out
    assert "unknown" in text  # MFU: no peak for this GPU
