"""A trial's communication per step, by kind of collective, and how much of it is exposed."""

from __future__ import annotations

import statistics
from typing import Any

from fsdp_bench.spec.rank_report import CollectiveReading, Outcome
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.sweep.config.trial import distinct_labels


def communication_rows(records: list[TrialRecord]) -> list[dict[str, Any]]:
    """Return the JSON form for the trials that ended ``ok``. Sizes are in bytes, times in seconds."""
    measured = [record for record in records if record.outcome is Outcome.OK]
    return [
        {
            "id": record.id,
            "label": label,
            "device": record.device,
            "step_seconds": record.step_seconds,
            "seconds_without_communication": record.seconds_without_communication,
            "communication_seconds": record.communication_seconds,
            "exposed_communication_seconds": record.exposed_communication_seconds,
            "exposed_by_difference_seconds": record.exposed_by_difference_seconds,
            "exposed_shares": record.exposed_fractions,
            "collectives": [
                {
                    "kind": kind.kind,
                    "calls": kind.calls,
                    "message_bytes": kind.message_bytes,
                    "group_size": kind.group_size,
                    "seconds": kind.seconds,
                    "algorithm_bandwidth_bytes_per_second": kind.algorithm_bandwidth,
                    "bus_bandwidth_bytes_per_second": kind.bus_bandwidth,
                }
                for kind in kinds_of(record)
            ],
        }
        for record, label in zip(measured, trial_labels(measured), strict=True)
    ]


def kinds_of(record: TrialRecord) -> list[CollectiveReading]:
    """Return one reading for each kind: the median over profiled steps, of the rank with the most seconds."""
    found: dict[str, CollectiveReading] = {}
    for rank in record.ranks:
        names = {reading.kind for step in rank.communication for reading in step.collectives}
        for name in sorted(names):
            readings = [reading for step in rank.communication for reading in step.collectives if reading.kind == name]
            seconds = [reading.seconds for reading in readings if reading.seconds is not None]
            known = found.get(name)
            median = float(statistics.median(seconds)) if seconds else None
            if known is None or (median or 0.0) > (known.seconds or 0.0):
                first = readings[0]
                found[name] = CollectiveReading(
                    kind=name,
                    calls=first.calls,
                    message_bytes=first.message_bytes,
                    seconds=median,
                    group_size=first.group_size,
                )
    return [found[name] for name in sorted(found)]


def trial_labels(records: list[TrialRecord]) -> list[str]:
    """Return a label for each trial that distinguishes it from the others."""
    return distinct_labels([(record.model, record.setup, record.alone) for record in records])
