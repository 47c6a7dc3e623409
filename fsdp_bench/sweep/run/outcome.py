"""Decides how a trial ended, from its ranks' reports, exit codes and signals.

Each rank reports its own outcome. train/processes/rank.py decides that one: out of GPU memory, out of
host memory, or a crash. Here the ranks' outcomes become one: the first cause wins.
"""

import signal
from collections.abc import Sequence
from typing import Literal

import msgspec

from fsdp_bench.spec.rank_report import Outcome, RankReport, divergence
from fsdp_bench.sweep.launchers.launcher import signal_name


class RankEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one rank's process, and the report that it left, if any."""

    rank: int
    report: RankReport | None = None
    exit_code: int | None = None
    """None if a signal ended the process, or if its end was not seen."""
    signal: int | None = None
    """The signal that ended the process, unless this sweep sent it."""
    is_of_torchrun: bool = False
    """Whether exit code and signal are torchrun's, which does not say which rank they belong to."""
    stage: str = "start"
    """The last stage of the trial that the rank entered."""


class TrialEnd(msgspec.Struct, frozen=True, kw_only=True):
    """A trial's outcome, the reason in one line, and the rank that caused it."""

    outcome: Outcome
    reason: str | None = None
    rank: int | None = None


OutOfMemoryKill = Literal["no", "possibly", "yes"]
"""Whether the kernel killed a rank because host memory ran out. ``possibly``: it killed some process."""


def decide_outcome(
    ends: list[RankEnd], *, timed_out: bool, oom_killed: OutOfMemoryKill, timeout_seconds: float
) -> TrialEnd:
    """Decide a trial's outcome: the first cause.

    ``oom_killed`` says whether the kernel killed a process during the trial because host memory ran out.

    The outcome is the first of these that is true:

    1. A rank reported that memory ran out. It reports this before the other ranks can notice.
    2. A rank ended by itself without a report, by a signal or with an exit code.
    3. A rank reported another failure. The earliest report counts: later ones follow from it.
    4. The time limit passed.
    5. A rank left no report.
    6. All ranks reported their measurements: ``ok``, however their processes ended.
    """
    missing = [end for end in ends if end.report is None]
    cause = _reported_cause(ends, is_oom=True) or _own_end(missing, oom_killed) or _reported_cause(ends, is_oom=False)
    if cause is not None:
        return cause
    for end in missing:
        if end.exit_code not in (None, 0):
            return _unreported(end)
    if timed_out and missing:
        reason = f"not done after {timeout_seconds:g} s; rank {missing[0].rank} was in {missing[0].stage}"
        return TrialEnd(outcome=Outcome.TIMEOUT, reason=reason, rank=missing[0].rank)
    if missing:
        return _unreported(missing[0])
    return TrialEnd(outcome=Outcome.OK, reason=divergence([end.report for end in ends if end.report is not None]))


def lost_nodes_end(nodes: Sequence[str], ends: Sequence[RankEnd]) -> TrialEnd:
    """Return the outcome of a trial that lost nodes while it ran.

    ``ends`` are those of the ranks that ran there; at least one.
    """
    where = f"node {nodes[0]}" if len(nodes) == 1 else f"nodes {', '.join(nodes)}"
    silent = [end for end in ends if end.report is None] or list(ends)
    ranks = ", ".join(str(end.rank) for end in silent)
    reason = f"{where} stopped answering, with rank{'s' * (len(silent) > 1)} {ranks} in {silent[0].stage}"
    return TrialEnd(outcome=Outcome.CRASHED, reason=reason, rank=silent[0].rank)


def _reported_cause(ends: list[RankEnd], *, is_oom: bool) -> TrialEnd | None:
    """Return the outcome of the earliest failure that a rank reported; None if there is none."""
    failures = [
        (end.report.failure.at, end.rank, end)
        for end in ends
        if end.report is not None and end.report.failure is not None and end.report.outcome.is_oom is is_oom
    ]
    return _reported(min(failures)[2]) if failures else None


def _own_end(missing: list[RankEnd], oom_killed: OutOfMemoryKill) -> TrialEnd | None:
    """Return the outcome of a rank that ended by itself without a report. Signals come before exit codes."""
    for end in missing:
        if end.signal is not None:
            return _signalled(end, oom_killed)
    for end in missing:
        if end.exit_code is not None and not end.is_of_torchrun:
            return _unreported(end)
    return None


def _unreported(end: RankEnd) -> TrialEnd:
    how = "" if end.exit_code is None else f"ended with exit code {end.exit_code} in {end.stage} and "
    where = f"; it was in {end.stage}" if end.exit_code is None else ""
    return TrialEnd(outcome=Outcome.CRASHED, reason=f"rank {end.rank} {how}left no report{where}", rank=end.rank)


def _reported(end: RankEnd) -> TrialEnd:
    assert end.report is not None
    assert end.report.failure is not None
    failure = end.report.failure
    limit = " (a budget, not a GPU)" if failure.limit == "budget" else ""
    reason = f"rank {end.rank}, {failure.phase}{limit}: {failure.message}"
    return TrialEnd(outcome=end.report.outcome, reason=reason, rank=end.rank)


def _signalled(end: RankEnd, oom_killed: OutOfMemoryKill) -> TrialEnd:
    assert end.signal is not None
    if end.signal == signal.SIGKILL and oom_killed != "no":
        reason = f"rank {end.rank} was killed by the kernel in {end.stage}: host memory ran out"
        if oom_killed == "possibly":
            reason = (
                f"rank {end.rank} was ended by SIGKILL in {end.stage}, possibly by the kernel: host memory ran out"
                " during the trial"
            )
        return TrialEnd(outcome=Outcome.OOM_HOST, reason=reason, rank=end.rank)
    reason = f"rank {end.rank} was ended by {signal_name(end.signal)} in {end.stage}"
    return TrialEnd(outcome=Outcome.CRASHED, reason=reason, rank=end.rank)
