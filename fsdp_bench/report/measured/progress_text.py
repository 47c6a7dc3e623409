"""What is said of trials and searches while a sweep runs, and where it is listed."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.sweep.frontier.cell import Finding


def needing_gpu_line(needs: Sequence[str]) -> str:
    """Return the line of a list about what depends on a GPU that is not here."""
    return f"not listed, because their sizes depend on the GPU, which is not here: {'; '.join(needs)}"


def ending(record: TrialRecord) -> str:
    """Return how a trial ended: ``ok 1.2 s``."""
    reason = f": {record.reason}" if record.reason else ""
    return f"{record.outcome.value} {record.wall_seconds:.1f} s{reason}"


def search_status(finding: Finding, lacks_gpu: bool) -> str:
    """Return what is known of a search before it goes on: skipped, found, or where it begins."""
    if finding.status == "skipped":
        return f"skipped: {finding.reason}"
    if finding.status == "found":
        text = f"found: {finding.print(finding.fits)}"
    else:
        values = finding.quantity_range
        ends = f"{values.print(values.smallest)} to {values.print(values.largest)}"
        start = "where it begins depends on the GPU" if lacks_gpu else finding.start
        text = f"searches {values.num_steps} steps, {ends}, {start}"
    return f"{text}; {finding.reason}" if finding.reason and finding.records else text


def search_result(finding: Finding) -> str:
    """Return what a search found, beside the prediction."""
    if finding.status != "found":
        return f"{finding.status}: {finding.reason}"
    predicted = finding.predicted.fits
    text = "unknown" if predicted is None else finding.print(predicted)
    count = len(finding.records)
    return f"{finding.print(finding.fits)} fits, predicted {text}, {count} trial{'' if count == 1 else 's'}"
