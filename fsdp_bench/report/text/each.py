"""Several rehearsals of one command as text: the fastest that fits, then a row for each combination."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_bench.plan.estimate import Verdict
from fsdp_bench.plan.rehearsal import Rehearsal
from fsdp_bench.plan.script.each import in_order, speed_of
from fsdp_bench.plan.script.rehearsals import Answered
from fsdp_bench.report.table import Column, numbers, table_lines, words
from fsdp_bench.report.text.common import UNKNOWN, fact
from fsdp_bench.report.text.prediction_table import column_header
from fsdp_bench.report.text.rehearsal import place, step_cell, verdict_line, why_unknown_text
from fsdp_bench.report.text.speed import percent
from fsdp_bench.spec.units import format_gib


def each_text(answers: Sequence[Answered]) -> str:
    """Return the answer, and the combinations in its order: those that fit first, the fastest first."""
    ordered = in_order(answers)
    lines = [conclusion(ordered), ""]
    found = [one for one in ordered if one.worst is not None]
    if found:
        lines += [*conditions(found), "", *table_lines(each_columns(ordered))]
    reasons = [(one.variant.title, reason_of(one)) for one in ordered]
    told = [fact(f"{title}: ", reason, 24) for title, reason in reasons if reason is not None]
    return "\n".join([*lines, *(["", *told] if told else [])])


def conclusion(ordered: Sequence[Answered]) -> str:
    """Return which combination is the best, in one sentence."""
    best, worst = ordered[0], ordered[0].worst
    num_fitting = sum(one.fits is True for one in ordered)
    if worst is None or not best.fits:
        unknown = sum(one.fits is None for one in ordered)
        if unknown:
            return (
                f"unknown whether any fits: {unknown} of {len(ordered)} combinations could not be rehearsed to the end"
            )
        return f"none of {len(ordered)} combinations fits (rehearsed)"
    of = f"{num_fitting} of {len(ordered)} combinations fit"
    speed, needs = speed_of(best), format_gib(worst.report.peak_reserved_bytes)
    if speed is None:
        return f"{of} (rehearsed)"
    return (
        f"fastest that fits: {best.variant.title}: {speed:,.0f} tokens/s per GPU (predicted from what it issued),"
        f" {needs} reserved (rehearsed); {of}"
    )


def reason_of(one: Answered) -> str | None:
    """Return why a combination has no answer; None if it has one."""
    if one.reason is not None:
        return one.reason
    worst = one.worst
    if worst is None or worst.fits is not None or worst.why_unknown is None:
        return None
    return why_unknown_text(worst.why_unknown, worst.report)


def conditions(answers: Sequence[Answered]) -> list[str]:
    """Return what holds for all rehearsals, of which there is at least one."""
    found = [one for one in answers if one.worst is not None]
    first = found[0].worst
    assert first is not None
    hardware = {_where(one.worst) for one in found if one.worst is not None}
    steps = {one.worst.report.num_steps for one in found if one.worst is not None and one.fits}
    lines = [fact("command", found[0].variant.template)]
    lines += [fact("torch", f"{first.report.torch}, on a stand-in for NVIDIA's libraries")]
    lines += [fact("hardware", hardware.pop())] if len(hardware) == 1 else []
    lines += [fact("steps", " or ".join(map(str, sorted(steps))))] if steps else []
    speeds = dict.fromkeys(one.worst.why_no_speed for one in found if one.worst is not None and one.fits)
    lines += [fact("tokens/s", f"{UNKNOWN}: {reason}") for reason in speeds if reason is not None]
    return lines


def _where(found: Rehearsal) -> str:
    rank = f"rank {found.report.rank} of {found.report.world_size}"
    return f"{rank} on {found.gpu.name}, {format_gib(found.available_bytes)} that PyTorch can reserve"


def each_columns(answers: Sequence[Answered]) -> list[Column]:
    """Return the columns of a table of combinations: their values, then what was found."""
    names = list(dict.fromkeys(name for one in answers for name in one.variant.values))
    labels = [Column(column_header(name), tuple(one.variant.values.get(name, "") for one in answers)) for name in names]
    worst = [one.worst for one in answers]
    peaks = [one and one.report.peak for one in worst]
    reserved = [one.report.peak_reserved_bytes if one and one.report.peak else None for one in worst]
    columns = {
        "fits": words(_FITS[one.verdict if one else None] for one in worst),
        "allocated": numbers((one.allocated_bytes if one else None for one in peaks), format_gib),
        "reserved": numbers(reserved, format_gib),
        "peaks in": words(f"{one.phase} of step {one.step}" if one else "" for one in peaks),
        "at": words(_line_at_peak(one) if one else "" for one in worst),
    }
    if any(one is not None and one.asks_time for one in worst):
        columns["step time"] = words(step_cell(one) if one else UNKNOWN for one in worst)
        columns["tokens/s per GPU"] = numbers(map(speed_of, answers), "{:,.0f}".format)
        columns["MFU"] = words(percent(one.time.mfu if one and one.time else None) for one in worst)
    dropped = ("MFU", "at", "peaks in", "step time", "allocated")
    return [
        *labels,
        *(
            Column(
                name,
                one.cells,
                one.is_number or name in ("step time", "MFU"),
                _priority(name, dropped),
                values=one.values,
            )
            for name, one in columns.items()
        ),
    ]


_FITS = {
    Verdict.FITS: "yes",
    Verdict.RUNS_WITH_RETRIES: "with retries",
    Verdict.DOES_NOT_FIT: "no",
    None: UNKNOWN,
}


def _priority(name: str, dropped: Sequence[str]) -> int:
    return len(dropped) - dropped.index(name) if name in dropped else 0


def _line_at_peak(found: Rehearsal) -> str:
    held = found.report.lines_at_peak or ()
    return next((place(line) for one in held if (line := one.user_line or one.line) is not None), UNKNOWN)


def answered_line(one: Answered) -> str:
    """Return an answer in one line, for progress."""
    if one.worst is None:
        return f"{one.variant.title}: {one.reason}"
    return f"{one.variant.title}: {verdict_line(one.worst)}"
