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
    return f"Found for {shared}: {'; '.join(findings(compared)) or 'nothing was measured'}."


def nothing_fits(records: Sequence[TrialRecord]) -> str:
    """Return how trials ended of which none fits."""
    counts = Counter("ok, with retries" if r.outcome is Outcome.OK else r.outcome.value for r in records)
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    return f"no trial fits ({outcomes or 'none ran'})"


def what_is_shared(compared: Sequence[TrialRecord]) -> str:
    """Return the model and the world size of comparable trials."""
    return f"{compared[0].model.name} on {phrase('world_size', compared[0].setup.world_size)}"


def findings(compared: list[TrialRecord]) -> list[str]:
    """Return what takes the least memory, and what is the fastest, of comparable trials; what is not known is left out.

    For a single trial this is its setting.
    """
    if len(compared) == 1:
        return [f"one trial fits, {_setting(compared[0], [])}"]
    found = []
    if known := by_memory(compared):
        least, most = known[0], known[-1]
        found.append(
            f"{_setting(least, compared)} takes the least memory, {format_gib(peak_of(least))} per rank,"
            f" {peak_of(least) / peak_of(most):.0%} of {_setting(most, compared)}"
        )
    if known := by_speed(compared):
        fastest, slowest = known[-1], known[0]
        found.append(
            f"{_setting(fastest, compared)} is the fastest, {speed_of(fastest):,.0f} tokens/s per rank,"
            f" {speed_of(fastest) / speed_of(slowest):.1f} times {_setting(slowest, compared)}"
        )
    return found


def comparable(records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Return the trials that fit, of the most frequent combination of model, device and world size."""
    fitting = [record for record in records if record.fits]

    def key(record: TrialRecord) -> tuple[object, ...]:
        return record.model, record.device, record.setup.world_size

    counts = Counter(map(key, fitting))
    return [record for record in fitting if key(record) == counts.most_common(1)[0][0]]


def by_memory(records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Return the trials whose peak is known, the one with the least memory first."""
    known = (record for record in records if peak_of(record))
    return sorted(known, key=lambda record: (peak_of(record), record.step_seconds or 0.0))


def peak_of(record: TrialRecord) -> int:
    """Return the peak allocated bytes of the worst rank; 0 if unknown."""
    memory = record.worst_rank_memory
    return (memory.peak_allocated_bytes or 0) if memory else 0


def by_speed(records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Return the trials whose speed is known, the slowest first."""
    return sorted((record for record in records if speed_of(record)), key=speed_of)


def speed_of(record: TrialRecord) -> float:
    """Return the tokens per second of one rank; 0 if unknown."""
    return record.tokens_per_second_per_gpu or 0.0


def _setting(record: TrialRecord, compared: list[TrialRecord]) -> str:
    """Return the strategy, and every other option that differs between the compared trials: ``FULL_SHARD fsdp2``."""
    own = facts(record)
    differ = [field for field, value in own.items() if any(facts(other)[field] != value for other in compared)]
    named = [field for field in differ if field != "model" and own[field] is not None]
    return " ".join([record.setup.strategy.value, *(phrase(field, own[field]) for field in named)])
