"""Compares predictions with the results of a folder: memory and step time; and emulated trials with others."""

from collections.abc import Sequence

import msgspec

from fsdp_bench.spec.calibration_profile import Profile
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.validate.memory import Agreement, MemoryComparison, Summary, agreements, compare_with_record, summarize
from fsdp_bench.validate.step_time import TimeComparison, TimeSummary, compare_time, summarize_time


class ResultsValidation(msgspec.Struct, frozen=True, kw_only=True):
    """All comparisons with the results of a folder."""

    folder: str
    records: Sequence[TrialRecord]
    comparisons: list[MemoryComparison]
    summary: Summary
    times: list[TimeComparison]
    time_summary: TimeSummary
    profile: Profile | None
    """The calibration that predicts times. None: the datasheet does."""
    agreements: list[Agreement]


def validate_results(folder: str, records: Sequence[TrialRecord], profile: Profile | None) -> ResultsValidation:
    """Compare predictions with measured or rehearsed trials, in memory and in time."""
    sources = " and ".join(dict.fromkeys(record.source for record in records))
    comparisons = [compare_with_record(record) for record in records]
    times = [compare_time(record, profile) for record in records]
    return ResultsValidation(
        folder=folder,
        records=records,
        comparisons=comparisons,
        summary=summarize(comparisons, f"{sources} in {folder}"),
        times=times,
        time_summary=summarize_time(times),
        profile=profile,
        agreements=agreements(records),
    )
