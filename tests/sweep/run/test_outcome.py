"""The first cause of a trial's end, from what its ranks left."""

from __future__ import annotations

import math
import signal
from pathlib import Path

import msgspec
import pytest

from fsdp_bench.spec.rank_report import Failure, Outcome, RankReport
from fsdp_bench.sweep.launchers.launcher import signal_name
from fsdp_bench.sweep.machine import OutOfMemoryKills
from fsdp_bench.sweep.run.outcome import OutOfMemoryKill, RankEnd, TrialEnd, decide_outcome
from fsdp_bench.sweep.session import SweepResults
from tests.trial_records import record_with


def decide(ends: list[RankEnd], timed_out: bool = False, oom_killed: OutOfMemoryKill = "no") -> TrialEnd:
    return decide_outcome(ends, timed_out=timed_out, oom_killed=oom_killed, timeout_seconds=60)


def ok(rank: int) -> RankEnd:
    return RankEnd(rank=rank, report=RankReport(rank=rank, outcome=Outcome.OK), exit_code=0)


def failed(rank: int, at: float, outcome: Outcome = Outcome.CRASHED, limit: str | None = None) -> RankEnd:
    failure = Failure(message=f"message of {rank}", phase="backward", at=at, limit=limit)
    return RankEnd(rank=rank, report=RankReport(rank=rank, outcome=outcome, failure=failure), exit_code=1)


def test_all_ranks_ok_is_ok() -> None:
    assert decide([ok(0), ok(1)]).outcome is Outcome.OK


def test_memory_that_ran_out_on_one_rank_wins_over_its_echo_on_the_others() -> None:
    verdict = decide([failed(0, at=1.0), failed(1, at=2.0, outcome=Outcome.OOM_GPU, limit="device")])
    assert (verdict.outcome, verdict.rank) == (Outcome.OOM_GPU, 1)


@pytest.mark.parametrize("end", [{"signal": signal.SIGABRT}, {"exit_code": 1}], ids=str)
def test_memory_that_ran_out_on_one_rank_wins_over_the_end_of_another_without_a_report(end: dict[str, int]) -> None:
    """NCCL's watchdog aborts the peers of a rank that has left, before they can report it."""
    verdict = decide(
        [RankEnd(rank=0, stage="steps", **end), failed(1, at=2.0, outcome=Outcome.OOM_GPU, limit="device")]
    )
    assert (verdict.outcome, verdict.rank) == (Outcome.OOM_GPU, 1)


def test_a_trial_that_only_lacked_its_steps_without_communication_was_measured() -> None:
    def silent(rank: int) -> RankEnd:
        return RankEnd(rank=rank, report=ok(rank).report, stage="without communication")

    assert decide([silent(0), silent(1)], timed_out=True).outcome is Outcome.OK
    assert decide([ok(0), RankEnd(rank=1, report=ok(1).report, signal=signal.SIGKILL)]).outcome is Outcome.OK
    assert decide([silent(0), RankEnd(rank=1, stage="steps")], timed_out=True).outcome is Outcome.TIMEOUT


def test_a_budget_is_labelled_as_one() -> None:
    verdict = decide([failed(0, at=1.0, outcome=Outcome.OOM_HOST, limit="budget")])
    assert verdict.outcome is Outcome.OOM_HOST
    assert "a budget, not a GPU" in (verdict.reason or "")


def test_the_earliest_failure_is_the_cause() -> None:
    assert decide([failed(0, at=2.0), failed(1, at=1.0)]).rank == 1


def test_a_killed_rank_is_the_cause_of_its_peers_broken_connections() -> None:
    verdict = decide([failed(0, at=1.0), RankEnd(rank=1, signal=signal.SIGKILL, stage="steps")])
    assert (verdict.outcome, verdict.rank) == (Outcome.CRASHED, 1)
    assert verdict.reason == "rank 1 was ended by SIGKILL in steps"


