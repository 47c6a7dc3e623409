"""The page of predicted setups, one or several side by side; the page of the largest that fits."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from fsdp_bench.plan.document import AnswerDocument, TimeDocument
from fsdp_bench.plan.max_size import MaxSizeDocument, answers_of, setting_rows
from fsdp_bench.plan.setup_text import spaced, title, varying
from fsdp_bench.plan.table import answer_row
from fsdp_bench.report.charts.colors import Style
from fsdp_bench.report.charts.description import Bar, BarGroup, Bars, Piece, Plot
from fsdp_bench.report.charts.max_size import setting_bar, size_bars
from fsdp_bench.report.charts.memory_timeline import breakdown_bars, phase_bars
from fsdp_bench.report.charts.step import PART_STYLES
from fsdp_bench.report.charts.trade_off import TradeOffPoint, trade_off_plot
from fsdp_bench.report.html.blocks import Block, Facts, Page, Section, Table, Text, table
from fsdp_bench.report.table import numbers
from fsdp_bench.report.text import max_size as text
from fsdp_bench.report.text.common import UNKNOWN
from fsdp_bench.report.text.conditions import assumed_facts, conditions, hardware_text, note_facts
from fsdp_bench.report.text.prediction_table import ALWAYS, answer_column, setup_columns
from fsdp_bench.report.text.speed import PART_LABELS, percent, step_text
from fsdp_bench.spec.units import format_gib

OTHER = Style("dark-grey")
"""The style of a part that this version does not know."""


def prediction_page(predictions: Sequence[AnswerDocument]) -> Page:
    """Return the page of one predicted setup, or of several side by side."""
    first = predictions[0]
    differing = varying([one.values for one in predictions])
    sections = [Section("Conditions and versions", (_conditions(predictions, differing),))]
    models = _listed((one.model.name for one in predictions), "models")
    hardware = (hardware_text(one.server, one.setup.get("world_size")) for one in predictions)
    heading = f"{models} on {_listed(hardware, 'kinds of hardware')}"
    if len(predictions) == 1:
        lead = [] if first.memory is None else [_headline(first)]
        return Page(heading, first.source, _answer(first), lead=tuple(lead), sections=(*_alone(first), *sections))
    best = max((one for one in predictions if one.fits), key=_tokens, default=None)
    chart = _trade_off(predictions, differing)
    compared = Section("All setups", (_setups(predictions, differing, best),))
    return Page(
        heading,
        first.source,
        _answer_of_several(predictions, differing, best),
        lead=(chart,) if chart else (),
        sections=(compared, *sections),
    )


_MOST_NAMED = 3
"""If there are more models or servers, their number is named."""


def _listed(names: Iterable[str], what: str) -> str:
    """Return different names as text: ``a and b``; of many how many there are."""
    different = list(dict.fromkeys(names))
    if len(different) > _MOST_NAMED:
        return f"{len(different)} {what}"
    *others, last = different
    return f"{', '.join(others)} and {last}" if others else last


def _answer_of_several(
    predictions: Sequence[AnswerDocument], differing: Sequence[str], best: AnswerDocument | None
) -> str:
    fitting = [one for one in predictions if one.fits]
    if not fitting and any(one.fits is None and one.impossible is None for one in predictions):
        return f"It is {UNKNOWN} whether any of {len(predictions)} setups fits ({_source(predictions[0])})"
    answer = f"{len(fitting)} of {len(predictions)} setups fit{'s' * (len(fitting) == 1)} ({_source(predictions[0])})"
    if best is None:
        return answer
    name, speed = title(best.values, differing), f"{_tokens(best):,.0f} tokens/s per GPU"
    if len(fitting) == 1:
        return f"{answer}: {name}" + (f", {speed}" if _tokens(best) else "")
    return f"{answer}; {name} trains the most, {speed}" if _tokens(best) else answer


def _answer(one: AnswerDocument) -> str:
    if one.impossible is not None:
        return f"Impossible: {one.impossible}"
    memory, of = one.memory, one.server.gpu_memory_bytes
    needed = memory and (memory.needed_bytes or memory.peak_reserved_bytes or memory.peak_allocated_bytes)
    source = (memory and memory.peak_reserved_source) or _source(one)  # a dry run's verdict rests on a prediction
    text = "" if not needed else f": needs {format_gib(needed)}"
    usable = "" if of is None or not text else f" of {format_gib(of)} usable"
    verdict = {True: "fits", False: spaced(one.verdict or "does not fit"), None: f"fit {UNKNOWN}"}[one.fits]
    return f"{verdict.capitalize()} ({source}){text}{usable}"


def _tokens(one: AnswerDocument) -> float:
    return (one.time.tokens_per_second_per_gpu if one.time else None) or 0.0


def _headline(one: AnswerDocument) -> Facts:
    memory, time = one.memory, one.time
    assert memory is not None
    kept = (
        "" if one.required_headroom_bytes is None else f", of which {format_gib(one.required_headroom_bytes)} kept free"
    )
    found = [("setting", title(one.values, ("api", "precision", "checkpointing")))]
    found.append(("peak allocated", format_gib(memory.peak_allocated_bytes)))
    found += [] if one.headroom_bytes is None else [("left on the GPU", f"{format_gib(one.headroom_bytes)}{kept}")]
    if time is not None and time.step_seconds is not None:
        speed = f"{_tokens(one):,.0f} tokens/s per GPU" if _tokens(one) else f"tokens/s {UNKNOWN}"
        found.append(("step", f"{step_text(time.step_seconds)}, {speed}, MFU {percent(time.mfu)}"))
    return Facts(tuple(found))


def _alone(one: AnswerDocument) -> list[Section]:
    memory, time = one.memory, one.time
    found = []
    if memory is not None:
        at = f", at {memory.peak_place}" if memory.peak_place else ""
        blocks = (
            phase_bars(memory.phases, f"Peak of each phase, on one GPU ({_source(one)})"),
            breakdown_bars(memory.breakdown_bytes, f"Alive at the peak ({_source(one)})"),
            Text(f"The peak is in {memory.peak_phase}{at}."),
        )
        found.append(Section("Memory", blocks))
    if time is not None:
        found.append(Section("Time of a step", (step_parts(time),)))
    return found


def step_parts(time: TimeDocument) -> Block:
    """Return what a step consists of, or why that is unknown."""
    if time.step_seconds is None:
        return Text(f"Unknown: {', '.join(time.unknown) or 'no rates are known'}.")
    if time.parts_seconds:
        known = time.parts_seconds.items()
        parts = {PART_LABELS.get(name, spaced(name)): seconds for name, seconds in known if seconds > 0}
        caption = f"What a step of {step_text(time.step_seconds)} consists of (predicted)"
    else:  # written before the parts were
        parts = {"operators": time.compute_seconds or 0.0}
        parts["exposed communication"] = time.exposed_communication_seconds or 0.0
        caption = f"Parts of a step of {step_text(time.step_seconds)} (predicted)"
    whole, styles = time.step_seconds, {PART_LABELS[part]: style for part, style in PART_STYLES.items()}
    lines = [
        Bar((name,), (step_text(value),), (Piece(name, min(max(value, 0.0), whole), styles.get(name, OTHER)),))
        for name, value in sorted(parts.items(), key=lambda part: -part[1])
    ]
    return Bars(caption, (BarGroup("", tuple(lines)),), remarks=(f"rates: {time.rates}",), whole=whole)


_ANSWER = (
    *("fits", "peak_allocated_bytes", "needed_bytes", "headroom_bytes", "step_seconds", "exposed_fraction"),
    *("tokens_per_second_per_gpu", "mfu", "impossible"),
)


def _setups(predictions: Sequence[AnswerDocument], differing: Sequence[str], best: AnswerDocument | None) -> Table:
    rows = list(map(answer_row, predictions))
    found = setup_columns([one.values for one in predictions], {*differing, *ALWAYS})
    found += [answer_column(name, rows) for name in _ANSWER]
    columns = {"#": numbers(range(1, len(rows) + 1)), **{column.name: column for column in found}}
    marked = [place for place, one in enumerate(predictions) if one is best]
    return table(f"Setups ({_source(predictions[0])})", columns, marked)


def _trade_off(predictions: Sequence[AnswerDocument], differing: Sequence[str]) -> Plot | None:
    points = [
        TradeOffPoint(one.memory.needed_bytes, _tokens(one), one.fits, number, title(one.values, differing))
        for number, one in enumerate(predictions, start=1)
        if one.memory is not None and one.memory.needed_bytes and _tokens(one)
    ]
    if len(points) < 2:
        return None
    heading = "Memory against speed (predicted): the numbers are those of the table below"
    return trade_off_plot(points, heading, "memory that a GPU needs", "tokens/s per GPU", _limits(predictions))


def _limits(predictions: Iterable[AnswerDocument]) -> dict[int, str]:
    found: dict[int, str] = {}
    for one in predictions:
        if one.server.gpu_memory_bytes:
            usable, name = one.server.gpu_memory_bytes, one.server.gpu or "the GPU"
            found[usable] = " and ".join(dict.fromkeys(filter(None, (found.get(usable), name))))
    return found


def _conditions(predictions: Sequence[AnswerDocument], differing: Sequence[str]) -> Facts:
    first = predictions[0]
    ran = _RAN.get(first.source, "a simulation of the training step")
    return Facts((
        *conditions(predictions, differing),
        ("source", f"{_source(first)}: {ran}; no GPU was used"),
        *assumed_facts(predictions),
        *note_facts(predictions),
    ))  # fmt: skip


_RAN = {"dry-run": "a training step of PyTorch's own FSDP, on tensors without data"}
"""The subject that ran, by the source of an answer that is not simulated."""


def _source(one: AnswerDocument) -> str:
    return one.source.replace("-", " ")


def max_size_page(servers: Sequence[MaxSizeDocument]) -> Page:
    """Return the page of the largest values that fit."""
    first = servers[0]
    highest = max((cell.fits_value or 0 for one in servers for cell in one.cells), default=0) or 1
    return Page(
        text.QUANTITY_TEXTS[first.dial].title,
        first.source,
        "; ".join(map(text.answer, servers)),
        lead=tuple(_largest_bars(one, highest) for one in servers),
        sections=(
            Section("All settings", tuple(map(_largest_table, servers))),
            Section("Conditions and versions", (_all_conditions(servers),)),
        ),
    )


def _all_conditions(servers: Sequence[MaxSizeDocument]) -> Facts:
    facts = []
    for one in servers:
        answers = answers_of(one)
        models = dict.fromkeys(each.model.name for each in answers if each.fits is not None)
        facts += text.setting_facts(one, answers, [] if one.dial == "num_parameters" else models) if answers else []
        facts += [("rates", each.time.rates) for each in answers if each.time is not None and each.time.rates]
        facts += [*assumed_facts(answers), *note_facts(answers)]
    return Facts((*dict.fromkeys(facts), ("source", f"{servers[0].source}, no GPU was used")))


def _largest_bars(one: MaxSizeDocument, highest: int) -> Bars:
    fields, quantity = [field for field in text.differing(one) if field != "strategy"], text.QUANTITY_TEXTS[one.dial]
    bars = [setting_bar(cell, cell.setup, fields) for cell in one.cells]
    heading = f"{text.place_of(one)}: what fits (predicted)"
    (found,) = size_bars({heading: bars}, quantity.axes, fields, partial(text.value_text, one.dial), quantity.unit)
    return replace(found, whole=highest)


def _largest_table(one: MaxSizeDocument) -> Table:
    rows = setting_rows(one)
    setups = [cell.setup for cell in one.cells]
    columns = setup_columns(setups, {*text.differing(one), *ALWAYS}, one.dial)
    columns += [answer_column(name, rows) for name in ("model", *text.usual_columns(one), "impossible", "unknown")]
    return table(f"{text.place_of(one)} (predicted)", {column.name: column for column in columns})
