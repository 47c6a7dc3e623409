"""Several rehearsals of one command as text: the fastest or the largest that fits, then a row for each combination."""

from collections.abc import Sequence

from fsdp_bench.plan.estimate import Verdict
from fsdp_bench.plan.rehearsal import Rehearsal
from fsdp_bench.plan.script.each import in_order, speed_of
from fsdp_bench.plan.script.largest import LargestValue
from fsdp_bench.plan.script.quantity import ScriptQuantity
from fsdp_bench.plan.script.rehearsals import Answered
from fsdp_bench.report.table import Column, numbers, table_lines, titled, words
from fsdp_bench.report.text.common import UNKNOWN, fact
from fsdp_bench.report.text.prediction_table import column_header
from fsdp_bench.report.text.rehearsal import place, shortage, verdict_line, why_unknown_text
from fsdp_bench.report.text.speed import percent, step_text
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
    found = [(one, one.worst) for one in answers if one.worst is not None]
    hardware = {
        f"rank {worst.report.rank} of {worst.report.world_size} on {worst.gpu.name},"
        f" {format_gib(worst.available_bytes)} that PyTorch can reserve"
        for _, worst in found
    }
    fitting = [worst for one, worst in found if one.fits]
    steps = sorted({worst.report.num_steps for worst in fitting})
    first, worst = found[0]
    lines = [fact("command", first.variant.template)]
    lines += [fact("torch", f"{worst.report.torch}, on a stand-in for NVIDIA's libraries")]
    lines += [fact("hardware", hardware.pop())] if len(hardware) == 1 else []
    lines += [fact("steps", " or ".join(map(str, steps)))] if steps else []
    speeds = dict.fromkeys(one.why_no_speed for one in fitting)
    return lines + [fact("tokens/s", f"{UNKNOWN}: {reason}") for reason in speeds if reason is not None]


def each_columns(answers: Sequence[Answered]) -> list[Column]:
    """Return the columns of a table of combinations: their values, then what was found."""
    names = list(dict.fromkeys(name for one in answers for name in one.variant.values))
    labels = [Column(column_header(name), tuple(one.variant.values.get(name, "") for one in answers)) for name in names]
    worst = [one.worst for one in answers]
    peaks = [one and one.report.peak for one in worst]
    columns = {
        "fits": words(_FITS[one.verdict if one else None] for one in worst),
        "allocated": numbers((one.allocated_bytes if one else None for one in peaks), format_gib),
        "reserved": numbers((one.reserved_bytes if one else None for one in worst), format_gib),
        "peaks in": words(f"{one.phase} of step {one.step}" if one else "" for one in peaks),
        "at": words(_line_at_peak(one) if one else "" for one in worst),
    }
    if any(one is not None and one.asks_time for one in worst):
        times = [one.time if one else None for one in worst]
        columns["step time"] = numbers((one.time.step_seconds if one else None for one in times), step_text)
        columns["tokens/s per GPU"] = numbers(map(speed_of, answers), "{:,.0f}".format)
        columns["MFU"] = numbers((one.mfu if one else None for one in times), percent)
    return [*labels, *titled(columns, ("MFU", "at", "peaks in", "step time", "allocated"))]


_FITS = {Verdict.FITS: "yes", Verdict.RUNS_WITH_RETRIES: "with retries", Verdict.DOES_NOT_FIT: "no", None: UNKNOWN}


def _line_at_peak(found: Rehearsal) -> str:
    held = found.report.lines_at_peak or ()
    return next((place(line) for one in held if (line := one.user_line or one.line) is not None), UNKNOWN)


def answered_line(one: Answered) -> str:
    """Return an answer in one line, for progress."""
    if one.worst is None:
        return f"{one.variant.title}: {one.reason}"
    return f"{one.variant.title}: {verdict_line(one.worst)}"


def largest_text(found: Sequence[LargestValue]) -> str:
    """Return the answer, and what was rehearsed; of several combinations a row for each."""
    if len(found) == 1:
        answers = list(found[0].tried.values())
        columns = each_columns(answers)
    else:
        answers = [one.shown for one in found]
        columns = [*each_columns(answers), *_next_columns(found)]
    lines = [largest_line(found)]
    if any(one.worst is not None for one in answers):
        lines += ["", *conditions(answers), "", *table_lines(columns)]
    notes = [note for one in found for note in _notes(one)]
    return "\n".join([*lines, *(["", *notes] if notes else [])])


