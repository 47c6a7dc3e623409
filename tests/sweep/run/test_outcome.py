"""The first cause of a trial's end, from what its ranks left."""

import math
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from fsdp_bench.spec.rank_report import Failure, Outcome, RankReport
from fsdp_bench.sweep.launchers.launcher import signal_name
from fsdp_bench.sweep.machine import OutOfMemoryKills
from fsdp_bench.sweep.run.outcome import RankEnd, decide_outcome
from fsdp_bench.sweep.session import SweepResults
from tests.spec.test_record import record_with


def ok(rank: int, exit_code: int | None = 0, losses: tuple[float, ...] = (), **end: Any) -> RankEnd:
    report = RankReport(rank=rank, outcome=Outcome.OK, losses=losses)
    return RankEnd(rank=rank, report=report, exit_code=exit_code, **end)


def failed(rank: int, at: float, outcome: Outcome = Outcome.CRASHED, limit: str | None = None, **end: Any) -> RankEnd:
    failure = Failure(message=f"message of {rank}", phase="backward", at=at, limit=limit)
    return RankEnd(rank=rank, report=RankReport(rank=rank, outcome=outcome, failure=failure), exit_code=1, **end)


def silent(rank: int, **end: Any) -> RankEnd:
    return RankEnd(rank=rank, **end)


FULL = failed(1, 2.0, Outcome.OOM_GPU, "device")
KILLED = silent(1, signal=signal.SIGKILL, stage="load")
TIMED_OUT, KERNEL_KILLED, PERHAPS = {"timed_out": True}, {"oom_killed": "yes"}, {"oom_killed": "possibly"}
CRASHED, OOM_HOST, TIMEOUT = Outcome.CRASHED, Outcome.OOM_HOST, Outcome.TIMEOUT
UNTIMED = {"exit_code": None, "stage": "without communication"}
ENDS: dict[str, tuple[tuple[RankEnd, ...], dict[str, Any], Outcome, int | None, str]] = {
    "all ranks are ok": ((ok(0), ok(1)), {}, Outcome.OK, None, ".*"),
    "memory ran out on one rank, and the others saw its echo": ((failed(0, 1.0), FULL), {}, Outcome.OOM_GPU, 1, ".*"),
    # NCCL's watchdog aborts the peers of a rank that has left, before they can report it.
    "memory ran out; a peer was aborted": (
        (silent(0, stage="steps", signal=signal.SIGABRT), FULL), {}, Outcome.OOM_GPU, 1, ".*",
    ),
    "memory ran out; a peer ended": ((silent(0, stage="steps", exit_code=1), FULL), {}, Outcome.OOM_GPU, 1, ".*"),
    "only untimed steps lack": ((ok(0, **UNTIMED), ok(1, **UNTIMED)), TIMED_OUT, Outcome.OK, None, ".*"),
    "killed after its report": ((ok(0), ok(1, None, signal=signal.SIGKILL)), {}, Outcome.OK, None, ".*"),
    "the steps of one lack": ((ok(0, **UNTIMED), silent(1, stage="steps")), TIMED_OUT, TIMEOUT, 1, ".*"),
    "a budget": ((failed(0, 1.0, OOM_HOST, "budget"),), {}, OOM_HOST, 0, ".*a budget, not a GPU.*"),
    "the earliest failure": ((failed(0, 2.0), failed(1, 1.0)), {}, CRASHED, 1, ".*"),
    "a killed rank broke its peers' connections": (
        (failed(0, 1.0), KILLED), {}, CRASHED, 1, "rank 1 was ended by SIGKILL in load",
    ),
    "the kernel killed it": (
        (failed(0, 1.0), KILLED), KERNEL_KILLED, OOM_HOST, 1,
        "rank 1 was killed by the kernel in load: host memory ran out",
    ),
    "the kernel killed some process": ((failed(0, 1.0), KILLED), PERHAPS, OOM_HOST, 1, ".*possibly by the kernel.*"),
    "the kernel killed another": ((silent(0, signal=signal.SIGSEGV),), KERNEL_KILLED, CRASHED, 0, ".*SIGSEGV.*"),
    "still running at the limit": (
        (ok(0), silent(1, stage="warmup")), TIMED_OUT, TIMEOUT, 1, "not done after 60 s; rank 1 was in warmup",
    ),
    "failed before the limit": ((failed(0, 1.0), silent(1)), TIMED_OUT, CRASHED, 0, ".*"),
    # torchrun ends the peers of the rank that failed, which then have no report.
    "torchrun's exit code for all": (
        (silent(0, exit_code=1, is_of_torchrun=True), failed(1, 1.0, is_of_torchrun=True)), {}, CRASHED, 1, ".*",
    ),
    "diverged": (
        (ok(0, losses=(1.0, 2.0, math.inf)), ok(1, losses=(1.0, math.nan, 0.0))), {}, Outcome.OK, None,
        "loss became nan at step 2 on rank 1",
    ),
    **{
        f"exit code {code}, {name}": (
            (silent(0, exit_code=code, stage="steps"), peer), {}, CRASHED, 0,
            f".*exit code {code} in steps and left no report.*",
        )
        for code in (0, 3, 5) for name, peer in (("peer ok", ok(1)), ("broken connection", failed(1, 1.0)))
    },
    **{
        f"signal {number}": (
            (silent(0, signal=number, stage="load"), ok(1)), {}, CRASHED, 0,
            re.escape(f"rank 0 was ended by {signal_name(number)} in load"),
        )
        for number in (40, 64, int(signal.SIGRTMIN), 32, 9)
    },
}  # fmt: skip
"""What the ranks left, what else is known; the outcome, the rank that is its cause, and the reason."""


@pytest.mark.parametrize("name", ENDS)
def test_the_first_cause_of_an_end_is_its_outcome(name: str) -> None:
    ends, known, outcome, rank, reason = ENDS[name]
    verdict = decide_outcome([*ends], **{"timed_out": False, "oom_killed": "no", **known}, timeout_seconds=60)
    assert verdict.outcome is outcome
    assert rank is None or verdict.rank == rank
    assert re.fullmatch(reason, verdict.reason or "")


def test_signals_have_names() -> None:
    assert signal_name(signal.SIGKILL) == "SIGKILL"
    assert signal_name(signal.SIGRTMIN + 6) == "SIGRTMIN+6"


def test_kills_of_other_cgroups_are_not_ours() -> None:
    def kills(own: int | None, machine: int) -> OutOfMemoryKills:
        return OutOfMemoryKills(own=own, machine=machine)

    assert kills(3, 9).since(kills(3, 8)) == "no"
    assert kills(4, 9).since(kills(3, 8)) == "yes"
    assert kills(None, 9).since(kills(None, 8)) == "possibly"
    assert kills(None, 9).since(kills(None, 9)) == "no"


@pytest.mark.parametrize("outcome", Outcome)
def test_a_sweep_has_failed_if_a_trial_crashed_or_timed_out_alone(outcome: Outcome) -> None:
    """Its exit code is then 1. Running out of memory is a result, and a skipped trial has a reason."""
    records = (record_with(), record_with(outcome=outcome))
    found = SweepResults("s", Path("s"), "m", records, records)
    assert found.failed is (outcome in (Outcome.CRASHED, Outcome.TIMEOUT))
