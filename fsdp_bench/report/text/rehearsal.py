"""A rehearsal as text: whether the script fits, where it peaks, and what is not to be trusted."""

import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from fsdp_bench.plan.estimate import Verdict
from fsdp_bench.plan.rehearsal import Rehearsal, WhyUnknown, worst_of
from fsdp_bench.plan.rehearsed_time.answer import PartTime, RehearsedTime
from fsdp_bench.rates.collectives import KINDS
from fsdp_bench.report.table import Column, numbers, table_columns, table_lines, titled, words
from fsdp_bench.report.text.common import UNKNOWN, Fact, communicators_fact, fact
from fsdp_bench.report.text.speed import beside_operators, rests_on, step_facts, step_text
from fsdp_bench.simulate.events import Stream
from fsdp_bench.spec.subprocesses.rehearsal import (
    HeldLine,
    PhasePeaks,
    RehearsalOutcome,
    RehearsalReport,
    ScriptFailure,
    SourceLine,
)
from fsdp_bench.spec.units import format_gib

MOST_PARTS = 8
"""The most operators that are listed."""
MOST_UNKNOWN = 6

_COPIES = {"to_device": "copy to the GPU", "to_host": "copy to the host"}


def time_lines(found: Rehearsal) -> list[str]:
    """Return the time of a step as a few lines and a table."""
    lines, time = [fact(*one) for one in time_facts(found)], found.time
    if time is None:
        return lines
    columns = part_columns(time.parts[:MOST_PARTS], f"in step {time.step}")
    return [*lines, "", *table_lines(titled(columns))]


def part_columns(parts: Sequence[PartTime], header: str) -> dict[str, Column]:
    """Return the columns of what takes the time; collectives and operators may run at the same time."""
    return {
        header: words(_COPIES.get(part.name, part.name) for part in parts),
        "kind": words(part.kind for part in parts),
        "times": numbers(part.count for part in parts),
        "takes": numbers((part.seconds for part in parts), step_text),
    }


def time_facts(found: Rehearsal) -> list[Fact]:
    """Return the time of a step, or why it is unknown, and what it rests on. What goes on has no name."""
    time = found.time
    if time is None:
        return [("step time", f"{UNKNOWN}: {found.why_no_time}")]
    facts = _unknown_facts(time, found)
    if time.time.step_seconds is not None:
        sources = f"rehearsed: what step {time.step} issued; predicted: how long that takes"
        facts = step_facts(time, sources, f"tokens/s {UNKNOWN} (--tokens-per-step N)")
    if count := found.report.num_retries_in_last_step:
        retries = "an allocation retry" if count == 1 else f"{count} allocation retries"
        facts.append(("", f"without the time of {retries} in the last step"))
    host = (
        f"host {step_text(time.host_seconds)}, of which {step_text(time.waiting_for_host_seconds)} while the GPU has"
        " nothing to do"
    )
    facts.append(("", "; ".join([*beside_operators(time.time), host])))
    if time.tokens_per_step is not None and not time.is_tokens_given:
        shared = "" if time.sharing_ranks == 1 else f", shared by {time.sharing_ranks:g} ranks"
        tokens = f"tokens: {time.tokens_per_step:,} in a step, which are what its embedding looks up{shared}"
        facts.append(("", tokens))
    if (count := time.num_streams) > len(Stream):
        as_one = f"all but {len(Stream) - 1} of them count as one, in the order of issue"
        facts.append(("", f"streams: {count}; {as_one}"))
    rates, run = rests_on(time, found.scaling).removesuffix(" (fsdp-bench calibrate measures yours)"), found.scaling
    host = "is assumed" if run is None or run.launch_seconds is None else "is the calibration's"
    return [*facts, ("", f"rates: {rates}. The script never ran on a GPU; the time of its Python {host}")]


