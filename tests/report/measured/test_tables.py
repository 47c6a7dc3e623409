"""The table of measured trials: its contents, order, width and conclusion."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console

from fsdp_bench.report.measured.tables import conclusion, matrix_rate_line, print_communication, print_table
from fsdp_bench.spec.calibration_profile import MatmulTime, Profile, RankProfile, write_profile
from fsdp_bench.spec.codec import to_json
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.rank_report import CollectiveReading, CommunicationReading, MemoryReading, Outcome, RankReport
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.sweep.results.load import read_records
from fsdp_bench.validate.step_time import matrix_rates
from tests.conftest import stdout_of
from tests.report.charts.test_trials import GIB, record
from tests.spec.test_record import record_with
from tests.validate.test_memory import MODEL, reading, record_of

RESULTS = Path(__file__).parents[3] / "results" / "xeon-2-cores"


def trial(strategy: str, peak_gib: int, seconds: float, **setup: object) -> TrialRecord:
    made = record(strategy=strategy, **setup)
    memory = MemoryReading(peak_allocated_bytes=peak_gib * GIB, peak_phase="backward", phases={})
    return replace(made, ranks=tuple(replace(rank, memory=memory, step_seconds=(seconds,)) for rank in made.ranks))


FULL, GRAD, NONE = trial("FULL_SHARD", 10, 3.0), trial("SHARD_GRAD_OP", 12, 2.0), trial("NO_SHARD", 40, 4.0)


def printed(records: list[TrialRecord], width: int, capsys: pytest.CaptureFixture[str]) -> list[str]:
    print_table(records, Console(width=width))
    return capsys.readouterr().out.splitlines()


def test_rows_go_from_the_least_memory_to_the_most(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed([NONE, GRAD, FULL], 120, capsys)
    rows = [line.split()[0] for line in lines if line.startswith(("FULL", "SHARD", "NO_"))]
    assert rows == ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]


def test_values_that_all_trials_share_are_printed_once_above_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    title, header = "\n".join(printed([NONE, FULL], 120, capsys)).split("strategy")
    assert "precision fp32" in title
    assert "sequence 2048" in title
    assert "precision" not in header


@pytest.mark.parametrize("width", [80, 100, 120])
def test_every_committed_sweep_fits_the_terminal_and_what_is_left_out_is_named(
    width: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Model names, precisions, ranks and strategies all vary in the long sweep."""
    lines = printed(read_records(RESULTS / "cpu"), width, capsys)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "peak" in text
    assert (f"left out at {width} columns: " in text) == (width < 120)


def test_a_sentence_with_the_findings_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    """3 x 2048 tokens in 3, 2 and 4 s are 2,048, 3,072 and 1,536 a second."""
    text = " ".join(printed([NONE, GRAD, FULL], 300, capsys))
    assert text.startswith(
        "Found for llama-1B on 2 ranks: FULL_SHARD takes the least memory, 10.0 GiB per rank, 25% of NO_SHARD;"
        " SHARD_GRAD_OP is the fastest, 3,072 tokens/s per rank, 2.0 times NO_SHARD."
    )


def test_the_sentence_names_the_options_that_differ_and_compares_within_one_world_size() -> None:
    fsdp2, other_world = trial("FULL_SHARD", 9, 6.0, api="fsdp2"), trial("FULL_SHARD", 1, 0.1, world_size=4)
    sentence = conclusion([FULL, fsdp2, other_world])
    assert "FULL_SHARD fsdp2 takes the least memory, 9.0 GiB per rank, 90% of FULL_SHARD fsdp1" in sentence
    assert "FULL_SHARD fsdp1 is the fastest, 2,048 tokens/s per rank, 2.0 times FULL_SHARD fsdp2" in sentence


def test_where_nothing_fits_the_sentence_says_how_the_trials_ended() -> None:
    retried, failed = record(retries=1), record(Outcome.OOM_GPU)
    assert conclusion([retried, failed, failed]) == "Found: no trial fits (1 ok, with retries, 2 oom_gpu)."
    assert conclusion([FULL, failed]) == "Found: one trial fits, llama-1B on 2 ranks: FULL_SHARD."


