"""One pure function that decides how a trial ended, from what its ranks left behind."""

from __future__ import annotations

import signal

import msgspec

from fsdp_bench.spec.record import WITHOUT_COMMUNICATION, Outcome, RankReport


class RankEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How one rank's process ended, and the report that it left, if any."""

    rank: int
    report: RankReport | None = None
    exit_code: int | None = None
    """None when a signal ended it, or when it was not seen to end."""
    signal: int | None = None
    """The signal that ended it before the manager began to end anything."""
    stage: str = "start"
    """The last stage that it noted."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """A trial's outcome, the reason in one line, and the rank that caused it."""

    outcome: Outcome
    reason: str | None = None
    rank: int | None = None


def decide_outcome(ends: list[RankEnd], *, timed_out: bool, oom_killed: bool, timeout_seconds: float) -> Verdict:
    """Decide a trial's first cause.

    Args:
        ends: every rank's end.
        timed_out: whether the time limit passed before all ranks had ended.
        oom_killed: whether the kernel killed some process for memory during the trial.
        timeout_seconds: the limit, for the reason.

    The first that holds wins: memory that ran out (a rank says so before its peers can notice); a rank that a
    signal ended without a report; the earliest report of a failure (later ones are its echo in the peers'
    collectives); a rank that ended without a report; the time limit; else all ranks are ok. A trial whose ranks were
    all timing steps without communication was measured before, and is ok whatever ended it.
    """
    failures = sorted(
        (end for end in ends if end.report is not None and end.report.failure is not None),
        key=lambda end: end.report.failure.at,  # type: ignore[union-attr]
    )
    for end in failures:
        if end.report is not None and end.report.outcome.is_oom:
            return _reported(end)
    for end in ends:
        if end.report is None and end.signal is not None:
            return _signalled(end, oom_killed)
    if failures:
        return _reported(failures[0])
    for end in ends:
        if end.report is None and end.exit_code not in (None, 0):
            reason = f"rank {end.rank} ended with exit code {end.exit_code} in {end.stage} and left no report"
            return Verdict(outcome=Outcome.CRASHED, reason=reason, rank=end.rank)
    missing = [end for end in ends if end.report is None]
    late = missing or [end for end in ends if end.stage != WITHOUT_COMMUNICATION]
    if timed_out and late:
        reason = f"not done after {timeout_seconds:g} s; rank {late[0].rank} was in {late[0].stage}"
        return Verdict(outcome=Outcome.TIMEOUT, reason=reason, rank=late[0].rank)
    if missing:
        reason = f"rank {missing[0].rank} left no report; it was in {missing[0].stage}"
        return Verdict(outcome=Outcome.CRASHED, reason=reason, rank=missing[0].rank)
    return Verdict(outcome=Outcome.OK)


def _reported(end: RankEnd) -> Verdict:
    assert end.report is not None
    assert end.report.failure is not None
    failure = end.report.failure
    limit = " (a budget, not a card)" if failure.limit == "budget" else ""
    reason = f"rank {end.rank}, {failure.phase}{limit}: {failure.message}"
    return Verdict(outcome=end.report.outcome, reason=reason, rank=end.rank)


def _signalled(end: RankEnd, oom_killed: bool) -> Verdict:
    assert end.signal is not None
    if end.signal == signal.SIGKILL and oom_killed:
        reason = f"rank {end.rank} was killed by the kernel in {end.stage}: host memory ran out"
        return Verdict(outcome=Outcome.OOM_HOST, reason=reason, rank=end.rank)
    name = signal.Signals(end.signal).name
    return Verdict(outcome=Outcome.CRASHED, reason=f"rank {end.rank} was ended by {name} in {end.stage}", rank=end.rank)