def _unknown_facts(time: RehearsedTime, found: Rehearsal) -> list[Fact]:
    names = [f"{name}, {count} {'time' if count == 1 else 'times'}" for name, count in time.unknown.items()]
    more = [f"and {len(names) - MOST_UNKNOWN} more (--json)"] if len(names) > MOST_UNKNOWN else []
    least = "" if time.at_least_seconds is None else f"; all else takes {step_text(time.at_least_seconds)}"
    why = "as nobody documents how long some of it takes"
    if len(time.waits_for) == len(time.unknown):
        why = "as it depends on pipeline stages that were not rehearsed"
    facts = [("step time", f"{UNKNOWN}, {why}{least}"), ("", f"{UNKNOWN}: {'; '.join([*names[:MOST_UNKNOWN], *more])}")]
    if time.waits_for:
        facts.append(("", f"--ranks stages runs one rank of each stage: {','.join(map(str, time.stages))}"))
    needs_links = any(name.partition(" ")[0] in (*KINDS, *_COPIES) for name in time.unknown)
    if needs_links and not found.hardware.has_server:
        facts.append(("", "--server NAME says which links collectives and copies have"))
    return facts


OTHER_GROUPS = (
    f"{UNKNOWN}: messages and all-to-alls are not covered, nor are smaller groups than all ranks without --server"
)

MOST_LINES = 8
"""The most lines of a script that are listed."""


def verdict_line(found: Rehearsal) -> str:
    """Return whether the script fits, with numbers, in one line."""
    report = found.report
    of = f"{format_gib(found.usable_bytes)} usable on {found.gpu.name} less {format_gib(found.kept_free.num_bytes)}"
    of += " kept free"
    if found.verdict is Verdict.DOES_NOT_FIT:
        is_limit = report.outcome is not RehearsalOutcome.OUT_OF_MEMORY
        return f"does not fit (rehearsed): {shortage(found)}" + ("" if is_limit else f"; {of}")
    if found.why_unknown is not None:
        return f"unknown whether it fits: {why_unknown_text(found.why_unknown, report)}"
    needs = _needs(report)
    if found.verdict is Verdict.RUNS_WITH_RETRIES:
        return f"runs, {shortage(found)} (rehearsed): {needs}; {of}"
    return f"fits (rehearsed): {needs}; {of}"


def shortage(found: Rehearsal) -> str:
    """Return what a script that does not fit is short of, and where."""
    report, peak = found.report, found.report.peak
    if report.outcome is RehearsalOutcome.OUT_OF_MEMORY:
        at = f", in {peak.phase} of step {peak.step}" if peak else ""
        return f"out of memory{at}, at {_at(report.failure)}"
    if found.max_gpu_bytes is not None and found.exceeds_limit:
        kept, limit = format_gib(found.kept_free.num_bytes), format_gib(found.max_gpu_bytes)
        return f"{_needs(report)}, and {kept} kept free: more than the {limit} of --max-gpu-memory"
    last = report.num_retries_in_last_step or "none"
    count = report.num_alloc_retries
    return f"with {count} allocation {'retry' if count == 1 else 'retries'}, {last} of them in the last step"


def why_unknown_text(reason: WhyUnknown, report: RehearsalReport) -> str:
    """Return why it is unknown whether a script fits."""
    match reason:
        case WhyUnknown.UNSUPPORTED:
            at = f", at {_at(report.failure)}" if report.failure else ""
            return f"it called {', '.join(report.unsupported)}{at}, which the stand-in does not have"
        case WhyUnknown.FAILED:
            assert report.failure is not None
            return f"the script failed with {report.failure.type} at {_at(report.failure)}{report.failure.told}"
        case WhyUnknown.CUT:
            seen = f"; until then: {_needs(report)}" if report.peak is not None else ", before it used the GPU"
            return f"the script {_ended(report)}{seen}"
        case WhyUnknown.NO_GPU:
            return "the script never used the GPU"
        case WhyUnknown.NO_STEP:
            return "the script never made an optimizer step"
        case WhyUnknown.VALUES:
            line = report.sizes_from_values[0].user_line or report.sizes_from_values[0].line
            return (
                f"{place(line) if line else 'an unknown line'} reads values from the GPU that may decide sizes, and a"
                f" rehearsal does not have these values; this run: {_needs(report)}. For a mixture of experts try"
                " --balanced-routing"
            )
        case WhyUnknown.ONE_STEP:
            return (
                "only one step ran, and later ones also hold the optimizer's states; this run:"
                f" {_needs(report)}. Try --steps 2"
            )


def _needs(report: RehearsalReport) -> str:
    peak = report.peak
    assert peak is not None
    at = f"in {peak.phase} of step {peak.step}"
    return f"peak {format_gib(peak.allocated_bytes)} allocated, {at}, {format_gib(report.peak_reserved_bytes)} reserved"