def test_a_rank_that_the_kernel_killed_for_memory_is_out_of_host_memory() -> None:
    """Where it only killed some process on the machine, this is only possible."""
    ends = [failed(0, at=1.0), RankEnd(rank=1, signal=signal.SIGKILL, stage="load")]
    certain, possible = decide(ends, oom_killed="yes"), decide(ends, oom_killed="possibly")
    assert certain.outcome is possible.outcome is Outcome.OOM_HOST
    assert certain.reason == "rank 1 was killed by the kernel in load: host memory ran out"
    assert "possibly by the kernel" in (possible.reason or "")


def test_kills_of_other_cgroups_are_not_ours() -> None:
    def kills(own: int | None, machine: int) -> OutOfMemoryKills:
        return OutOfMemoryKills(own=own, machine=machine)

    assert kills(3, 9).since(kills(3, 8)) == "no"
    assert kills(4, 9).since(kills(3, 8)) == "yes"
    assert kills(None, 9).since(kills(None, 8)) == "possibly"
    assert kills(None, 9).since(kills(None, 9)) == "no"


def test_another_signal_is_no_lack_of_memory_even_when_something_was_killed_for_it() -> None:
    assert decide([RankEnd(rank=0, signal=signal.SIGSEGV)], oom_killed="yes").outcome is Outcome.CRASHED


def test_ranks_that_are_still_running_at_the_limit_are_a_timeout_that_names_where_one_was() -> None:
    verdict = decide([ok(0), RankEnd(rank=1, stage="warmup")], timed_out=True)
    assert verdict.outcome is Outcome.TIMEOUT
    assert verdict.reason == "not done after 60 s; rank 1 was in warmup"


def test_a_failure_that_was_reported_before_the_limit_is_no_timeout() -> None:
    assert decide([failed(0, at=1.0), RankEnd(rank=1)], timed_out=True).outcome is Outcome.CRASHED


@pytest.mark.parametrize("code", [0, 3, 5])
@pytest.mark.parametrize("peer", [ok(1), failed(1, at=1.0)], ids=["ok", "broken connection"])
def test_a_rank_that_ended_without_a_report_is_the_cause_whatever_its_peer_says(code: int, peer: RankEnd) -> None:
    verdict = decide([RankEnd(rank=0, exit_code=code, stage="steps"), peer])
    assert (verdict.outcome, verdict.rank) == (Outcome.CRASHED, 0)
    assert f"exit code {code} in steps and left no report" in (verdict.reason or "")


def test_an_exit_code_that_torchrun_gives_for_all_ranks_is_no_ranks_own() -> None:
    """It ends the peers of the rank that failed, which then have no report."""
    ended = RankEnd(rank=0, exit_code=1, is_of_torchrun=True)
    assert decide([ended, msgspec.structs.replace(failed(1, at=1.0), is_of_torchrun=True)]).rank == 1


@pytest.mark.parametrize("number", [40, 64, int(signal.SIGRTMIN), 32, 9])
def test_every_signal_has_a_name(number: int) -> None:
    verdict = decide([RankEnd(rank=0, signal=number, stage="load"), ok(1)])
    assert verdict.outcome is Outcome.CRASHED
    assert verdict.reason == f"rank 0 was ended by {signal_name(number)} in load"
    assert signal_name(signal.SIGRTMIN + 6) == "SIGRTMIN+6"


def test_a_trial_that_diverged_is_ok_and_says_so() -> None:
    end = RankEnd(rank=0, report=RankReport(rank=0, outcome=Outcome.OK, losses=(1.0, math.nan)), exit_code=0)
    verdict = decide([end])
    assert (verdict.outcome, verdict.reason) == (Outcome.OK, "loss became nan at step 2 on rank 0")


@pytest.mark.parametrize("outcome", Outcome)
def test_a_sweep_has_failed_if_a_trial_crashed_or_timed_out_alone(outcome: Outcome) -> None:
    """Its exit code is then 1. Running out of memory is a result, and a skipped trial has a reason."""
    records = (record_with(), record_with(outcome=outcome))
    found = SweepResults("s", Path("s"), "m", records, records)
    assert found.failed is (outcome in (Outcome.CRASHED, Outcome.TIMEOUT))
