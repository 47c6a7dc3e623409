"""One sentence about measured trials: the setting with the least memory, and the fastest setting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fsdp_bench.report.charts.trial_facts import facts, phrase
from fsdp_bench.spec.rank_report import Outcome
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.spec.units import format_gib


def conclusion(records: Sequence[TrialRecord]) -> str:
    """Return one sentence about the trials that fit, for the most frequent model, device and world size.

    Memory is peak allocated on the worst rank; speed is tokens per second per rank.
    """
    compared = comparable(records)
    if not compared:
        return f"Found: {nothing_fits(records)}."
    shared = what_is_shared(compared)
    if len(compared) == 1:
        return f"Found: one trial fits, {shared}: {_setting(compared[0], [])}."
    parts = findings(compared)
    return f"Found for {shared}: {'; '.join(parts)}." if parts else f"Found for {shared}: nothing was measured."


def nothing_fits(records: Sequence[TrialRecord]) -> str:
    """Return how trials ended of which none fits."""
    return f"no trial fits ({_outcomes(records)})"


def what_is_shared(compared: Sequence[TrialRecord]) -> str:
    """Return the model and the world size of comparable trials."""
    return f"{compared[0].model.name} on {phrase('world_size', compared[0].setup.world_size)}"


def findings(compared: list[TrialRecord]) -> list[str]:
    """Return what takes the least memory, and what is the fastest, of comparable trials; what is not known is left out.

    For a single trial this is its setting.
    """
    if len(compared) == 1:
        return [f"one trial fits, {_setting(compared[0], [])}"]
    return [part for part in (_least_memory(compared), _fastest(compared)) if part]


def comparable(records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Return the trials that fit, of the most frequent combination of model, device and world size."""
    fitting = [record for record in records if record.fits]

    def key(record: TrialRecord) -> tuple[object, ...]:
        return record.model, record.device, record.setup.world_size

    counts = Counter(map(key, fitting))
    return [record for record in fitting if key(record) == counts.most_common(1)[0][0]]


def _outcomes(records: Sequence[TrialRecord]) -> str:
    counts = Counter("ok, with retries" if r.outcome is Outcome.OK else r.outcome.value for r in records)
    return ", ".join(f"{count} {outcome}" for outcome, count in counts.items()) or "none ran"


def _least_memory(compared: list[TrialRecord]) -> str | None:
    known = sorted((r for r in compared if _peak(r)), key=lambda r: (_peak(r), r.step_seconds or 0.0))
    if not known:
        return None
    least, most = known[0], known[-1]
    return (
        f"{_setting(least, compared)} takes the least memory, {format_gib(_peak(least))} per rank,"
        f" {_peak(least) / _peak(most):.0%} of {_setting(most, compared)}"
    )


def _peak(record: TrialRecord) -> int:
    memory = record.worst_rank_memory
    return (memory.peak_allocated_bytes or 0) if memory else 0


def _fastest(compared: list[TrialRecord]) -> str | None:
    known = sorted((record for record in compared if _speed(record)), key=_speed)
    if not known:
        return None
    fastest, slowest = known[-1], known[0]
    return (
        f"{_setting(fastest, compared)} is the fastest, {_speed(fastest):,.0f} tokens/s per rank,"
        f" {_speed(fastest) / _speed(slowest):.1f} times {_setting(slowest, compared)}"
    )


def _speed(record: TrialRecord) -> float:
    return record.tokens_per_second_per_gpu or 0.0


def _setting(record: TrialRecord, compared: list[TrialRecord]) -> str:
    """Return the strategy, and every other option that differs between the compared trials: ``FULL_SHARD fsdp2``."""
    own = facts(record)
    differ = [field for field, value in own.items() if any(facts(other)[field] != value for other in compared)]
    named = [field for field in differ if field != "model" and own[field] is not None]
    return " ".join([record.setup.strategy.value, *(phrase(field, own[field]) for field in named)])