def _at(failure: ScriptFailure | None) -> str:
    """Return where the script failed: its own line, and the line of a library that it called."""
    inner, own = (failure.line, failure.user_line) if failure is not None else (None, None)
    if own is None:
        return place(inner) if inner is not None else "an unknown line"
    return f"{place(own)} ({place(inner)})" if inner is not None and inner != own else place(own)


def place(line: SourceLine) -> str:
    """Return a line of Python as ``file:line``, below the current folder or the folder of packages."""
    file = line.file
    if "site-packages" in file:
        file = file.rpartition(f"site-packages{os.sep}")[2]
    elif os.path.isabs(file):
        relative = os.path.relpath(file)
        file = file if relative.startswith("..") else relative
    return f"{file}:{line.line}"


def report_text(found: Rehearsal) -> str:
    """Return one rehearsal as text; the first line is the answer."""
    report = found.report
    lines = [verdict_line(found), "", report.sentence, *(fact(*one) for one in condition_facts(found)), ""]
    steps = step_columns(found)
    if steps["step"].cells:
        steps["step"] = replace(steps["step"], is_number=True)
        lines += ["peak allocated by phase", *table_lines(titled(steps))]
    if found.asks_time:
        lines += ["", *time_lines(found)]
    if report.lines_at_peak:
        shown = report.lines_at_peak[:MOST_LINES]
        rows = [[format_gib(one.num_bytes), str(one.num_tensors), *held_by(one)] for one in shown]
        header = ["size", "tensors", "held at the peak by", "called from"]
        lines += ["", *table_lines(table_columns(header, rows, {"size", "tensors"}, ["called from"]))]
    elif report.lines_at_peak is None and report.peak is not None:
        lines += [
            "",
            f"lines that hold memory: {UNKNOWN}; PyTorch's memory history is incomplete, or the script changed it",
        ]
    if helps := what_would_help(found):
        lines += ["", *helps]
    lines += ["", *report.notes]
    if not report.stops_at_unsupported:
        lines += [
            f"{name} was called {times} times and did nothing: memory that it would take is not counted."
            for name, times in report.unsupported.items()
        ]
    lines += read_lines(report)
    return "\n".join(lines).rstrip()


def _ended(report: RehearsalReport) -> str:
    words = {
        RehearsalOutcome.STOPPED: "stopped by rehearse after",
        RehearsalOutcome.ENDED: "ran to its end,",
        RehearsalOutcome.OUT_OF_MEMORY: "ran out of memory after",
        RehearsalOutcome.FAILED: "failed after",
        RehearsalOutcome.TIMED_OUT: "was ended by --timeout after",
        RehearsalOutcome.INTERRUPTED: "was interrupted after",
    }
    return f"{words[report.outcome]} {report.num_steps} optimizer step{'s' * (report.num_steps != 1)}"


def condition_facts(found: Rehearsal) -> list[Fact]:
    """Return what holds for the whole run; of a script that never used the GPU only how it ended."""
    report = found.report
    if report.peak is None:
        return [("script", _ended(report)), ("torch", report.torch)]
    real = report.peak_host_bytes + report.peak_unwritten_host_bytes
    communicators = found.communicators
    retries = report.num_alloc_retries or "no"
    return [
        ("script", _ended(report)),
        ("torch", f"{report.torch}, on a stand-in for NVIDIA's libraries as {report.device_name or 'no GPU'}"),
        ("allocator", f"{report.allocator_settings or 'default settings'}; {retries} allocation retries"),
        ("kept free", f"{format_gib(found.kept_free.num_bytes)} {found.kept_free.source}"),
        *(communicators_fact(communicators) if communicators is not None else [("NCCL", OTHER_GROUPS)]),
        ("host memory", f"{format_gib(real)} for this rank in a real run; {format_gib(report.peak_host_bytes)} here"),
    ]


PHASES = ("load", "forward", "backward", "optimizer")


