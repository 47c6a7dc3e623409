"""A comparison as text: the answer first, then what differs in the setup, in bytes, in milliseconds, and why."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from fsdp_bench.plan.compare.comparison import REST, Comparison
from fsdp_bench.plan.compare.difference import Difference
from fsdp_bench.plan.compare.reasons import Reason, is_elsewhere, peak_moves, reasons, unexplained
from fsdp_bench.plan.compare.side import KINDS
from fsdp_bench.plan.setup_text import setup_line, spaced, value_text
from fsdp_bench.report.table import table_columns, table_lines
from fsdp_bench.report.text.common import UNKNOWN, fact
from fsdp_bench.report.text.speed import step_text
from fsdp_bench.spec.units import format_gib

_NAMES = {
    "compute_seconds": "operators",
    "exposed_communication_seconds": "exposed communication",
    REST: "the rest (copies, CPU, waiting)",
    "communication_seconds": "all collectives",
    "host_copy_seconds": "copies to and from the host",
    "cpu_optimizer_seconds": "optimizer on the CPU",
    "needed": "reserved without retries",
}
_EQUALLY_FAST = 0.0005
"""Speeds that differ by less than this fraction are called equal: less than what is printed."""
_ANSWERS = ("needed", "reserved", "allocated", "device")
"""Kinds of peaks that the answer is about: the first that both sides have from their own source."""


def answer(found: Comparison) -> str:
    """Return which of the two needs less memory, which is faster, and by how much, with the source of each number."""
    a, b = found.a, found.b
    if found.is_equal:
        return f"nothing differs between A and B ({a.reached})"
    stopped = [f"{n} stopped as {one.stopped} ({one.reached})" for n, one in (("A", a), ("B", b)) if one.stopped]
    if stopped:
        return f"{' and '.join(stopped)}: a peak of it is what it had reached, and no answer to which needs less memory"
    return "; ".join([_memory_answer(found), _time_answer(found)])


def _memory_answer(found: Comparison) -> str:
    peaks = {one.name: one for one in found.peaks}
    # a dry run's reserved memory is predicted
    has_own = all(one.reserved_source == one.source for one in (found.a, found.b))
    kind = next((kind for kind in _ANSWERS if kind in peaks and (kind != "reserved" or has_own)), None)
    if kind is None:
        return "no peak of the same kind is known of both"
    peak = peaks[kind]
    word = "reserved" if kind == "needed" else kind
    if found.is_same_setup and found.a.source != found.b.source:
        return _ratio(found, peak, word, format_gib)
    if peak.difference == 0:
        return f"A and B need the same memory: {format_gib(peak.a)} {word} ({_sources(found)})"
    less, more = (("A", found.a), ("B", found.b)) if peak.difference > 0 else (("B", found.b), ("A", found.a))
    low, high = sorted((peak.a, peak.b))
    return (
        f"{less[0]} needs {format_gib(high - low)} less memory: {format_gib(low)} ({less[1].reached}) against"
        f" {format_gib(high)} ({more[1].reached}) {word}"
    )


def _time_answer(found: Comparison) -> str:
    step = found.tokens or found.step
    if step is None:
        unknown = [name for name, one in (("A", found.a), ("B", found.b)) if "step_seconds" not in one.times]
        return f"times are unknown of {' and '.join(unknown)}"
    is_rate = step is found.tokens
    text = "{:,.0f} tokens/s per GPU".format if is_rate else step_text
    if found.is_same_setup and found.a.source != found.b.source:
        return _ratio(found, step, "" if is_rate else "a step", text)
    if abs(step.difference) < _EQUALLY_FAST * step.a:
        return f"both are equally fast: {text(step.a)} ({_sources(found)})"
    faster = "B" if (step.difference > 0) == is_rate else "A"
    one, other = (found.b, found.a) if faster == "B" else (found.a, found.b)
    mine, theirs = (step.b, step.a) if faster == "B" else (step.a, step.b)
    gain = mine / theirs - 1 if is_rate else theirs / mine - 1
    return f"{faster} is {gain:.1%} faster: {text(mine)} ({one.source}) against {text(theirs)} ({other.source})"


def _ratio(found: Comparison, one: Difference, word: str, text: Callable[[float], str]) -> str:
    first, second = (found.a, one.a), (found.b, one.b)
    if found.b.source == "predicted":
        first, second = second, first
    side, value = first
    other, base = second
    if value == base:
        return f"{side.reached} equals {other.reached}: {text(value)} {word}".rstrip()
    where = "above" if value > base else "below"
    return (
        f"{side.reached} is {abs(value / base - 1):.1%} {where} {other.reached}: {text(value)} against {text(base)}"
        f" {word}".rstrip()
    )


def _sources(found: Comparison) -> str:
    return " and ".join(dict.fromkeys((found.a.reached, found.b.reached)))


def comparison_text(found: Comparison) -> str:
    """Return a comparison as text; the first line is the answer."""
    if found.is_equal:
        return "\n".join([answer(found), "", *_sides(found)])
    rows = [[spaced(one.name), value_text("", one.a), value_text("", one.b)] for one in found.known_fields]
    fields = table_lines(table_columns(["differs", "A", "B"], rows)) if rows else ["no field of the setup differs"]
    lines = [answer(found), "", *_sides(found), "", *fields, "", *_peaks(found)]
    if found.categories is not None and any(one.difference for one in found.categories):
        total = sum(one.difference for one in found.categories)
        lines += ["", f"at the peak, {signed_size(total)}", *_bytes_table(found.categories)]
    if found.phases:
        lines += ["", "peak allocated by phase", *_bytes_table(found.phases)]
    lines += _times(found)
    return "\n".join([*lines, *_why(found)])


def _sides(found: Comparison) -> list[str]:
    lines = []
    for name, side in (("A", found.a), ("B", found.b)):
        place = (side.peak_phase or UNKNOWN) + ("" if side.peak_place is None else f", at {side.peak_place}")
        stopped = f"; stopped as {side.stopped}, so that peaks are what it had reached" if side.stopped else ""
        lines.append(fact(name, f"{side.name} ({side.reached}): {side.model}, {setup_line(side.setup)}{stopped}"))
        lines.append(fact("", f"peak in {place}"))
    return lines


def _peaks(found: Comparison) -> list[str]:
    reserved = next(((one.a, one.b) for one in found.peaks if one.name == "reserved"), None)
    rows = [
        [*_row(one, format_gib, signed_size), f"{one.difference / one.a:+.1%}" if one.a else ""]
        for one in found.peaks
        if (one.a or one.b) and not (one.name == "needed" and (one.a, one.b) == reserved)
    ]
    lines = table_lines(table_columns(["peak", "A", "B", "B less A", ""], rows, {"A", "B", "B less A", ""}))
    for name, side in (("A", found.a), ("B", found.b)):
        other = found.b if side is found.a else found.a
        alone = [_name(kind) for kind in KINDS if kind in side.peaks and kind not in other.peaks]
        if alone:
            lines.append(fact("", f"only {name} has: {', '.join(alone)}", 2))
        if side.reserved_source != side.source and "reserved" in side.peaks:
            lines.append(fact("", f"{name}'s reserved memory is {side.reserved_source}, not of the {side.reached}", 2))
    if found.a.facts.get("kernels") != found.b.facts.get("kernels"):
        lines.append(fact("", "allocated: of a GPU's allocator on one side, of a CPU's tensors on the other", 2))
    return lines


def _name(name: str) -> str:
    return _NAMES.get(name, spaced(name))


def signed_size(size: float) -> str:
    """Return a difference in bytes as text: ``+2.1 GiB``."""
    return format_gib(size) if size <= 0 else f"+{format_gib(size)}"


def signed_time(seconds: float) -> str:
    """Return a difference in seconds as text: ``-3.2 ms``."""
    text = step_text(abs(seconds))
    return text if text == step_text(0.0) else f"{'-' if seconds < 0 else '+'}{text}"


_Text = Callable[[float], str]


def _row(one: Difference, text: _Text, signed: _Text, named: Callable[[str], str] | None = None) -> list[str]:
    return [(named or _name)(one.name), text(one.a), text(one.b), signed(one.difference)]


def difference_table(
    differences: Iterable[Difference], text: _Text, signed: _Text, named: Callable[[str], str] | None = None
) -> list[str]:
    """Return a table of A, B and what B has more. ``named`` prints a name; by default as words."""
    rows = [_row(one, text, signed, named) for one in differences]
    columns = table_columns(["", "A", "B", "B less A"], rows, {"A", "B", "B less A"})
    return table_lines(columns, indent=2) if rows else []


def _bytes_table(differences: Iterable[Difference]) -> list[str]:
    return difference_table((one for one in differences if one.a or one.b), format_gib, signed_size)


def _times(found: Comparison) -> list[str]:
    step, (a, b) = found.step, (side.setup.tokens_per_step_per_rank for side in (found.a, found.b))
    if step is None:
        return []
    tokens = "" if a == b else f", of {a:,} and {b:,} tokens on each GPU"
    lines = ["", f"a step, {signed_time(step.difference)}: {step_text(step.a)} and {step_text(step.b)}{tokens}"]
    lines += difference_table(found.parts, step_text, signed_time)
    others = [one for one in found.other_times if one.difference]
    return lines + (
        ["", "beside these, or within them", *difference_table(others, step_text, signed_time)] if others else []
    )


def _why(found: Comparison) -> list[str]:
    """Return the mechanisms that the numbers show; nothing between two sources of one setup, which have none."""
    named = [] if found.is_same_setup else reasons(found)
    lines = [*_moved(found, named), *map(_reason_text, named)]
    if not found.is_same_setup and not is_elsewhere(found) and (rest := _unexplained(found, named)):
        lines.append(f"- not explained by one field: {rest}")
    counts = Counter(name for reason in named for name in (*reason.bytes_more, *reason.seconds_more))
    if shared := [_name(name) for name, count in counts.items() if count > 1]:
        lines.append(f"- several reasons name {', '.join(shared)}: the number is of all of them together")
    return ["", "why: what the fields that differ do, where bytes and times agree with it", *lines] if lines else []


def _moved(found: Comparison, named: Sequence[Reason]) -> list[str]:
    """Return that the peak is in another phase or at another operator, so that categories are of different moments."""
    if not is_elsewhere(found):
        return []
    a, b = found.a, found.b
    text = f"the peak moves from {a.peak_phase} (A) to {b.peak_phase} (B)"
    if not peak_moves(found):
        text = f"both peaks are in {a.peak_phase}, A's at {a.peak_place}, B's at {b.peak_place}"
    rest = "" if found.is_same_setup else _unexplained(found, named)
    return [f"- {text}{f': what is alive there differs, {rest}' if rest else ''}"]


def _unexplained(found: Comparison, named: Sequence[Reason]) -> str:
    sizes = [f"{_name(one.name)} {signed_size(one.difference)}" for one in unexplained(found, list(named))]
    return f"{', '.join(sizes)} (B less A)" if sizes else ""


def _reason_text(reason: Reason) -> str:
    numbers = [
        f"{_name(name)} {signed(number)}"
        for more, signed in ((reason.bytes_more, signed_size), (reason.seconds_more, signed_time))
        for name, number in sorted(more.items(), key=lambda item: -abs(item[1]))
    ]
    return f"- {reason.side}: {reason.text}: {', '.join(numbers)}"
