"""The results of max-size as text: the answer first, then one row per setting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_bench.plan.max_size import HardwareResult, NothingFits, lacks_host_memory, limit_text, setting_row
from fsdp_bench.plan.prediction import Prediction
from fsdp_bench.plan.remedies import smaller_bases
from fsdp_bench.plan.search.search import SearchResult
from fsdp_bench.plan.setup_text import PLACES, setup_line, title, varying
from fsdp_bench.plan.table import Row, TableOptions
from fsdp_bench.replay.host_memory import Build
from fsdp_bench.report.table import table_columns, table_lines
from fsdp_bench.report.text.common import assumed_lines, fact, hardware_facts
from fsdp_bench.report.text.prediction import modelled, remedy_line, required_lines
from fsdp_bench.report.text.prediction_table import answer_column, label_columns
from fsdp_bench.report.text.speed import SPEED_COLUMNS, rests_on, speed_cells, throughput_text
from fsdp_bench.spec.model import ModelShape
from fsdp_bench.spec.setup import Loss, Offload
from fsdp_bench.spec.units import GIB, format_count, format_gib


@dataclass(frozen=True)
class QuantityText:
    """The names of one quantity."""

    option: str
    """The value of ``--of`` on the command line."""
    title: str
    """The title of a chart, and the beginning of an answer."""
    axes: tuple[tuple[float, str], ...]
    """Axis scales of the chart: divisor and label, largest first."""
    unit: str
    """The unit of a value."""
    smallest: str
    """The smallest value as a phrase, with placeholders ``{model}`` and ``{value}``."""


QUANTITY_TEXTS = {
    "num_parameters": QuantityText(
        "params",
        "Largest model that fits",
        ((1e9, "largest model that fits, billion parameters"), (1e6, "largest model that fits, million parameters")),
        "parameters",
        "the smallest model, {model},",
    ),
    "num_hidden_layers": QuantityText(
        "num_hidden_layers",
        "Deepest model that fits",
        ((1.0, "most layers that fit"),),
        "layers",
        "one layer of {model}",
    ),
    "micro_batch_size": QuantityText(
        "micro_batch_size",
        "Largest batch per GPU that fits",
        ((1.0, "largest batch per GPU that fits, sequences"),),
        "sequences per GPU",
        "a batch of 1 of {model}",
    ),
    "sequence_length": QuantityText(
        "sequence_length",
        "Longest sequence that fits",
        ((1.0, "longest sequence that fits, tokens"),),
        "tokens",
        "a sequence of {value} tokens of {model}",
    ),
    "world_size": QuantityText(
        "gpus",
        "Fewest GPUs on which it fits",
        ((1.0, "fewest GPUs on which it fits"),),
        "GPUs",
        "{model} on {value} GPUs",
    ),
}
"""Texts by the name of the quantity, which is a field of ModelShape or TrainSetup."""


def quantity_text(cell: SearchResult) -> QuantityText:
    """Return the names of a setting's quantity."""
    return QUANTITY_TEXTS[cell.quantity.name]


def value_text(name: str, value: int) -> str:
    """Return a value as text: ``6.74B`` parameters, ``32`` layers, ``8,192`` tokens."""
    return format_count(value) if name == "num_parameters" else f"{value:,}"


def model_line(cell: SearchResult) -> str:
    """Return the model, or the range of models that are tried."""
    first, count = cell.quantity[0].model, len(cell.quantity)
    if cell.quantity.name == "num_parameters":
        last = cell.quantity[count - 1].model
        sizes = f"{format_count(first.num_parameters)} to {format_count(last.num_parameters)}"
        vocabulary = f", vocabulary {first.vocab_size}" if isinstance(first, ModelShape) else ""
        return f"ladder of {first.kind} models, {sizes} in {count} steps{vocabulary}"
    if cell.quantity.name == "num_hidden_layers":
        widths = f", {first.hidden_size} wide" if first.hidden_size else ""
        if isinstance(first, ModelShape):
            heads = f"{first.num_attention_heads} heads / {first.num_key_value_heads} kv"
            widths += f", {heads}, vocabulary {first.vocab_size}"
        return f"{first.name} with other depths: {first.kind}{widths}"
    return f"{first.name}: {first.describe()}"


