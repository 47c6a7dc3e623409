"""Charts of measured trials: stacks add up, failures are no results, conditions are complete."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console

from fsdp_bench.catalog.ladder import nearest_size
from fsdp_bench.catalog.loader import gpu_by_product_name
from fsdp_bench.report.charts import trial_bars as bars
from fsdp_bench.report.charts.description import Bar
from fsdp_bench.report.charts.slide import figure_of
from fsdp_bench.report.charts.trial_bars import (
    CHARTS,
    communication_bar,
    draw_all,
    ended,
    measured_slide,
    memory_bar,
    throughput_bar,
)
from fsdp_bench.report.charts.trial_slides import MAX_BARS, group_by_chart
from fsdp_bench.report.measured.tables import print_table
from fsdp_bench.spec.codec import to_json
from fsdp_bench.spec.model import Family
from fsdp_bench.spec.rank_report import CommunicationReading, Failure, MemoryReading, Outcome, RankReport
from fsdp_bench.spec.record import RunPlan, TrialRecord
from fsdp_bench.spec.setup import Api, Checkpointing, Offload, Precision, ShardingStrategy, TrainSetup
from fsdp_bench.sweep.results.load import machine_description, sweep_folders
from fsdp_bench.sweep.run.rehearsed import rehearsed_gpu
from tests.conftest import refused, run_command
from tests.report.charts.pictures import assert_is_a_slide, assert_texts_are_inside_and_apart, text_of_quantity
from tests.spec.test_record import record_with

MODEL = nearest_size(Family.LLAMA, 10**9)
GIB = 1024**3
NAMES = {"cuda": "NVIDIA H100 80GB HBM3", "cpu": "x86_64"}


def record(outcome: Outcome = Outcome.OK, device: str = "cuda", retries: int = 0, **setup: object) -> TrialRecord:
    made = TrainSetup(**({"world_size": 2, "sequence_length": 2048, "micro_batch_size": 3} | setup))
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
            device_name=NAMES.get(device, "unknown"),
            memory=memory,
            step_seconds=(1.0 + rank, 2.0, 4.0),
            communication=(CommunicationReading(step_seconds=2.0, total_seconds=0.5, exposed_seconds=0.2),),
            environment={"torch": "2.99"},
        )
        for rank in range(2)
    )
    model = {"model": MODEL, "num_parameters": MODEL.num_parameters}
    setup = {"setup": made, "effective_strategy": made.strategy.value, "run": RunPlan()}
    return record_with(device=device, outcome=outcome, ranks=ranks, **model, **setup)


FAILED = [Outcome.OOM_GPU, Outcome.OOM_HOST, Outcome.TIMEOUT, Outcome.CRASHED, Outcome.SKIPPED]


def out_of_memory(limit: str, device: str = "cuda", plan: RunPlan | None = None) -> TrialRecord:
    """One rank ran out; its peer was stopped."""
    outcome = Outcome.OOM_GPU if limit == "device" else Outcome.OOM_HOST
    made = record(outcome, device)
    failure = Failure(message="out", phase="backward", at=1.0, limit=limit)
    ranks = (replace(made.ranks[0], failure=failure), replace(made.ranks[1], outcome=Outcome.CRASHED))
    return replace(made, ranks=ranks, run=plan or RunPlan())


def grid(**fields: list[object]) -> list[TrialRecord]:
    return [record(**dict(zip(fields, values, strict=True))) for values in itertools.product(*fields.values())]


def parts(bar: Bar) -> tuple[tuple[str, float], ...]:
    return tuple((piece.name, piece.size) for piece in bar.pieces)


def with_peaks(*peaks: tuple[int, str]) -> TrialRecord:
    """Return the record with other peaks of its two ranks, in GiB, and their phases."""
    ranks = []
    for rank, (gib, phase) in zip(record().ranks, peaks, strict=True):
        memory = replace(rank.memory, peak_allocated_bytes=gib * GIB, peak_phase=phase)
        ranks.append(replace(rank, memory=memory))
    return replace(record(), ranks=tuple(ranks))


STACK = {bars.STORED: 2 * GIB, bars.OPTIMIZER: 4 * GIB, bars.REST: 4 * GIB}
ON_CPU = {"device": "cpu", "offload": Offload.PARAMS, "api": Api.FSDP2}


@pytest.mark.parametrize(
    ("trial", "expected", "phase"),
    [
        (record(), STACK, "backward"),
        (record(offload=Offload.PARAMS), {bars.WHOLE: 10 * GIB}, "backward"),
        (with_peaks((5, "backward"), (5, "backward")), {bars.WHOLE: 5 * GIB}, "backward"),
        (with_peaks((9, "backward"), (11, "optimizer")), {**STACK, bars.REST: 5 * GIB}, "optimizer"),
        (record(**ON_CPU), STACK, "backward"),  # there both memories are one
    ],
    ids=["on the GPU", "stored in host memory", "below what is stored", "the worst rank", "offloaded on a CPU"],
)
def test_a_stack_adds_up_to_the_peak_of_the_worst_rank(
    trial: TrialRecord, expected: dict[str, int], phase: str
) -> None:
    bar = memory_bar(trial)
    assert (dict(parts(bar)), bar.words) == (expected, (phase,))


@pytest.mark.parametrize("outcome", FAILED)
def test_a_trial_that_did_not_end_ok_is_a_word_and_never_a_success(outcome: Outcome) -> None:
    failed = record(outcome)
    for bar in (memory_bar(failed), throughput_bar(failed), communication_bar(failed)):
        assert not bar.is_result
        assert bar.words == (ended(failed),)
        assert not parts(bar)  # what was measured until then is not drawn
        assert bar.spread is None


LIMITED = RunPlan(memory_limit_bytes=24 * GIB)


@pytest.mark.parametrize(
    ("trial", "limit_bytes", "word"),
    [
        (out_of_memory("device"), gpu_by_product_name(NAMES["cuda"]).nvml_total_bytes, "OOM"),
        (out_of_memory("budget", "cpu", LIMITED), 24 * GIB, "OOM (budget)"),
        (out_of_memory("host", plan=LIMITED), None, "OOM (host)"),  # the limit is the device's
    ],
)
def test_running_out_is_drawn_up_to_the_limit_that_was_not_enough(
    trial: TrialRecord, limit_bytes: int | None, word: str
) -> None:
    bar = memory_bar(trial)
    assert (bar.is_result, bar.words) == (False, (word,))
    assert parts(bar) == (() if limit_bytes is None else ((bars.OUT_OF_MEMORY, limit_bytes),))
    assert throughput_bar(trial).pieces == ()


BARE, KNOWN = replace(record(), ranks=()), replace(record(), peak_flops_per_second=1e15)


@pytest.mark.parametrize(
    ("bar", "trial", "words"),
    [
        (memory_bar, BARE, ("unknown",)),
        (throughput_bar, BARE, ("unknown",)),
        (communication_bar, BARE, ("unknown",)),
        (memory_bar, record(), ("backward",)),
        (memory_bar, replace(record(retries=1), suspect=("another process",)), ("backward", "retries", "suspect")),
        (throughput_bar, record(), ()),
        (throughput_bar, KNOWN, (f"MFU {KNOWN.mfu:.0%}",)),
    ],
)
def test_a_bar_has_its_phase_warnings_and_mfu_or_unknown(bar: Any, trial: TrialRecord, words: tuple[str, ...]) -> None:
    assert bar(trial).words == words


def test_throughput_is_the_median_with_the_slowest_and_fastest_step() -> None:
    # Steps take max(1, 2), max(2, 2) and max(4, 4) seconds for 3 x 2048 tokens.
    bar = throughput_bar(record())
    assert (bar.total, bar.spread) == (3 * 2048 / 2, (3 * 2048 / 4, 3 * 2048 / 2))


def test_exposed_and_overlapped_add_up_to_the_total() -> None:
    bar = communication_bar(record())
    assert dict(parts(bar)) == pytest.approx({bars.EXPOSED: 0.2, bars.OVERLAPPED: 0.3})
    assert bar.words == ("40%",)


@pytest.mark.parametrize(("device", "named"), [("cuda", "NVIDIA H100 80GB HBM3"), ("cpu", "CPU, gloo")])
def test_conditions_name_everything_that_a_reader_needs(device: str, named: str) -> None:
    both = [record(device=device), record(device=device, strategy=ShardingStrategy.NO_SHARD)]
    (trials,) = group_by_chart(both, "the machine")
    for fact in (
        "source: measured", "machine: the machine", f"device: {named}", "torch 2.99", f"model: {MODEL.describe()}",
        "setup: fsdp1, 2 ranks, batch 3 x 2048 tokens, fp32, offload none, checkpointing none, adamw-foreach",
        "3 measured steps after 2 warm-up, 1 profiled",
    ):  # fmt: skip
        assert fact in trials.conditions


@pytest.mark.parametrize(("hardware", "named"), [("cuda", "one GPU as rank 0"), ("cpu", "one process as rank 0")])
def test_rank_0_alone_is_named_and_its_steps_are_said_to_be_without_communication(
    hardware: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = replace(record(device=hardware), device="emulated", emulated_on=hardware)
    (trials,) = group_by_chart([alone], "two machines")
    assert any(named in condition and "(emulated)" in condition for condition in trials.conditions)
    print_table([alone], Console())
    printed = capsys.readouterr().out
    assert "2 emulated" in printed
    assert "without communication" in printed


def rehearsed() -> TrialRecord:
    """A record without times, of a GPU that is not there."""
    made = record()
    run = RunPlan(communication_steps=0, emulate=True, rehearsed_on=rehearsed_gpu("H100-SXM"))
    ranks = tuple(rank.without_times() for rank in made.ranks)
    return replace(made, source="rehearsed", device="rehearsed", emulated_on="cuda", run=run, ranks=ranks)


def test_rehearsed_trials_have_a_chart_of_memory_alone_that_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = draw_all([rehearsed()], tmp_path, "NVIDIA H100 80GB HBM3 (rehearsed)")
    assert path.name == "peak-memory.png"
    (trials,) = group_by_chart([rehearsed()], "m")
    assert "(rehearsed)" in trials.place
    assert "source: rehearsed" in trials.conditions
    assert any("2.0 GiB of it kept free for the CUDA context and NCCL" in text for text in trials.conditions)
    print_table([rehearsed()], Console(width=200))
    printed = capsys.readouterr().out
    assert "rehearsed: 1 trials" in printed
    assert "2 rehearsed" in printed
    assert "tokens/s" not in printed
    assert "times are" not in printed


@pytest.mark.parametrize(
    ("fields", "levels", "labels", "conditions"),
    [
        (
            {"precision": [Precision.parse("bf16-mixed"), Precision.parse("fp32")], "api": list(Api)},
            ("precision", "api"),
            [("fp32", "fsdp1"), ("fp32", "fsdp2"), ("bf16-mixed", "fsdp1"), ("bf16-mixed", "fsdp2")],
            set(),
        ),
        (
            {"strategy": [ShardingStrategy.HYBRID_SHARD], "world_size": [8], "shard_size": [4, 2]},
            *(("shard group",), [("2",), ("4",)], {"shard group 2 / 4"}),
        ),
        # options that are not the defaults are conditions
        (
            {"gradient_accumulation_steps": [4], "forward_prefetch": [True]},
            *((), [()], {"accumulate 4", "forward prefetch on"}),
        ),
    ],
)
def test_varying_fields_are_levels_of_labels_and_others_conditions(
    fields: dict[str, list[object]], levels: tuple[str, ...], labels: list[tuple[str, ...]], conditions: set[str]
) -> None:
    (trials,) = group_by_chart(grid(**fields), "m")
    assert (trials.levels, [found for found, _ in trials.groups[0].trials]) == (levels, labels)
    assert all(condition in "; ".join(trials.conditions) for condition in conditions)
    assert any("prefetch" in condition for condition in trials.conditions) == ("forward_prefetch" in fields)


@pytest.mark.parametrize(
    ("records", "headers"),
    [
        (
            grid(strategy=list(ShardingStrategy), world_size=[4]),
            ["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2", "NO_SHARD"],
        ),
        ([replace(record(), effective_strategy="NO_SHARD"), record(api=Api.FSDP2)],
         ["FULL_SHARD", "FULL_SHARD\n(ran NO_SHARD)"]),
    ],
)  # fmt: skip
def test_strategies_stand_in_one_order_with_what_ran_instead(records: list[TrialRecord], headers: list[str]) -> None:
    (trials,) = group_by_chart(records, "m")
    assert [group.header for group in trials.groups] == headers


def test_skipped_trials_are_named_with_their_reason() -> None:
    skipped = [
        replace(record(Outcome.SKIPPED, strategy=ShardingStrategy.HYBRID_SHARD, api=api), reason="too few", ranks=())
        for api in Api
    ]
    (trials,) = group_by_chart([record(), *skipped], "m")
    assert [group.collapsed for group in trials.groups] == [False, True]
    assert trials.notes == ("2 skipped: too few",)
    assert not any("shard group" in condition for condition in trials.conditions)  # none ran


@pytest.mark.parametrize(
    "other",
    [
        record(device="cpu"),
        replace(record(), run=RunPlan(steps=7)),
        replace(record(), ranks=(replace(record().ranks[0], environment={"torch": "3.0"}),)),
        replace(record(), ranks=(replace(record().ranks[0], device_name="NVIDIA L4"),)),
        replace(record(), device="emulated", emulated_on="cuda"),
        rehearsed(),
    ],
    ids=["device", "run", "torch", "gpu", "emulated", "rehearsed"],
)
def test_trials_that_cannot_be_compared_never_share_a_chart(other: TrialRecord) -> None:
    made = group_by_chart([record(), other], "m")
    assert [len(trials.records) for trials in made] == [1, 1]
    assert len({trials.suffix for trials in made}) == 2


def test_a_trial_that_could_not_say_where_it_ran_joins_its_kind() -> None:
    crashed = replace(record(Outcome.CRASHED, api=Api.FSDP2), ranks=())
    (trials,) = group_by_chart([crashed, record()], "m")
    assert len(trials.records) == 2
    assert "torch 2.99" in trials.conditions


def test_too_many_bars_become_several_charts_and_none_is_lost() -> None:
    many = grid(
        strategy=list(ShardingStrategy),
        world_size=[4, 8],
        api=list(Api),
        precision=[Precision.parse(name) for name in ("fp32", "bf16-mixed", "bf16-true")],
        checkpointing=list(Checkpointing),
    )
    made = group_by_chart(many, "m")
    assert len({trials.suffix for trials in made}) == len(made) > 1
    shown = [found for trials in made for found in trials.records]
    assert len(shown) == len(many) == len({id(found) for found in shown})
    assert max(len(trials.records) for trials in made) <= MAX_BARS
    assert all("4 ranks" in trials.subtitle or "8 ranks" in trials.subtitle for trials in made)
    alike = group_by_chart([record() for _ in range(MAX_BARS + 1)], "m")
    assert sorted(len(trials.records) for trials in alike) == [1, MAX_BARS]
    assert len({trials.suffix for trials in alike}) == 2


def test_small_models_share_a_chart_and_large_sweeps_do_not() -> None:
    sizes = [nearest_size(Family.LLAMA, count) for count in (10**7, 10**8, 10**9)]
    few = [replace(record(), model=size) for size in sizes]
    (trials,) = group_by_chart(few, "m")
    assert trials.levels == ("model",)
    for size in sizes:
        assert any(size.describe() in condition for condition in trials.conditions)


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.name)
@pytest.mark.parametrize(
    "fields",
    [
        {"strategy": list(ShardingStrategy), "world_size": [4], "api": list(Api)},
        {"world_size": [2, 4], "api": list(Api), "checkpointing": list(Checkpointing), "precision": [
            Precision.parse("fp32"), Precision.parse("bf16-mixed-bf16-reduce")]},
        {},
    ],
    ids=["strategies", "as many bars as there may be", "one bar"],
)  # fmt: skip
def test_texts_lie_on_the_chart_and_apart(chart: object, fields: dict[str, list[object]]) -> None:
    for trials in group_by_chart(grid(**fields), "a machine"):
        assert_texts_are_inside_and_apart(figure_of(measured_slide(chart, trials)))


def test_every_bar_carries_its_number_and_the_title_says_on_how_many_ranks() -> None:
    (trials,) = group_by_chart(grid(strategy=list(ShardingStrategy), world_size=[4]), "the machine")
    written = text_of_quantity(figure_of(measured_slide(CHARTS[0], trials)))
    assert written.count("10.0 backward") == 5
    assert "Peak memory by sharding strategy: 4 ranks, NVIDIA H100 80GB HBM3" in written
    for words in ("stored parameters", "optimizer state", "FULL_SHARD", "NO_SHARD", "machine: the machine"):
        assert words in written


SILENT = CommunicationReading(step_seconds=1.0, total_seconds=0.0, exposed_seconds=0.0)
ALONE = replace(record(), ranks=(replace(record().ranks[0], communication=(SILENT,)),))
DOUBTFUL = replace(record(api=Api.FSDP2, retries=1), suspect=("x " * 400,))
KINDS = ["peak-memory", "throughput", "communication"]


@pytest.mark.parametrize(
    ("records", "names"),
    [
        ([], []),
        ([record(device="fake")], []),  # a dry run
        ([record(Outcome.SKIPPED), record(Outcome.CRASHED)], []),
        ([out_of_memory("device")], ["peak-memory"]),
        ([ALONE], ["peak-memory", "throughput"]),
        ([DOUBTFUL, record(), out_of_memory("device")], KINDS),
        ([record(), record(device="cpu")], [f"{chart}-{device}" for chart in KINDS for device in NAMES]),
    ],
    ids=["nothing", "dry run", "failed", "out of memory", "no communication", "all", "two devices"],
)
def test_only_what_was_measured_is_drawn(records: list[TrialRecord], names: list[str], tmp_path: Path) -> None:
    paths = draw_all(records, tmp_path, "m")
    assert sorted(path.name for path in paths) == sorted(f"{name}.png" for name in names)
    assert set(tmp_path.iterdir()) == set(paths)
    for path in paths:
        assert_is_a_slide(path)


def test_the_table_tells_outcomes_reasons_and_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    skipped = replace(record(Outcome.SKIPPED), reason="excluded: slow", ranks=())
    suspect = replace(record(retries=2), suspect=("another process (7) was on GPU 0 before the trial",))
    ran_other = replace(record(), effective_strategy="NO_SHARD")
    print_table([suspect, ran_other, skipped], Console(width=300))
    text = capsys.readouterr().out
    for part in ("ok, with retries", "FULL_SHARD (ran NO_SHARD)", "skipped 1: excluded: slow", "another process (7)"):
        assert part in text
    for part in ("10.0 GiB", "backward", "2,000 ms", "3,072", MODEL.describe(), "measured"):
        assert part in text
    known = replace(record(), peak_flops_per_second=2e14, peak_flops_source="Test GPU fp32: a datasheet, 2024")
    print_table([known], Console(width=300))
    assert "dense peak 200 TFLOP/s (Test GPU fp32: a datasheet, 2024)" in capsys.readouterr().out
    assert "unknown" in text  # MFU: no peak for this GPU


def test_charts_of_an_earlier_drawing_do_not_stay(tmp_path: Path) -> None:
    (tmp_path / "peak-memory-old.png").write_text("")
    (tmp_path / "mine.png").write_text("")
    drawn = draw_all([record()], tmp_path, "m")
    assert set(tmp_path.iterdir()) == {*drawn, tmp_path / "mine.png"}


def test_a_folder_above_the_sweeps_draws_with_the_name_of_its_machine(tmp_path: Path) -> None:
    """The sweep's folder describes the machine; a folder with several sweeps is refused, even of several machines."""
    for machine in ("one", "two"):
        trials = tmp_path / machine / "s" / "trials"
        trials.mkdir(parents=True)
        (trials / f"{record().id}.json").write_bytes(to_json(record()))
    source = Path(__file__).parents[3] / "results" / "xeon-2-cores" / "cpu" / "machine.json"
    (tmp_path / "one" / "s" / "machine.json").write_bytes(source.read_bytes())
    home = tmp_path / "one" / "s"
    for above in (tmp_path / "one", home, home / "trials"):
        assert sweep_folders(above) == [home]
    assert "cores of" in machine_description(home)
    drawn = run_command("chart", tmp_path / "one")
    assert drawn.returncode == 0, drawn.stderr
    assert (home / "peak-memory.png").exists()  # in the sweep's own folder
    assert f"holds several sweeps; name one: {home}, {tmp_path / 'two' / 's'}" in refused("chart", tmp_path)
