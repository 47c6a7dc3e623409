"""Two rehearsals compared, as text: the answer, bytes by line, milliseconds by operator; and a gate's line."""

from collections.abc import Callable, Sequence

from fsdp_bench.plan.compare.difference import Difference
from fsdp_bench.plan.compare.lines import LineDifference
from fsdp_bench.plan.compare.scripts import Gate, ScriptComparison, Status
from fsdp_bench.plan.estimate import Verdict
from fsdp_bench.plan.rehearsal_document import RehearsalDocument
from fsdp_bench.plan.setup_text import spaced, value_text
from fsdp_bench.report.table import table_columns, table_lines
from fsdp_bench.report.text.common import UNKNOWN, fact
from fsdp_bench.report.text.compare import difference_table, signed_size, signed_time
from fsdp_bench.report.text.rehearsal import place
from fsdp_bench.report.text.speed import step_text
from fsdp_bench.spec.subprocesses.rehearsal import RehearsalOutcome
from fsdp_bench.spec.units import format_gib

MOST_NAMED = 3
"""Lines and operators in the answer."""
MOST_ROWS = 20
"""Rows of a table."""
LONGEST_LINE = 50
"""Characters of a line of the script."""


def answer(found: ScriptComparison) -> str:
    """Return by how much the peak and a step differ, with the lines and operators that differ most."""
    if found.is_equal:
        return "; ".join(["nothing differs between A and B (rehearsed)", *_unknown_time(found)])
    a, b = state(found.a.found), state(found.b.found)
    states = [] if a == b == "fits" else [f"A {a}" if a == b else f"A {a}, B {b}"]
    return "; ".join([*states, *_memory(found), *_time(found)]) + " (B less A)"


def _memory(found: ScriptComparison) -> list[str]:
    if not found.peaks:
        return []
    if not any(one.difference for one in found.peaks):
        return [f"peak equal, {format_gib(found.peaks[0].a)} allocated"]
    peaks = ", ".join(f"{signed_size(one.difference)} {one.name}" for one in found.peaks)
    return [f"peak {peaks}{_most(found.lines, signed_size)}"]


def _time(found: ScriptComparison) -> list[str]:
    if found.step is None:
        return _unknown_time(found)
    if not found.step.difference:
        return [f"a step equal, {step_text(found.step.a)}"]
    more = f"{signed_time(found.step.difference)} ({found.step.difference / found.step.a:+.1%})"
    return [f"a step {more}{_most(found.parts, signed_time)}"]


def _unknown_time(found: ScriptComparison) -> list[str]:
    unknown = [side.name for side in (found.a, found.b) if side.found.time is None]
    return [f"times are unknown of {unknown[0]}"] if len(unknown) == 1 else []


def _most(differences: Sequence[Difference], text: Callable[[float], str]) -> str:
    differing = (one for one in differences[:MOST_NAMED] if text(one.difference) != text(0.0))
    named = [f"{one.name} {text(one.difference)}" for one in differing]
    return f": {', '.join(named)}" if named else ""


def state(found: RehearsalDocument) -> str:
    """Return whether a script fits, and where it failed, as words after its name."""
    failure, memory = found.failure, found.memory
    where = failure and (failure.user_line or failure.line)
    at = f" at {place(where)}" if where else ""
    if found.outcome is RehearsalOutcome.OUT_OF_MEMORY:
        return f"does not fit: out of memory in {memory.peak_phase} of step {memory.peak_step}{at}"
    if found.outcome is RehearsalOutcome.FAILED and failure is not None:
        return f"failed with {failure.type}{at}: {failure.message}"
    if found.verdict is Verdict.RUNS_WITH_RETRIES:
        return f"runs with {memory.num_alloc_retries} allocation retries"
    if found.verdict is Verdict.DOES_NOT_FIT:
        return f"does not fit: {format_gib(memory.peak_reserved_bytes or 0)} reserved are more than --max-gpu-memory"
    if found.outcome is RehearsalOutcome.TIMED_OUT:
        return f"was ended by --timeout after {found.num_steps} steps"
    return "fits" if found.fits else f"may fit or not: {found.why_unknown or UNKNOWN}"


