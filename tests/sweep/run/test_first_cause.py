"""The first cause of a trial's end where ranks end without a report, by odd signals, or after their measurements."""

from __future__ import annotations

import math
import signal

import pytest

from fsdp_bench.spec.rank_report import Failure, Outcome, RankReport
from fsdp_bench.sweep.launchers.launcher import signal_name
from fsdp_bench.sweep.machine import OutOfMemoryKills
from fsdp_bench.sweep.run.outcome import OutOfMemoryKill, RankEnd, decide_outcome


def ok(rank: int, **fields: object) -> RankEnd:
    return RankEnd(rank=rank, report=RankReport(rank=rank, outcome=Outcome.OK), exit_code=0, **fields)  # type: ignore[arg-type]


def echo(rank: int) -> RankEnd:
    """A rank whose peer has gone."""
    failure = Failure(message="connection reset by peer", phase="backward", at=1.0)
    return RankEnd(rank=rank, report=RankReport(rank=rank, outcome=Outcome.CRASHED, failure=failure), exit_code=1)


def decide(
    *ends: RankEnd, timed_out: bool = False, oom_killed: OutOfMemoryKill = "no"
) -> tuple[Outcome, str, int | None]:
    verdict = decide_outcome(list(ends), timed_out=timed_out, oom_killed=oom_killed, timeout_seconds=60)
    return verdict.outcome, verdict.reason or "", verdict.rank


@pytest.mark.parametrize("code", [0, 3, 5])
def test_a_rank_that_ended_without_a_report_is_the_cause_of_its_peers_broken_connection(code: int) -> None:
    outcome, reason, rank = decide(RankEnd(rank=0, exit_code=code, stage="steps"), echo(1))
    assert (outcome, rank) == (Outcome.CRASHED, 0)
    assert f"exit code {code} in steps and left no report" in reason


def test_an_exit_code_that_torchrun_gives_for_all_ranks_is_no_ranks_own() -> None:
    """It ends the peers of the rank that failed, which then have no report."""
    ended = RankEnd(rank=0, exit_code=1, is_of_torchrun=True)
    failed = RankEnd(rank=1, exit_code=1, is_of_torchrun=True, report=echo(1).report)
    assert decide(ended, failed)[2] == 1


@pytest.mark.parametrize("number", [40, 64, int(signal.SIGRTMIN), 32, 9])
def test_every_signal_has_a_name(number: int) -> None:
    outcome, reason, _ = decide(RankEnd(rank=0, signal=number, stage="load"), ok(1))
    assert outcome is Outcome.CRASHED
    assert reason == f"rank 0 was ended by {signal_name(number)} in load"
    assert signal_name(signal.SIGRTMIN + 6) == "SIGRTMIN+6"


def test_a_trial_whose_ranks_have_all_reported_is_ok_when_its_end_is_not_seen_in_time() -> None:
    """As where the manager, or the fork server, was stopped meanwhile."""
    unseen = [RankEnd(rank=rank, report=ok(rank).report, stage="communication") for rank in range(2)]
    assert decide(*unseen, timed_out=True)[0] is Outcome.OK


def test_a_kill_for_memory_somewhere_on_the_machine_is_only_possibly_this_ranks() -> None:
    killed = RankEnd(rank=0, signal=signal.SIGKILL, stage="load")
    assert decide(killed, oom_killed="yes")[1] == "rank 0 was killed by the kernel in load: host memory ran out"
    outcome, reason, _ = decide(killed, oom_killed="possibly")
    assert outcome is Outcome.OOM_HOST
    assert "possibly by the kernel" in reason


def test_kills_of_other_cgroups_are_not_ours() -> None:
    def kills(own: int | None, machine: int) -> OutOfMemoryKills:
        return OutOfMemoryKills(own=own, machine=machine)

    assert kills(3, 9).since(kills(3, 8)) == "no"
    assert kills(4, 9).since(kills(3, 8)) == "yes"
    assert kills(None, 9).since(kills(None, 8)) == "possibly"
    assert kills(None, 9).since(kills(None, 9)) == "no"


def test_a_trial_that_diverged_is_ok_and_says_so() -> None:
    end = RankEnd(rank=0, report=RankReport(rank=0, outcome=Outcome.OK, losses=(1.0, math.nan)), exit_code=0)
    assert decide(end)[:2] == (Outcome.OK, "loss became nan at step 2 on rank 0")