PRODUCTS = tuple(
    MatmulTime(layout="nt", dtype=dtype, m=100, n=100, k=50, seconds=seconds)  # 10^6 operations
    for dtype, seconds in (("fp32", 1.0), ("fp32", 0.5), ("bf16", 0.1))
)
PROFILE = Profile(
    machine="two cores",
    device="cpu",
    device_name="a processor",
    measured_on="2026-11-21",
    versions={},
    ranks=(RankProfile(num_ranks=1, threads_per_rank=1, launch_seconds=0, hook_seconds={}, matmul=PRODUCTS),),
)


def trained(seconds: float) -> TrialRecord:
    record = record_of(reading({"forward": 1}))
    return replace(record, ranks=(replace(record.ranks[0], step_seconds=(seconds,)),))


def test_the_fastest_trial_stands_beside_the_fastest_product() -> None:
    """2 m n k over the shorter time is 2e6 operations a second; a dtype that nobody trained in is left out."""
    fast, slow = trained(2.0), trained(4.0)
    tokens = fast.setup.tokens_per_step_per_rank
    flops = tokens * MODEL.model_flops_per_token(fast.setup.sequence_length) / 2.0
    (rate,) = matrix_rates([slow, fast], PROFILE)
    assert (rate.dtype, rate.matmul_flops_per_second) == ("fp32", pytest.approx(2e6))
    assert rate.model_flops_per_second == pytest.approx(flops)
    assert rate.fraction == pytest.approx(flops / 2e6)
    assert "calibrated on two cores, 2026-11-21" in matrix_rate_line(rate, PROFILE)


def test_a_calibration_of_another_machine_is_refused_with_the_reason() -> None:
    """Another kind of device, another card, and one process alone on cores that ranks shared when calibrated."""
    with pytest.raises(SpecError, match="of another machine than the trials: the calibration is of two cores"):
        matrix_rates([trained(2.0)], replace(PROFILE, device="cuda"))
    on_card = replace(trained(2.0), device="cuda", ranks=(replace(trained(2.0).ranks[0], device_name="NVIDIA H100"),))
    with pytest.raises(SpecError, match="the calibration is of a processor, the trial ran on NVIDIA H100"):
        matrix_rates([on_card], replace(PROFILE, device="cuda"))
    assert len(matrix_rates([on_card], replace(PROFILE, device="cuda", device_name="NVIDIA H100"))) == 1
    alone = replace(trained(2.0), device="emulated", emulated_on="cpu")
    with pytest.raises(SpecError, match="the trial ran one process on all cores"):
        matrix_rates([alone], replace(PROFILE, ranks=(replace(PROFILE.ranks[0], num_ranks=2),)))


def test_emulated_trials_stand_apart_and_say_so() -> None:
    """Steps without communication are faster, because no data is sent."""
    alone = replace(trained(1.0), device="emulated", emulated_on="cpu")
    real, emulated = matrix_rates([trained(2.0), alone], PROFILE)
    assert emulated.model_flops_per_second == pytest.approx(2 * real.model_flops_per_second)
    assert ("emulated" in real.trial, "emulated" in emulated.trial) == (False, True)


def report_on(record: TrialRecord, folder: Path, *words: object) -> str:
    """Return what the command prints about one trial."""
    trials = folder / "m" / "s" / "trials"
    trials.mkdir(parents=True, exist_ok=True)
    (trials / f"{record.id}.json").write_bytes(to_json(record))
    return stdout_of("report", folder / "m", *words)


def test_the_report_prints_it(tmp_path: Path) -> None:
    write_profile(PROFILE, tmp_path / "here.toml")
    record, words = trained(2.0), ("--calibration", tmp_path / "here.toml")
    assert "fp32 matrix products reach 2e-06 TFLOP/s" in report_on(record, tmp_path, *words)
    (rate,) = json.loads(report_on(record, tmp_path, *words, "--json"))["matrix_rates"]
    assert rate["dtype"] == "fp32"
    assert rate["share"] == pytest.approx(record.model_flops_per_second / 2e6)
    assert "matrix_rates" not in json.loads(report_on(record, tmp_path, "--json"))