def comparison_text(found: ScriptComparison) -> str:
    """Return a comparison as text; the first line is the answer."""
    lines = [answer(found), ""]
    for name, side in (("A", found.a), ("B", found.b)):
        memory = side.found.memory
        peak = f"peak in {memory.peak_phase} of step {memory.peak_step}; " if memory.peak_phase else ""
        lines.append(fact(name, f"{side.name} (rehearsed): {side.found.command}; {peak}{state(side.found)}"))
    if found.is_equal:
        return "\n".join(lines)
    if found.fields:
        rows = [[spaced(one.name), value_text("", one.a), value_text("", one.b)] for one in found.fields]
        lines += ["", *table_lines(table_columns(["differs", "A", "B"], rows))]
    if found.peaks:
        lines += ["", "peak", *difference_table(found.peaks, format_gib, signed_size)]
    lines += _lines(found)
    if found.phases:
        lines += ["", "peak allocated by phase", *difference_table(found.phases, format_gib, signed_size)]
    if found.step is not None:
        lines += ["", f"a step, {signed_time(found.step.difference)}: {step_text(found.step.a)} and"
                  f" {step_text(found.step.b)}; operators may run at the same time"]  # fmt: skip
    if parts := [one for one in found.parts if signed_time(one.difference) != signed_time(0.0)]:
        lines += difference_table(parts[:MOST_ROWS], step_text, signed_time, str)
        lines += _more(parts, "operators", signed_time)
    return "\n".join(lines)


def _lines(found: ScriptComparison) -> list[str]:
    """Return the lines whose memory at the peak differs, each with what it is now and what it was."""
    differing = [one for one in found.lines if one.difference]
    if not differing:
        unknown = found.peaks and not found.lines
        return ["", f"lines that hold memory: {UNKNOWN} of A or B"] if unknown else []
    rows = [
        [one.name, format_gib(one.a), format_gib(one.b), signed_size(one.difference), _text(one)]
        for one in differing[:MOST_ROWS]
    ]
    header = ["at the peak", "A", "B", "B less A", "line"]
    lines = ["", *table_lines(table_columns(header, rows, {"A", "B", "B less A"}, ["line"]))]
    lines += _more(differing, "lines", signed_size)
    return lines + ([moved] if (moved := peak_moves(found)) else [])


def peak_moves(found: ScriptComparison) -> str | None:
    """Return that the peaks are in different phases; None if they are not."""
    a, b = found.a.found.memory.peak_phase, found.b.found.memory.peak_phase
    return None if a == b else f"the peak moves from {a} to {b}, where other tensors are alive"


def _text(one: LineDifference) -> str:
    texts = (line.text if line else "" for line in (one.line, one.before))
    text, before = (each if len(each) <= LONGEST_LINE else f"{each[:LONGEST_LINE]}..." for each in texts)
    return text if before in ("", text) else f"{text} (was {before})"


def _more(differences: Sequence[Difference], what: str, text: Callable[[float], str]) -> list[str]:
    left = differences[MOST_ROWS:]
    return [f"  and {len(left)} more {what}, {text(sum(one.difference for one in left))}"] if left else []


def gate_line(gate: Gate) -> str:
    """Return a gate's answer in one line: ``peak +2.1 GiB, model.py:61 +1.8 GiB``."""
    status, comparison = gate.status, gate.comparison
    if status in (Status.CRASHED, Status.DOES_NOT_FIT, Status.UNKNOWN):
        return state(gate.now.found)
    if comparison is None:
        return "no baseline"
    if gate.now.found.fits is False:
        return f"{state(gate.now.found)}; so does the baseline"
    peaks = [
        f"{signed_size(one.difference)} {one.name}" if one.difference else f"{one.name} as before"
        for one in gate.grown or comparison.peaks[:1]
    ]
    grown = [one for one in comparison.lines if one.difference > 0 and gate.grown]
    grown = grown[: 2 if grown and grown[0].line is None else 1]  # a line of the script beside autograd, which has none
    named = [f"{one.name} {signed_size(one.difference)}" for one in grown]
    return f"peak {', '.join(peaks + named)}; limit {gate.limit}"
