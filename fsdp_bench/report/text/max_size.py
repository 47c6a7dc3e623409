"""The largest that fits, as text: the answer first, then one row a setting."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_bench.plan.advice.nothing_fits import NothingFits
from fsdp_bench.plan.max_size import HardwareResult, SettingResult, limit_text
from fsdp_bench.plan.question import Prediction
from fsdp_bench.replay.host_memory import Build
from fsdp_bench.report.table import table_columns, table_lines
from fsdp_bench.report.text.common import fact
from fsdp_bench.report.text.nothing_fits import nothing_fits_lines
from fsdp_bench.report.text.prediction import (
    common_line,
    hardware_facts,
    header_of,
    labels,
    modelled,
    title,
    varying_fields,
)
from fsdp_bench.report.text.quantity_text import model_line, quantity_text, value_text
from fsdp_bench.report.text.speed import SPEED_COLUMNS, rests_on, speed_cells
from fsdp_bench.report.text.verdict import required_lines
from fsdp_bench.spec.hardware import Cluster
from fsdp_bench.spec.model import Family
from fsdp_bench.spec.setup import Offload
from fsdp_bench.spec.units import GIB, format_gib

NONE = "none"
COLUMN = "fits,\npredicted"
SPEEDS = tuple(header.replace("tokens/s ", "tokens/s\n") for header in SPEED_COLUMNS)
DROPPABLE = (
    "exposed",
    "MFU",
    "step",
    "without\nOOM",
    "layers x\nhidden",
    "host\nmemory",
    "tokens/s\nper GPU",
    "reserved",
)
"""Headers of the columns that a narrow terminal leaves out, in this order."""


def report(sizes: Sequence[HardwareResult], failure: NothingFits | None) -> str:
    """Return the table of every server or GPU; the first line is the answer."""
    several = len(sizes) > 1 or any(len(one.answered) > 1 for one in sizes)
    lines = nothing_fits_lines(failure, several) if failure else []
    for one in sizes:
        answer = [] if failure and len(sizes) == 1 else [_answer(one), ""]
        lines += [*([""] if lines else []), *answer, *_table(one)]
    return "\n".join(lines)


def _answer(sizes: HardwareResult) -> str:
    """Return the answer for one server or GPU, on one line."""
    if not sizes.answered:
        return f"{sizes.title}: unknown what fits (predicted)"
    if sizes.nothing_fits:
        return f"{sizes.title}: nothing fits (predicted)"
    return best_line(sizes, varying_fields([cell.question for cell in sizes.cells]))


def _table(sizes: HardwareResult) -> list[str]:
    first = sizes.cells[0]
    varying = varying_fields([cell.question for cell in sizes.cells])
    lines = [
        fact("model", model_line(first)),
        fact("setup", common_line(first.setup, varying, first.quantity.name)),
        *hardware_facts(first.question, "up to " if first.quantity.name == "world_size" else ""),
        fact("modelled", modelled(first.question)),
        fact("fits", meaning(sizes)),
        *(fact("load", line) for line in load_lines(first)),
    ]
    timed = next((cell.at for cell in sizes.answered if cell.at is not None), None)
    if sizes.with_time and timed is not None:
        lines.append(fact("rates", f"{rests_on(timed.speed, first.assumptions.profile)}; time of what fits, in eager"))
    has_host = any(cell.setup.offload is Offload.PARAMS for cell in sizes.answered)
    if sizes.answered:
        header, numbers = _header(sizes, varying, has_host)
        fitting_first = sorted(sizes.answered, key=lambda cell: cell.fits is None)
        rows = [_row(cell, varying, has_host, sizes.with_time) for cell in fitting_first]
        lines += ["", *table_lines(table_columns(header, rows, numbers, DROPPABLE))]
    notes = dict.fromkeys(note for cell in sizes.answered if cell.at for note in cell.at.notes)
    lines += ["", *(fact("note", note) for note in notes)] if notes else []
    return [*lines, *_unanswered(sizes)]


def _unanswered(sizes: HardwareResult) -> list[str]:
    """Return a line for each reason why settings have no answer."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for cell in sizes.cells:
        if cell.impossible:
            reasons.setdefault(("impossible", cell.impossible), []).append(cell.setup.strategy.value)
        elif cell.unknown:
            reasons.setdefault(("unknown", cell.unknown), []).append(str(cell.setup.precision))
    lines = []
    for (kind, reason), names in reasons.items():
        count = "1 setting" if len(names) == 1 else f"{len(names)} settings"
        lines.append(fact(kind, f"{count} with {' or '.join(dict.fromkeys(names))}: {reason}"))
    return ["", *lines] if lines else []


