"""The trials of a sweep that are recorded, which a resumed sweep skips, and those that remain."""

from __future__ import annotations

import msgspec

from fsdp_bench.spec.rank_report import Outcome
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.sweep.config.trial import SweepPlan, Trial
from fsdp_bench.sweep.results.store import Store


class SweepState(msgspec.Struct, kw_only=True):
    """The recorded trials of a sweep, and the trials that are still to be run."""

    records: dict[str, TrialRecord]
    pending: list[Trial]
    notes: list[str]
    """One line for each record that was moved to set-aside/."""


def survey(plan: SweepPlan, store: Store, retry: frozenset[Outcome] = frozenset()) -> SweepState:
    """Return the state of a sweep. A trial with a record is done.

    But it runs again if its outcome is in ``retry``, if it timed out under a shorter time limit, or if it was skipped
    and the reason no longer holds; its record is then moved to set-aside/.

    Raises:
        ResultsError, SpecError: if a record cannot be read or moved, or was written by a newer version.
    """
    state = SweepState(records={}, pending=[], notes=[])
    for trial in plan.trials:
        record = look_up(trial, store, retry, state.notes)
        if record is not None:
            state.records[trial.spec.id] = record
        else:
            state.pending.append(trial)
    return state


def look_up(trial: Trial, store: Store, retry: frozenset[Outcome], notes: list[str]) -> TrialRecord | None:
    """Return a trial's record, or None if it is to be run. Add a line to ``notes`` if a record was moved to set-aside/.

    Raises:
        ResultsError, SpecError: as ``survey``.
    """
    record, note = store.read(trial.spec.id)
    if note:
        notes.append(note)
    if record is None or not _runs_again(record, trial, retry):
        return record
    aside = store.set_aside(trial.spec.id)
    notes.append(f"{trial.spec.id} ({record.outcome.value}) runs again; its record is kept as {aside}")
    return None


def _runs_again(record: TrialRecord, trial: Trial, retry: frozenset[Outcome]) -> bool:
    if record.outcome is Outcome.SKIPPED:
        return trial.skip_reason is None  # it was impossible or excluded, and no longer is
    if record.outcome is Outcome.TIMEOUT and trial.spec.run.timeout_seconds > record.run.timeout_seconds:
        return True
    return record.outcome in retry