def step_columns(found: Rehearsal) -> dict[str, Column]:
    """Return columns of steps: PHASES and reserved; the last one only if it completed or the script failed."""
    report, steps = found.report, list[tuple[str, list[PhasePeaks]]]()
    is_cut = report.outcome not in (RehearsalOutcome.STOPPED, RehearsalOutcome.ENDED)
    for step, spans in groupby(report.spans, key=lambda span: span.step):
        if step <= report.num_steps:
            steps.append((str(step), list(spans)))
        elif is_cut or report.num_steps == 0:
            steps.append((f"{step}, not completed", list(spans)))
    columns = {"step": words(name for name, _ in steps)}
    for phase in PHASES:
        sizes = [[span.allocated_bytes for span in spans if span.phase == phase] for _, spans in steps]
        columns[phase] = numbers((max(own, default=None) for own in sizes), format_gib, "-")
    columns["reserved"] = numbers((max(span.reserved_bytes for span in spans) for _, spans in steps), format_gib)
    return columns


def held_by(one: HeldLine) -> tuple[str, str]:
    """Return the line that holds memory, and the user's own line that called it; empty if that is the same one."""
    line = place(one.line) if one.line else "backward, by autograd"
    return line, place(one.user_line) if one.user_line and one.user_line != one.line else ""


def what_would_help(found: Rehearsal) -> list[str]:
    """Return what may make a script fit that ran out of memory, or go on that called an unsupported function."""
    failure, report, lines = found.report.failure, found.report, list[str]()
    if report.outcome is RehearsalOutcome.OUT_OF_MEMORY:
        assert failure is not None
        lines.append(failure.message)
        if "expandable_segments:True" not in (report.allocator_settings or ""):
            lines.append("try: PYTORCH_ALLOC_CONF=expandable_segments:True, which wastes less of reserved memory")
        lines.append(
            "try: activation checkpointing, a smaller micro-batch, more GPUs (--world-size), or a larger --gpu"
        )
    # all that was called are products and convolutions (unsupported.c)
    called = [name.startswith(("cublas", "cudnn")) for name in report.unsupported]
    if report.stops_at_unsupported and called and all(called):
        lines.append("try: --unsupported warn, which counts such calls and goes on; their memory is then not counted")
    return lines


def read_lines(report: RehearsalReport) -> list[str]:
    """Return what the script read from the GPU: a line that says so, a line for each read, and one of known reads."""
    reads = report.reads
    if not report.num_steps and not reads:
        return []
    if not reads and not report.num_known_reads:
        return ["The script read no value from the GPU."]
    if not reads:
        return [f"The script read {report.num_known_reads} small integers from the GPU, each as in training."]
    lines = ["Read from the GPU, where kernels do nothing: meaningless here, and harmless if only printed:"]
    for one in reads[:MOST_LINES]:
        line = one.user_line or one.line
        where = place(line) if line else "autograd"
        inner = f" ({place(one.line)})" if one.line and one.line != line else ""
        note = ": sizes may follow from these values, do not trust them" if one.decides_sizes else ""
        lines.append(f"  {one.operator} at {where}{inner}, {one.count} times{note}")
    if len(reads) > MOST_LINES:
        lines.append(f"  and {len(reads) - MOST_LINES} more lines (--json)")
    count = report.num_known_reads
    known = f"{count} more read{'s' * (count != 1)}, of small integers, gave the values of training."
    return lines + ([known] if count else [])


def several(found: Sequence[Rehearsal]) -> str:
    """Return the rehearsals of several ranks: the worst first, then a row for each."""
    worst, table = worst_of(found), table_lines(titled(rank_columns(found)))
    times = ["", *time_lines(worst)] if worst.time is not None and worst.time.stages else []
    return "\n".join([f"rank {worst.report.rank} decides: {verdict_line(worst)}", "", *table, *times])


def rank_columns(found: Sequence[Rehearsal]) -> dict[str, Column]:
    """Return the columns of a table of ranks: their peaks, whether they fit, and their step times where asked for."""
    peaks, times = [one.report.peak for one in found], [one.time for one in found]
    columns = {
        "rank": numbers(one.report.rank for one in found),
        "allocated": numbers((one.allocated_bytes if one else None for one in peaks), format_gib),
        "reserved": numbers((one.reserved_bytes for one in found), format_gib),
        "fits": words(one.verdict.text if one.verdict else UNKNOWN for one in found),
    }
    if found[0].asks_time:
        columns["step time"] = numbers((one.time.step_seconds if one else None for one in times), step_text)
    return columns