def best_line(sizes: HardwareResult, varying: Sequence[str]) -> str:
    """Return the largest of all settings on one server or GPU, or the fewest GPUs."""
    fitting = [cell for cell in sizes.answered if cell.fits is not None]
    choose = min if fitting[0].quantity.name == "world_size" else max
    best = choose(fitting, key=lambda cell: cell.fits or 0)
    text, name = quantity_text(best), best.quantity.name
    found = value_text(name, best.fits or 0)
    if name == "num_parameters":
        found = best.at.question.model.name if best.at else found
    what = text.title[0].lower() + text.title[1:]
    if best.at is not None and best.at.fits is None:
        node = format_gib(best.at.estimate.host.peak_bytes)
        what += f" if a node has {node} of host memory, which is not known"
    return f"{sizes.title}: {what} (predicted): {found}, {title(best.shown, varying)}"


def meaning(sizes: HardwareResult) -> str:
    """Return what "fits" means here, with everything that it leaves out."""
    parts = ["no allocation retries", *([kept_free(sizes)] if sizes.answered else [])]
    if any(cell.setup.offload is Offload.PARAMS for cell in sizes.answered):
        parts.append(host_line(sizes))
    return "; ".join(parts)


def kept_free(sizes: HardwareResult) -> str:
    """Return how much of each GPU is kept free for the CUDA context and NCCL."""
    answers = [answer for cell in sizes.answered if (answer := cell.at or cell.beyond) is not None]
    return "; ".join(required_lines(one.estimate for one in answers))


def load_lines(cell: SettingResult) -> list[str]:
    """Return who builds the model in host memory, where anyone does."""
    build = cell.assumptions.build
    return (
        [] if build is Build.META else [f"the model is built in host memory first, by {build.value.replace('-', ' ')}"]
    )


def host_line(sizes: HardwareResult) -> str:
    """Return how much host memory offloaded states have."""
    has = sizes.hardware.server.host_memory_bytes if isinstance(sizes.hardware, Cluster) else None
    if has is None:
        return "host memory is not known, so offloaded states are assumed to fit"
    return f"offloaded states within the {format_gib(has)} of a node"


def _header(sizes: HardwareResult, varying: Sequence[str], has_host: bool) -> tuple[list[str], set[str]]:
    """Return the column names, and those of numbers."""
    name = sizes.cells[0].quantity.name
    header = ["strategy", *map(header_of, varying), COLUMN, "without\nOOM"]
    header += ["layers x\nhidden"] if name == "num_parameters" else []
    header += ["reserved", *(["host\nmemory"] if has_host else []), *(SPEEDS if sizes.with_time else ())]
    numbers = {COLUMN, "without\nOOM", "reserved", "host\nmemory", "layers x\nhidden", *SPEEDS}
    return [*header, "limited by"], numbers


def _row(cell: SettingResult, varying: Sequence[str], has_host: bool, with_time: bool) -> list[str]:
    name, at = cell.quantity.name, cell.at
    row = [*labels(cell.shown, varying)]
    row.append(NONE if cell.fits is None else value_text(name, cell.fits))
    row.append(NONE if cell.runs is None else value_text(name, cell.runs))
    if name == "num_parameters":
        row.append(f"{at.question.model.num_hidden_layers} x {at.question.model.hidden_size}" if at else "")
    row.append(_reserved_percent(at) if at else "")
    if has_host:
        row.append(format_gib(at.estimate.host.peak_bytes) if at and at.estimate.host.peak_bytes else "")
    if with_time:
        row += speed_cells(at.speed) if at else [""] * len(SPEED_COLUMNS)
    return [*row, why(cell)]


def _reserved_percent(at: Prediction) -> str:
    """Return the peak reserved and what the GPU has."""
    return f"{format_gib(at.reserved_bytes or 0)} of {(at.estimate.gpu_bytes or 0) / GIB:.1f}"


def why(cell: SettingResult) -> str:
    """Return what the next step is short of; for a setting under which nothing fits, with its numbers."""
    if cell.limit is None:
        shape, name = cell.quantity[0].model, cell.quantity.name
        if name == "sequence_length" and shape.family is Family.GPT2:
            return f"its {shape.max_position_embeddings:,} learned positions"
        return "nothing: no larger one was tried"
    beyond = cell.beyond
    if cell.fits is not None or beyond is None:
        return limit_text(cell.limit).removesuffix(" on the GPU")
    smallest = quantity_text(cell).smallest.format(
        model=beyond.question.model.name, value=f"{cell.quantity.values[0]:,}"
    )
    if cell.limit.place == "host":
        return f"{smallest} needs {format_gib(beyond.estimate.host.peak_bytes)} of host memory"
    need = format_gib(beyond.needed_bytes)
    mostly = beyond.largest_category.replace("_", " ")
    return f"{smallest} needs {need} in {beyond.estimate.memory.peak_phase}, mostly {mostly}"