NONE = "none"
COLUMN, WHY = "fits,\npredicted", "limited by"
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
"""Headers of columns to leave out if the terminal is too narrow, in this order."""


def report(results: Sequence[HardwareResult], failure: NothingFits | None, options: TableOptions | None = None) -> str:
    """Return one table per server or GPU; the first line is the answer."""
    options = options or TableOptions()
    several = len(results) > 1 or any(len(one.answered) > 1 for one in results)
    lines = nothing_fits_lines(failure, several) if failure else []
    for one in results:
        assumed = assumed_lines(each for cell in one.cells for each in cell.shown.assumptions)
        answer = [] if failure and len(results) == 1 else [_answer(one), *assumed, ""]
        lines += [*([""] if lines else []), *answer, *_table(one, options)]
    return "\n".join(lines)


def _answer(result: HardwareResult) -> str:
    if (found := result.on_fewest) is not None:
        return _fewest_line(result, found)
    if not result.answered:
        return f"{result.title}: unknown what fits (predicted)"
    return f"{result.title}: nothing fits (predicted)" if result.nothing_fits else _best_line(result)


def _fewest_line(result: HardwareResult, found: Prediction) -> str:
    setup = found.setup
    listed = [cell.fits_value for cell in result.answered if cell.fits_value is not None]
    here = f"{min(listed)}" if listed else "none"
    parts = [setup.strategy.value, setup.api.value, f"checkpointing {setup.checkpointing.value}"]
    parts += [f"loss {setup.loss.value}"] if setup.loss is not Loss.PLAIN else []
    parts += [f"offload {setup.offload.value}"] if setup.offload is not Offload.NONE else []
    parts += ["expandable segments"] if found.question.expandable_segments else []
    return (
        f"{result.title}: fewest GPUs on which it fits (predicted): {setup.world_size}, {', '.join(parts)}"
        f"{_offloaded_speed(found)}; in the settings below {here}"
    )


def _offloaded_speed(found: Prediction) -> str:
    """Return the speed of a setting that offloads: what fits there may be too slow to be of use."""
    setup = found.setup
    if setup.offload is Offload.NONE:
        return ""
    return f", {throughput_text(found.speed) if found.speed.time.step_seconds else 'tokens/s unknown'}"


def _varying(result: HardwareResult) -> list[str]:
    """Return what the settings differ in. The first candidates' model or GPUs are no setting."""
    found = [field for field in varying([cell.question.values for cell in result.cells]) if field not in PLACES]
    return found or ["strategy"]


def _table(result: HardwareResult, options: TableOptions) -> list[str]:
    first, differing = result.cells[0], _varying(result)
    lines = [
        fact("model", model_line(first)),
        fact("setup", setup_line(first.question.values, differing, first.quantity.name)),
        *hardware_facts([first.question], "up to " if first.quantity.name == "world_size" else ""),
        fact("modelled", modelled(first.question)),
        fact("fits", meaning(result)),
        *(fact("load", line) for line in load_lines(first)),
    ]
    timed = next((cell.at for cell in result.answered if cell.at is not None), None)
    if result.with_time and timed is not None:
        lines.append(fact("rates", f"{rests_on(timed.speed, first.check.profile)}; time of what fits, in eager"))
    if result.answered:
        lines += ["", *_rows(result, differing, options)]
    notes = dict.fromkeys(note for cell in result.answered if cell.at for note in cell.at.notes)
    lines += ["", *(fact("note", note) for note in notes)] if notes else []
    return [*lines, *_unanswered(result)]


def settings_rows(result: HardwareResult, options: TableOptions) -> list[tuple[SearchResult, Row]]:
    """Return the settings with an answer, each with its row: those under which something fits first, or as sorted."""
    fitting_first = sorted(result.answered, key=lambda cell: cell.fits_value is None)
    return options.arranged((cell, setting_row(cell, result.with_time)) for cell in fitting_first)


