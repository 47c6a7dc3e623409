"""The page of a rehearsed script: whether it fits, the lines that hold memory, its step, what is not to be trusted."""

from collections.abc import Sequence
from dataclasses import replace
from shlex import join
from textwrap import shorten

from fsdp_bench.plan.chart_data import drawn_streams
from fsdp_bench.plan.document import hardware_document, time_document
from fsdp_bench.plan.rehearsal import Rehearsal, worst_of
from fsdp_bench.plan.script.each import in_order
from fsdp_bench.plan.script.rehearsals import Answered
from fsdp_bench.report.charts.colors import Style
from fsdp_bench.report.charts.description import Bar, BarGroup, Bars, Chart, Key, Piece
from fsdp_bench.report.charts.rehearsal import MOST, each_slide, memory_of_script
from fsdp_bench.report.charts.step import stream_lanes
from fsdp_bench.report.html.blocks import Block, Details, Facts, Page, Section, Table, Text, table
from fsdp_bench.report.html.prediction import step_parts
from fsdp_bench.report.table import numbers, titled, words
from fsdp_bench.report.text import rehearsal as text
from fsdp_bench.report.text.conditions import hardware_text
from fsdp_bench.report.text.each import conclusion, each_columns, reason_of
from fsdp_bench.spec.subprocesses.rehearsal import HeldLine, RehearsalReport
from fsdp_bench.spec.units import GIB, format_gib

OWN, LIBRARY, BACKWARD, OTHERS = Style("blue"), Style("sky"), Style("light-grey"), Style("dark-grey")
MOST_CODE = 60
"""Most characters of a line's code in a chart."""
FEWEST_OTHERS = 1 << 20
"""Fewer bytes of all other lines have no bar: blocks are rounded up."""
_PARTS = 30
"""Three of so many parts of backward are enlarged: nobody knows how many blocks a script's model has."""


def rehearsal_page(found: Sequence[Rehearsal], command: str) -> Page:
    """Return the page of the rank that decides, with a table of the others. ``command``: as a shell takes it."""
    worst = worst_of(found)
    report = worst.report
    answer, _, reason = text.verdict_line(worst).partition("; ")
    columns, marked = tuple(titled(text.rank_columns(found))), (found.index(worst),)
    ranks = Table("Ranks that were rehearsed, one after another", columns, marked=marked)
    return Page(
        f"A training script on {hardware_text(hardware_document(worst.hardware), report.world_size)}",
        "rehearsed",
        f"Rank {report.rank} decides: {answer}" if len(found) > 1 else answer[:1].upper() + answer[1:],
        reason,
        lead=_lead(worst, command),
        sections=(*([Section("Ranks", (ranks,))] if len(found) > 1 else []), *_sections(worst)),
    )


def each_page(answers: Sequence[Answered]) -> Page:
    """Return the page of several combinations: all in one table, then the best one as a page of its own has it."""
    ordered = in_order(answers)
    best, command = ordered[0].worst, join(ordered[0].variant.command)
    columns = {"#": numbers(range(1, len(ordered) + 1)), **{one.name: one for one in each_columns(ordered)}}
    marked = (0,) if ordered[0].fits else ()
    reasons = [(one.variant.title, reason) for one in ordered if (reason := reason_of(one)) is not None]
    blocks: list[Block] = [table("Combinations, the best first (rehearsed)", columns, marked)]
    blocks += [Facts(tuple(reasons))] if reasons else []
    gpus = dict.fromkeys(one.worst.gpu.name for one in ordered if one.worst is not None)
    charts: tuple[Chart, ...] = each_slide(answers).charts if gpus and len(answers) <= MOST else ()
    against = "Memory (rehearsed) against speed (predicted): numbers as in the table below"
    charts = tuple(replace(one, title=one.axis if isinstance(one, Bars) else against) for one in charts)
    answer = conclusion(ordered)
    return Page(
        f"A training script on {' or '.join(gpus)}" if gpus else "A training script",
        "rehearsed",
        answer[:1].upper() + answer[1:],
        lead=charts,
        sections=(
            Section("All combinations", tuple(blocks)),
            *([Section(f"The best: {ordered[0].variant.title}", _lead(best, command), "The best")] if best else []),
            *(_sections(best) if best else []),
        ),
    )


def _lead(found: Rehearsal, command: str) -> tuple[Block, ...]:
    facts = text.time_facts(found) if found.asks_time else []
    named = [(name or "note", value) for name, value in facts]  # those that go on with the one before have no name
    return Facts((("command", command), *named)), *map(Text, text.what_would_help(found))


def _sections(found: Rehearsal) -> list[Section]:
    report = found.report
    sections = [Section("Memory", tuple(_memory(found)))] if report.peak is not None else []
    sections += [Section("Time of a step", tuple(_step(found)))] if found.asks_time else []
    sections += [Section("Read from the GPU", tuple(_reads(report)))] if report.num_steps or report.reads else []
    return [*sections, Section("Conditions and versions", (_conditions(found),))]