def rank(number: int, gather_seconds: tuple[float, ...], exposed: float, silent: float) -> RankReport:
    """Steps of 4 s; 6 GB are gathered among four ranks."""
    readings = tuple(
        CommunicationReading(
            step_seconds=5.0,
            total_seconds=2.0,
            exposed_seconds=exposed,
            collectives=(
                CollectiveReading(kind="all_gather", calls=9, message_bytes=6 * 10**9, seconds=seconds, group_size=4),
                CollectiveReading(kind="broadcast", calls=1, message_bytes=4),
            ),
        )
        for seconds in gather_seconds
    )
    return RankReport(
        rank=number,
        outcome=Outcome.OK,
        step_seconds=(4.0,),
        communication=readings,
        seconds_without_communication=(silent,),
    )


def communicating(exposed: float, silent: float) -> TrialRecord:
    ranks = rank(0, (0.5, 9.0, 1.0), exposed, silent), rank(1, (1.5, 2.0, 9.0), exposed, silent)
    return record_with(ranks=ranks)


def test_a_kind_is_the_worst_ranks_median_with_the_bus_bandwidth_of_nccl_tests(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_communication([communicating(exposed=1.0, silent=3.1)], Console())
    shown = capsys.readouterr().out
    gather = next(line for line in shown.splitlines() if "all_gather" in line).split()
    assert gather == ["all_gather", "9", "5.6", "GiB", "4", "2.0", "s", "2.25", "GB/s"]  # 6 GB / 2 s x 3 / 4
    broadcast = next(line for line in shown.splitlines() if "broadcast" in line)
    assert "unknown" in broadcast  # the profiler did not see it
    assert "!" not in shown.split("exposed: time")[0]


@pytest.mark.parametrize(("silent", "star"), [(3.1, False), (2.0, True)])
def test_two_exposures_that_are_far_apart_are_marked(
    silent: float, star: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the profiler 1 s of 5 is exposed; by difference 0.9 s of 4, or 2 s."""
    print_table([communicating(exposed=1.0, silent=silent)], Console(width=150))
    assert ("1,000 ms*" in (shown := capsys.readouterr().out)) == star
    assert ("by more than 10 points" in shown) == star
    print_communication([communicating(exposed=1.0, silent=silent)], Console())
    shown = " ".join(capsys.readouterr().out.split())
    assert "1.0 s (20%) by the profiler" in shown
    assert ("2.0 s (50%) by difference !" if star else "900.0 ms (22%) by difference") in shown


def test_a_failure_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    failed = replace(record_with().ranks[0], without_communication_failure="RuntimeError: no such thing")
    print_communication([record_with(ranks=(failed,))], Console())
    assert "steps without communication failed: RuntimeError: no such thing" in capsys.readouterr().out


def test_the_same_is_printed_as_json(tmp_path: Path) -> None:
    printed = report_on(communicating(exposed=1.0, silent=2.0), tmp_path, "--communication", "--json")
    (trial,) = json.loads(printed)["trials"]
    assert trial["exposed_communication_seconds"] == 1.0
    assert trial["exposed_by_difference_seconds"] == 2.0
    gather = trial["collectives"][0]
    assert (gather["kind"], gather["bus_bandwidth_bytes_per_second"]) == ("all_gather", 2.25e9)


def test_trials_are_told_apart_and_emulated_ones_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    one = communicating(exposed=1.0, silent=3.1)
    larger = replace(one, setup=replace(one.setup, micro_batch_size=8), device="emulated", emulated_on="cuda")
    print_communication([one, larger], Console())
    first, second = (line for line in capsys.readouterr().out.splitlines() if "FULL_SHARD" in line)
    assert f"batch {one.setup.micro_batch_size}" in first
    assert "emulated" not in first
    assert f"world {one.setup.world_size} emulated" in second
    assert "batch 8" in second