def all_rows(results: Sequence[HardwareResult], options: TableOptions) -> list[Row]:
    """Return a row for every setting on every kind of hardware, with or without an answer."""
    rows = [row for one in results for _, row in settings_rows(one, options)]
    others = [cell for one in results for cell in one.cells if not cell.is_answered]
    return [*rows, *([] if options.only_fits else [setting_row(cell, with_time=False) for cell in others])]


def _rows(result: HardwareResult, differing: Sequence[str], options: TableOptions) -> list[str]:
    rows = settings_rows(result, options)
    if not rows:
        return ["nothing fits under any setting"]
    cells = [cell for cell, _ in rows]
    if options.columns:
        return table_lines([answer_column(name, [row for _, row in rows]) for name in options.columns])
    has_host = any(cell.setup.uses_host_memory for cell in result.answered)
    answer = [_row(cell, has_host, result.with_time) for cell in cells]
    columns = table_columns(list(answer[0]), [list(row.values()) for row in answer], {*answer[0]} - {WHY}, DROPPABLE)
    return table_lines([*label_columns([cell.shown for cell in cells], differing, 40), *columns])


def _unanswered(result: HardwareResult) -> list[str]:
    reasons: dict[tuple[str, str], list[str]] = {}
    for cell in result.cells:
        if cell.impossible:
            reasons.setdefault(("impossible", cell.impossible), []).append(cell.setup.strategy.value)
        elif cell.unknown:
            reasons.setdefault(("unknown", cell.unknown), []).append(str(cell.setup.precision))
    lines = []
    for (kind, reason), names in reasons.items():
        count = "1 setting" if len(names) == 1 else f"{len(names)} settings"
        lines.append(fact(kind, f"{count} with {' or '.join(dict.fromkeys(names))}: {reason}"))
    return ["", *lines] if lines else []


def _best_line(result: HardwareResult) -> str:
    fitting = [cell for cell in result.answered if cell.fits_value is not None]
    choose = min if fitting[0].quantity.name == "world_size" else max
    best = choose(fitting, key=lambda cell: cell.fits_value or 0)
    text, name = quantity_text(best), best.quantity.name
    found = value_text(name, best.fits_value or 0)
    if name == "num_parameters":
        found = best.at.model.name if best.at else found
    what = text.title[0].lower() + text.title[1:]
    if best.at is not None and best.at.fits is None:
        node = format_gib(best.at.host.peak_bytes)
        what += f" if a node has {node} of host memory, which is not known"
    speed = _offloaded_speed(best.at) if best.at is not None else ""
    return f"{result.title}: {what} (predicted): {found}, {title(best.shown.values, _varying(result))}{speed}"


def meaning(result: HardwareResult) -> str:
    """Return the conditions of "fits": allocation retries, headroom and host memory."""
    parts = ["no allocation retries", *([kept_free(result)] if result.answered else [])]
    if any(cell.setup.uses_host_memory for cell in result.answered):
        parts.append(host_line(result))
    return "; ".join(parts)


def kept_free(result: HardwareResult) -> str:
    """Return the headroom on each GPU for the CUDA context and NCCL, with its source."""
    return "; ".join(required_lines(answer for cell in result.answered if (answer := cell.at or cell.beyond)))


def load_lines(cell: SearchResult) -> list[str]:
    """Return a line about the ranks that build the model in host memory; no line if none does."""
    build = cell.check.build
    return (
        [] if build is Build.META else [f"the model is built in host memory first, by {build.value.replace('-', ' ')}"]
    )


def host_line(result: HardwareResult) -> str:
    """Return the host memory available for offloaded state, or that it is not known."""
    has = result.hardware.server.host_memory_bytes
    if has is None:
        return "host memory is not known, so offloaded states are assumed to fit"
    return f"offloaded states within the {format_gib(has)} of a node"