def _memory(found: Rehearsal) -> list[Block]:
    report, blocks = found.report, list[Block]()
    if report.curve:
        blocks.append(memory_of_script(found, f"Memory of rank {report.rank} (rehearsed)"))
    if held := report.lines_at_peak:
        blocks += [_held_bars(found, held), Details("All lines that hold memory at the peak", (_held_table(held),))]
    steps = tuple(titled(text.step_columns(found)))
    whole = Table("Peak allocated in each phase, and reserved memory", steps)
    return [*blocks, *([whole] if steps[0].cells else [])]


def _held_bars(found: Rehearsal, held: Sequence[HeldLine]) -> Bars:
    """Return the memory that lines hold at the peak; all lines that are not listed are one bar."""
    peak = found.report.peak
    assert peak is not None
    bars, shown = [], held[: text.MOST_LINES]
    for one in shown:
        line, own = text.held_by(one)
        style = BACKWARD if one.line is None else LIBRARY if one.user_line != one.line else OWN
        called = [f"from {own}"] if own else []
        name = ", ".join([line, *([f"in {one.line.function}: {one.line.text}"] if one.line else []), *called, "GiB"])
        code = shorten(one.line.text, MOST_CODE, placeholder=" ...") if one.line else ""
        count = "1 tensor" if one.num_tensors == 1 else f"{one.num_tensors:,} tensors"
        bars.append(
            Bar((line, code), (format_gib(one.num_bytes), count, *called), (Piece(name, one.num_bytes, style),))
        )
    if (rest := peak.allocated_bytes - sum(one.num_bytes for one in shown)) >= FEWEST_OTHERS:
        piece = Piece("other lines, rounding to blocks, GiB", rest, OTHERS)
        bars.append(Bar(("all else",), (format_gib(rest),), (piece,)))
    legend = Key(OWN, "your own files"), Key(LIBRARY, "packages"), Key(BACKWARD, "autograd's thread")
    where = f"{format_gib(peak.allocated_bytes)} held at the peak, in {peak.phase} of step {peak.step}"
    return Bars(f"{where}, by the line that allocated it (rehearsed)", (BarGroup("", tuple(bars)),), scale=GIB,
                legend=legend, whole=peak.allocated_bytes)  # fmt: skip


def _held_table(held: Sequence[HeldLine]) -> Table:
    lines = [text.held_by(one) for one in held]
    columns = {
        "line": words(line for line, _ in lines),
        "function": words(one.line.function if one.line else "" for one in held),
        "code": words(one.line.text if one.line else "" for one in held),
        "called from": words(own for _, own in lines),
        "size": numbers((one.num_bytes for one in held), format_gib),
        "tensors": numbers(one.num_tensors for one in held),
    }
    return table("Held at the peak", columns)


def _step(found: Rehearsal) -> list[Block]:
    time = found.time
    if time is None:
        return [Text(f"Unknown: {found.why_no_time}.")]
    blocks = list[Block]()
    if (streams := drawn_streams(time.time, _PARTS, with_host=True)) is not None:
        heading = f"Step {time.step} of rank {found.report.rank}, stream by stream (predicted)"
        blocks += [
            step_parts(time_document(time)),
            stream_lanes(streams.whole, heading),
            stream_lanes(streams.middle_of_backward, "A part of backward, enlarged (predicted)"),
        ]
    parts = table("Work by name, one after another (predicted)", text.part_columns(time.parts, "work"))
    blocks.append(Details("All work of the step", (parts,)))
    unknown = {"work": words(time.unknown), "times": numbers(time.unknown.values())}
    return [*([table("Work whose time is unknown", unknown)] if time.unknown else []), *blocks]


def _reads(report: RehearsalReport) -> list[Block]:
    first, *others = text.read_lines(report)
    if not report.reads:
        return [Text(first)]
    lines = [one.user_line or one.line for one in report.reads]
    columns = {
        "operator": words(one.operator for one in report.reads),
        "line": words(text.place(line) if line else "autograd" for line in lines),
        "within": words(
            text.place(one.line) if one.line and one.line != line else ""
            for one, line in zip(report.reads, lines, strict=True)
        ),
        "times": numbers(one.count for one in report.reads),
        "sizes": words("may follow from it: not to be trusted" if one.decides_sizes else "" for one in report.reads),
    }
    return [Text(first), table("Reads", columns), *([Text(others[-1])] if report.num_known_reads else [])]


def _conditions(found: Rehearsal) -> Facts:
    report = found.report
    ran = "PyTorch's CUDA build on a stand-in for NVIDIA's libraries, whose kernels do nothing; no GPU was used"
    return Facts((
        ("ran", report.sentence),
        *text.condition_facts(found),
        ("CUDA", report.cuda),
        ("usable memory", f"{format_gib(found.usable_bytes)} on {found.gpu.name}"),
        ("source", f"rehearsed: {ran}"),
        *(("note", note) for note in report.notes),
        *(("note", f"{name} was called {times} times; the stand-in does not have it")
          for name, times in report.unsupported.items()),
    ))  # fmt: skip
