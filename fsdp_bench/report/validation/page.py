"""A Markdown page about measured results: the errors of predictions, and the worst cells."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_bench.report.text.common import UNKNOWN
from fsdp_bench.report.text.speed import measured_rates
from fsdp_bench.report.validation.memory import agreement_line, cell_line, count_of, outside_line, terms, wrong_fits
from fsdp_bench.report.validation.step_time import time_terms
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.spec.units import format_seconds
from fsdp_bench.validate.memory import worst_first
from fsdp_bench.validate.results import ResultsValidation

WORST = 20


def rates_text(found: ResultsValidation) -> str:
    """Return the source of the rates of predicted times."""
    return "of datasheets" if found.profile is None else measured_rates(found.profile)


def validation_page(found: ResultsValidation) -> str:
    """Return the page, in Markdown."""
    blocks = [
        [f"# Predicted against {found.summary.against.split(' in ')[0]}"],
        _conditions(found.records),
        ["## Memory", "", *_memory(found)],
        ["## Step time", "", *_time(found)],
        ["## The worst cells", "", *_worst(found)],
        [f"Written by `fsdp-bench validate --against {found.folder} --page FILE`."],
    ]
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _conditions(records: Sequence[TrialRecord]) -> list[str]:
    """Return a table of the trials, their device, versions and dates."""
    ranks = [record.ranks[0] for record in records if record.ranks]
    kinds = dict.fromkeys(f"{record.device} on {record.hardware}" if record.emulated_on else record.device
                          for record in records)  # fmt: skip
    facts = {
        "trials": str(len(records)),
        "ran on": ", ".join(kinds),
        "device": ", ".join(dict.fromkeys(rank.device_name for rank in ranks)) or UNKNOWN,
        "torch": ", ".join(dict.fromkeys(rank.environment.get("torch", UNKNOWN) for rank in ranks)) or UNKNOWN,
        "attention": ", ".join(dict.fromkeys(filter(None, (rank.environment.get("attention") for rank in ranks)))),
        "sweeps": ", ".join(dict.fromkeys(record.sweep for record in records)),
        "measured": " to ".join(dict.fromkeys((min(r.started_at for r in records)[:10],
                                               max(r.started_at for r in records)[:10]))),
    }  # fmt: skip
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items() if value)]


def _memory(found: ResultsValidation) -> list[str]:
    summary = found.summary
    lines = ["| term | equal to the byte | median error | largest error |", "|---|---|---|---|"]
    for name, spread in terms(summary):
        equal = count_of(spread.num_equal, spread.num_cells)
        lines.append(f"| {name} | {equal} | {spread.median:.3%} | {spread.worst:.3%} |")
    fits = count_of(summary.num_fits_right, summary.num_fits)
    lines_after = [f"Whether it fits is predicted correctly in {fits}."]
    lines_after += [f"{line}." for line in (outside_line(found.comparisons), agreement_line(found.agreements)) if line]
    return [*lines, "", *lines_after]


def _time(found: ResultsValidation) -> list[str]:
    summary = found.time_summary
    if not summary.num_trials:
        reasons = dict.fromkeys(one.reason for one in found.times if one.reason)
        return [f"Not compared: {'; '.join(map(str, reasons))}."]
    rows = [f"| {name} | {value} |" for name, value in time_terms(summary)]
    return [f"Rates {rates_text(found)}.", "", "| term | |", "|---|---|", *rows]


def _worst(found: ResultsValidation) -> list[str]:
    memory = [f"- {cell_line(one)}" for one in worst_first(found.comparisons, WORST)]
    memory += [f"- {line}" for line in wrong_fits(found.comparisons)]
    slowest = sorted((one for one in found.times if one.error is not None), key=lambda one: -abs(one.error or 0.0))
    times = [
        f"- {one.error:+.1%}: predicted {format_seconds(one.predicted_seconds)},"
        f" measured {format_seconds(one.measured_seconds)}: {one.label}"
        for one in slowest[:WORST]
        if one.predicted_seconds is not None and one.measured_seconds is not None
    ]
    return ["Memory:", "", *(memory or ["- none: every phase of every cell is equal to the byte"]), "",
            "Step time:", "", *(times or ["- not compared"])]  # fmt: skip