def _row(cell: SearchResult, has_host: bool, with_time: bool) -> dict[str, str]:
    """Return the cells of the answer by the headers of their columns, of which all but the last are of numbers."""
    name, at = cell.quantity.name, cell.at
    texts = [NONE if value is None else value_text(name, value) for value in (cell.fits_value, cell.runs_value)]
    row = dict(zip((COLUMN, "without\nOOM"), texts, strict=True))
    if name == "num_parameters":
        row["layers x\nhidden"] = f"{at.model.num_hidden_layers} x {at.model.hidden_size}" if at else ""
    row["reserved"] = f"{format_gib(at.reserved_bytes or 0)} of {(at.gpu_bytes or 0) / GIB:.1f}" if at else ""
    if has_host:
        row["host\nmemory"] = format_gib(at.host.peak_bytes) if at and at.host.peak_bytes else ""
    if with_time:
        row |= zip(SPEED_COLUMNS, speed_cells(at.speed) if at else [""] * len(SPEED_COLUMNS), strict=True)
    return {**row, WHY: why(cell)}


def why(cell: SearchResult) -> str:
    """Return what the next larger value lacks; if nothing fits, return what the smallest value needs."""
    if cell.limited_by is None:
        shape, name = cell.quantity[0].model, cell.quantity.name
        if name == "sequence_length" and shape.learned_positions is not None:
            return f"its {shape.learned_positions:,} learned positions"
        return "nothing: no larger one was tried"
    beyond = cell.beyond
    if cell.fits_value is not None or beyond is None:
        return limit_text(cell.limited_by).removesuffix(" on the GPU")
    smallest = quantity_text(cell).smallest.format(model=beyond.model.name, value=f"{cell.quantity.values[0]:,}")
    if cell.limited_by.place == "host":
        return f"{smallest} needs {format_gib(beyond.host.peak_bytes)} of host memory"
    need = format_gib(beyond.needed_bytes)
    mostly = beyond.largest_category.replace("_", " ")
    return f"{smallest} needs {need} in {beyond.memory.peak_phase}, mostly {mostly}"


def nothing_fits_lines(found: NothingFits, several: bool) -> list[str]:
    """Return the answer as one line, then one line for each change that would help or would not."""
    lines = [nothing_fits_sentence(found) + (f" ({_where(found)})" if several else "")]
    lines += assumed_lines(found.cell.shown.assumptions)
    if found.cell.runs_value is not None:
        runs = value_text(found.cell.quantity.name, found.cell.runs_value)
        what = found.cell.quantity.name.replace("_", " ")
        lines.append(f"  with allocation retries, slower if they go on, {what} {runs} would run (predicted)")
    lines += [f"  {remedy_line(remedy)}" for remedy in found.remedies]
    lines += [f"  {words}" for words in smaller_bases(found.prediction)]
    if found.twice_the_gpus is not None and not found.gpus_help:
        need = format_gib(found.twice_the_gpus.prediction.needed_bytes)
        lines.append(
            f"  more GPUs do not help: {found.twice_the_gpus.switch} still needs {need} (predicted);"
            " activations and logits are not sharded"
        )
    elif not found.remedies:
        tried = "--api, --optimizer, --loss, --strategy, --checkpointing, --batch, --offload, more GPUs"
        lines.append(f"  nothing that was tried helps: {tried}")
    return lines


def nothing_fits_sentence(found: NothingFits) -> str:
    """Return the memory that the smallest candidate needs, the memory available, the phase and the largest category."""
    prediction = found.prediction
    text, model = quantity_text(found.cell), prediction.model.name
    smallest = text.smallest.format(model=model, value=f"{found.cell.quantity.values[0]:,}")
    if lacks_host_memory(found.cell):
        need, has = format_gib(prediction.host.peak_bytes), format_gib(prediction.host_memory_bytes or 0)
        return f"nothing fits: {smallest} needs {need} of {has} of host memory on a node (predicted)"
    need, has = format_gib(prediction.needed_bytes), format_gib(prediction.gpu_bytes or 0)
    phase = prediction.memory.peak_phase
    mostly = prediction.largest_category.replace("_", " ")
    return f"nothing fits: {smallest} needs {need} of {has} in phase {phase}, mostly {mostly} (predicted)"


def _where(found: NothingFits) -> str:
    question = found.prediction.question
    return (
        f"nearest: {question.hardware.name if question.hardware else ''}, {title(question.values, ['checkpointing'])}"
    )