def largest_line(found: Sequence[LargestValue]) -> str:
    """Return the answer in one sentence: of several combinations the best."""
    if len(found) == 1:
        return border_line(found[0])
    answered = [one for one in found if one.largest is not None]
    if not answered:
        is_known = all(one.fits is False for one in found)
        answer = "nothing fits" if is_known else f"{UNKNOWN} whether any fits"
        return f"{answer}, of {len(found)} combinations (rehearsed)"
    best = max(answered, key=lambda one: one.quantity.values.index(one.largest or 0))
    title = ", ".join(f"{name} {value}" for name, value in best.values.items())
    return f"{title}: {border_line(best)}; the {adjective(best.quantity)} of {len(found)} combinations"


def adjective(quantity: ScriptQuantity) -> str:
    """Return ``largest``, or what it is where memory falls as the value grows."""
    return "fewest" if quantity.name == "nodes" else "smallest" if quantity.is_fewest else "largest"


def title_of(quantity: ScriptQuantity) -> str:
    """Return what is searched: ``largest batch that fits``."""
    name = quantity.name.replace("_", " ")
    return f"{adjective(quantity)} {name} that fit{'' if quantity.name == 'nodes' else 's'}"


def border_line(one: LargestValue) -> str:
    """Return the largest that fits and what the next one is short of."""
    name, beyond = one.quantity.name.replace("_", " "), _beyond(one)
    if one.largest is None:
        if one.fits is False:
            return f"no {name} fits (rehearsed): {beyond}"
        return f"{UNKNOWN} whether any {name} fits" + (f" (rehearsed): {beyond}" if beyond else ": see below")
    worst = one.tried[one.largest].worst
    assert worst is not None
    memory = f"{format_gib(worst.report.peak_reserved_bytes)} reserved of {format_gib(worst.most_reserved_bytes)}"
    if not one.is_found:
        so_far = f"{name} {one.largest} fits (rehearsed: {memory}); whether a larger one does is not known"
        so_far = so_far.replace("larger", "smaller") if one.quantity.is_fewest else so_far
        return f"{so_far}; {beyond}" if beyond else so_far
    end = "" if one.quantity.is_fewest and one.largest == 1 else "; the range ends there"
    return f"{title_of(one.quantity)} (rehearsed): {one.largest} ({memory}){f'; {beyond}' if beyond else end}"


def _beyond(one: LargestValue) -> str:
    """Return that the next value does not fit, and why; empty if there is none."""
    worst = _next_worst(one)
    if worst is None:
        return ""
    verb = "do" if one.quantity.name == "nodes" and one.next != 1 else "does"
    return f"{one.next} {verb} not: {short_of(worst)}"


def _next_worst(one: LargestValue) -> Rehearsal | None:
    return None if one.next is None else one.tried[one.next].worst


def short_of(found: Rehearsal) -> str:
    """Return why a rehearsal does not fit."""
    return ("it runs " if found.verdict is Verdict.RUNS_WITH_RETRIES else "") + shortage(found)


def _next_columns(found: Sequence[LargestValue]) -> list[Column]:
    worst = [_next_worst(one) for one in found]
    columns = {
        "next": numbers((one.next for one in found), without="-"),
        "which": words("-" if one is None else short_of(one) for one in worst),
        "rehearsed": numbers(len(one.tried) for one in found),
    }
    return titled(columns)


def _notes(one: LargestValue) -> list[str]:
    """Return what does not stand in the table: PyTorch's message, uneven memory, values that the script refuses."""
    title = "".join(f"{name} {value}, " for name, value in one.values.items())
    notes = []
    worst = _next_worst(one)
    if worst is not None and worst.report.failure is not None and worst.verdict is Verdict.DOES_NOT_FIT:
        message = worst.report.failure.message.partition(" Including")[0]
        notes.append(fact(f"{title}{one.quantity.name} {one.next}: ", message, 24))
    if one.is_uneven:
        order = one.quantity.values
        below = order[: order.index(one.largest)] if one.largest is not None else ()
        smaller = [value for value, each in one.tried.items() if each.fits is False and value in below]
        text = f"{_listed(smaller)} does not fit, though {one.largest} does; larger ones may, too"
        notes.append(fact(f"{title}uneven memory: ", text, 24))
    reasons: dict[str, list[int]] = {}
    for value in one.refused:
        reasons.setdefault(reason_of(one.tried[value]) or UNKNOWN, []).append(value)
    for reason, values in reasons.items():
        text = f"{_listed(values)}: {reason}; {'they count' if len(values) > 1 else 'it counts'} for neither side"
        notes.append(fact(f"{title}{UNKNOWN}: ", text, 24))
    return notes


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))
