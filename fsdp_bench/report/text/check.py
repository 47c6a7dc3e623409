"""A check as Markdown, for a terminal, a job's summary or a comment: the answer, a row for each recipe, what grew."""

from collections.abc import Sequence

from fsdp_bench.plan.check import CheckResult, CheckRow
from fsdp_bench.plan.compare.lines import line_name
from fsdp_bench.plan.compare.scripts import Status
from fsdp_bench.plan.setup_text import spaced, value_text
from fsdp_bench.report.text.common import UNKNOWN
from fsdp_bench.report.text.compare import signed_size, signed_time
from fsdp_bench.report.text.compare_scripts import gate_line, peak_moves
from fsdp_bench.report.text.conditions import hardware_text
from fsdp_bench.report.text.speed import step_text
from fsdp_bench.spec.errors import printable, shortened
from fsdp_bench.spec.subprocesses.rehearsal import SourceLine
from fsdp_bench.spec.units import format_gib

MOST_LINES = 5
"""Lines of the script that are listed for a recipe."""
MOST_CHARACTERS = 300
"""Characters of a reason."""
TRACEBACK_LINES = 12


def row_line(row: CheckRow) -> str:
    """Return the reason for a row's answer, in one line."""
    return shortened(row.reason or "" if row.gate is None else gate_line(row.gate), MOST_CHARACTERS)


def row_answer(row: CheckRow) -> str:
    """Return a row's name, answer and reason, in one line."""
    line = row_line(row)
    return f"{row.name}: {line if line.startswith(row.status) else f'{row.status}: {line}'}"


def answer(found: CheckResult) -> str:
    """Return how many recipes fail, and why the worst one does."""
    total, failed = len(found.rows), sorted(found.failed, key=lambda row: list(Status).index(row.status))
    recipes = f"{total} recipe{'s' * (total != 1)}"
    if not failed:
        return f"{recipes} checked: all pass" if total > 1 else f"{recipes} checked: it passes"
    more = f"; and {len(failed) - 1} more" if len(failed) > 1 else ""
    return f"{len(failed)} of {recipes} failed: {row_answer(failed[0])}{more}"


def check_text(found: CheckResult) -> str:
    """Return a check as Markdown."""
    has_times = any(row.gate and row.gate.now.found.time for row in found.rows)
    header = ["recipe", "on", "answer", "peak reserved", "than the baseline", *["step"] * has_times, "why"]
    lines = [f"### fsdp-bench check: {_escaped(answer(found))}", "", _row(header), "|---" * len(header) + "|"]
    lines += [_row(_cells(row, has_times)) for row in found.rows]
    for row in found.rows:
        lines += _details(row)
    new = [row.name for row in found.rows if row.status is Status.NEW]
    if new and found.updated is None:
        lines += [
            "",
            _escaped(f"No baseline of: {', '.join(new)}. `fsdp-bench check {found.file} --update` writes it."),
        ]
    if found.only_in_baseline and found.updated is None:
        lines += ["", _escaped(f"In the baseline alone: {', '.join(found.only_in_baseline)}.")]
    if found.updated is not None:
        lines += ["", _escaped(f"This is the baseline from now on: {found.updated.name}.")]
    return "\n".join(lines)


def _cells(row: CheckRow, has_times: bool) -> list[str]:
    status = row.status.value if row.status in (Status.PASSES, Status.NEW) else f"**{row.status.value}**"
    if row.gate is None:
        return [_escaped(row.name), "", status, "", "", *[""] * has_times, _escaped(row_line(row))]
    now, comparison = row.gate.now.found, row.gate.comparison
    reserved = now.memory.peak_reserved_bytes
    more = {one.name: signed_size(one.difference) for one in comparison.peaks} if comparison else {}
    step = now.time and now.time.step_seconds
    slower = comparison.step if comparison else None
    is_asked = now.time is not None or now.why_no_time is not None
    time = UNKNOWN if is_asked else ""
    if step:
        time = f"{step_text(step)} ({signed_time(slower.difference)})" if slower else step_text(step)
    cells = [row.name, hardware_text(now.server, now.world_size), status]
    cells += ["" if reserved is None else format_gib(reserved), more.get("reserved", ""), *[time] * has_times]
    return [*map(_escaped, cells), _escaped(row_line(row))]


def _details(row: CheckRow) -> list[str]:
    """Return the lines that hold more or most, where memory grew or ran out; a crash's traceback; what else differs."""
    if row.gate is None or row.status is Status.PASSES:
        return []
    now, comparison = row.gate.now.found, row.gate.comparison
    lines = list[str]()
    if comparison is not None and row.status is Status.GREW:
        differing = [one for one in comparison.lines if one.difference][:MOST_LINES]
        lines += [_line(one.name, signed_size(one.difference), one.line) for one in differing]
        lines += [f"- {moved}"] if (moved := peak_moves(comparison)) else []
    if row.status is Status.DOES_NOT_FIT:
        held = (now.memory.lines_at_peak or ())[:MOST_LINES]
        lines += [_line(line_name(one.line, one.user_line), format_gib(one.num_bytes), one.line) for one in held]
    for one in comparison.fields if comparison is not None else ():
        old, new = value_text("", one.a), value_text("", one.b)
        lines.append(_escaped(f"- {spaced(one.name)}: {old} in the baseline, {new} now"))
    if row.status is Status.CRASHED and now.failure is not None:
        traceback = now.failure.traceback.rstrip().replace("```", "'''").splitlines()[-TRACEBACK_LINES:]
        lines += ["```", *map(printable, traceback), "```"]
    return ["", f"#### {_escaped(row.name)}", "", *lines] if lines else []


def _line(name: str, size: str, line: SourceLine | None) -> str:
    code = f": `{printable(line.text).replace('`', chr(39))}`" if line and line.text else ""
    return f"- {_escaped(name)} {size}{code}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _escaped(text: str) -> str:
    """Return text in which nothing is Markdown's or HTML's that would change a table."""
    return printable(text).replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")
