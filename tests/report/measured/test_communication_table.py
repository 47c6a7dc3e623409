"""``report --communication``: kinds, bandwidths, and exposed communication found in two ways."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console

from fsdp_bench.report.measured.tables import print_communication, print_table
from fsdp_bench.spec.codec import to_json
from fsdp_bench.spec.rank_report import CollectiveReading, CommunicationReading, Outcome, RankReport
from fsdp_bench.spec.record import TrialRecord
from tests.conftest import run_command
from tests.spec.test_record import golden


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


def record(exposed: float, silent: float) -> TrialRecord:
    ranks = rank(0, (0.5, 9.0, 1.0), exposed, silent), rank(1, (1.5, 2.0, 9.0), exposed, silent)
    return replace(golden(), ranks=ranks)


def test_a_kind_is_the_worst_ranks_median_with_the_bus_bandwidth_of_nccl_tests(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_communication([record(exposed=1.0, silent=3.1)], Console())
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
    print_table([record(exposed=1.0, silent=silent)], Console(width=150))
    assert ("1.0 s*" in (shown := capsys.readouterr().out)) == star
    assert ("by more than 10 points" in shown) == star
    print_communication([record(exposed=1.0, silent=silent)], Console())
    shown = " ".join(capsys.readouterr().out.split())
    assert "1.0 s (20%) by the profiler" in shown
    assert ("2.0 s (50%) by difference !" if star else "900.0 ms (22%) by difference") in shown


def test_a_failure_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    failed = replace(golden().ranks[0], without_communication_failure="RuntimeError: no such thing")
    print_communication([replace(golden(), ranks=(failed,))], Console())
    assert "steps without communication failed: RuntimeError: no such thing" in capsys.readouterr().out


def test_the_same_is_printed_as_json(tmp_path: Path) -> None:
    (tmp_path / "m" / "s" / "trials").mkdir(parents=True)
    made = record(exposed=1.0, silent=2.0)
    (tmp_path / "m" / "s" / "trials" / f"{made.id}.json").write_bytes(to_json(made))
    done = run_command("report", tmp_path, "--communication", "--json")
    assert done.returncode == 0, done.stderr
    (trial,) = json.loads(done.stdout)["trials"]
    assert trial["exposed_communication_seconds"] == 1.0
    assert trial["exposed_by_difference_seconds"] == 2.0
    gather = trial["collectives"][0]
    assert (gather["kind"], gather["bus_bandwidth_bytes_per_second"]) == ("all_gather", 2.25e9)


def test_trials_are_told_apart_and_emulated_ones_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    one = record(exposed=1.0, silent=3.1)
    larger = replace(one, setup=replace(one.setup, micro_batch_size=8), device="emulated", emulated_on="cuda")
    print_communication([one, larger], Console())
    first, second = (line for line in capsys.readouterr().out.splitlines() if "FULL_SHARD" in line)
    assert f"batch {one.setup.micro_batch_size}" in first
    assert "emulated" not in first
    assert f"world {one.setup.world_size} emulated" in second
    assert "batch 8" in second
