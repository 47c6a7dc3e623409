"""The results of max-size as text: the answer first, then a row for each setting; pages have the same."""

from collections.abc import Iterable, Sequence
from importlib import resources

import msgspec

from fsdp_bench.plan.document import AnswerDocument
from fsdp_bench.plan.max_size import (
    HardwareResult,
    MaxSizeDocument,
    NothingFits,
    SettingDocument,
    lacks_host_memory,
    setting_rows,
)
from fsdp_bench.plan.remedies import smaller_bases
from fsdp_bench.plan.search.search import SearchResult
from fsdp_bench.plan.setup_text import PLACES, title, varying
from fsdp_bench.plan.table import Row, TableOptions
from fsdp_bench.report.table import table_lines
from fsdp_bench.report.text.common import UNKNOWN, assumed_lines, fact
from fsdp_bench.report.text.conditions import Fact, conditions, hardware_text, note_facts
from fsdp_bench.report.text.prediction import remedy_line
from fsdp_bench.report.text.prediction_table import answer_column, label_columns
from fsdp_bench.report.text.speed import rests_on
from fsdp_bench.spec.model import ModelShape
from fsdp_bench.spec.setup import Loss, Offload
from fsdp_bench.spec.units import format_count, format_gib


class QuantityText(msgspec.Struct, frozen=True):
    """The names of one quantity."""

    title: str
    """The title of a chart, and the beginning of an answer."""
    axes: tuple[tuple[float, str], ...]
    """Axis scales of the chart: divisor and label, largest first."""
    unit: str
    smallest: str
    """The smallest value as a phrase, with placeholders ``{model}`` and ``{value}``."""


_FILE = resources.files(__package__).joinpath("quantities.toml")
QUANTITY_TEXTS = msgspec.toml.decode(_FILE.read_bytes(), type=dict[str, QuantityText])
"""Texts by the name of the quantity, which is a field of ModelShape or TrainSetup."""


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


def place_of(one: MaxSizeDocument, is_short: bool = False) -> str:
    """Return the hardware of an answer; only its name if the number of GPUs is searched, and in short of one server."""
    if one.dial == "world_size" or (is_short and one.server.num_nodes == 1):
        return one.server.name or one.server.gpu or UNKNOWN
    return hardware_text(one.server, one.cells[0].setup.get("world_size") if one.cells else None)


def answer(one: MaxSizeDocument) -> str:
    """Return the largest value, or the fewest GPUs: those of a plan, where it needs fewer than any setting here."""
    choose, found = (
        min if one.dial == "world_size" else max,
        [cell for cell in one.cells if cell.fits_value is not None],
    )
    best = choose(found, key=lambda cell: cell.fits_value or 0, default=None)
    what = QUANTITY_TEXTS[one.dial].title
    what = f"{place_of(one, is_short=True)}: {what[0].lower()}{what[1:]}"
    if fewest := one.on_fewest:
        fields = [name for name in _OF_PLAN if fewest.setup.get(name) not in (Loss.PLAIN, Offload.NONE)]
        setting = title(fewest.setup, fields) + ", expandable segments" * bool(fewest.expandable_segments)
        here = "none" if best is None else best.fits_value
        gpus = f"{fewest.setup.get('world_size')}, {setting}{_offloaded_speed(fewest)}"
        return f"{what} ({one.source}): {gpus}; in the settings below {here}"
    if best is None:
        is_open = any(cell.unknown for cell in one.cells)
        return f"{place_of(one, is_short=True)}: {f'{UNKNOWN} what' if is_open else 'nothing'} fits ({one.source})"
    if best.memory is not None and best.fits is None and best.memory.peak_host_bytes_per_node:
        node = format_gib(best.memory.peak_host_bytes_per_node)
        what += f" if a node has {node} of host memory, which is not known"
    value = best.model if one.dial == "num_parameters" and best.model else value_text(one.dial, best.fits_value or 0)
    return f"{what} ({one.source}): {value}, {title(best.setup, differing(one))}{_offloaded_speed(best)}"


_OF_PLAN = ("api", "checkpointing", "loss", "offload")
"""Fields that a plan searches, of which a setting is named by those that are not the default."""


def _offloaded_speed(found: SettingDocument | AnswerDocument) -> str:
    """Return the speed of a setting that offloads: what fits there may be too slow to be of use."""
    if found.setup.get("offload") in (None, Offload.NONE):
        return ""
    tokens = found.time and found.time.tokens_per_second_per_gpu
    return f", {tokens:,.0f} tokens/s per GPU" if tokens else f", tokens/s {UNKNOWN}"


def differing(one: MaxSizeDocument) -> list[str]:
    """Return what the settings differ in, without the model and the hardware that are searched."""
    found = varying([cell.setup for cell in one.cells])
    return [field for field in found if field not in (*PLACES, one.dial)] or ["strategy"]


def setting_facts(one: MaxSizeDocument, answers: Sequence[AnswerDocument], models: Iterable[str]) -> list[Fact]:
    """Return the conditions of all settings.

    ``answers`` has one for each setting, for its largest candidate or for the one that does not fit.
    """
    fits = "no allocation retries" + ("" if not _on_host(one) else f"; {host_text(one)}")
    facts = [*conditions(answers, differing(one), one.dial, models), ("fits", fits)]
    if one.load not in (None, "meta"):
        facts.append(("load", f"the model is built in host memory first, by {str(one.load).replace('-', ' ')}"))
    return facts


def _on_host(one: MaxSizeDocument) -> bool:
    setups = (cell.setup for cell in one.cells if not cell.impossible)
    return any(setup.get("offload") not in (None, Offload.NONE) or setup.get("activation_offload") for setup in setups)


def host_text(one: MaxSizeDocument) -> str:
    """Return the host memory available for offloaded state, or that it is not known."""
    has = one.server.host_memory_bytes
    if has is None:
        return "host memory is not known, so offloaded states are assumed to fit"
    return f"offloaded states within the {format_gib(has)} of a node"


_DROPPED = (
    *("exposed_fraction", "mfu", "step_seconds", "runs_value", "hidden_size", "num_hidden_layers"),
    *("peak_host_bytes_per_node", "tokens_per_second_per_gpu", "needed_bytes", "next_needed_bytes"),
)
"""Columns to leave out if the terminal is too narrow, in this order."""


def usual_columns(one: MaxSizeDocument) -> list[str]:
    """Return the columns of the answer."""
    of_model = ("num_hidden_layers", "hidden_size") if one.dial == "num_parameters" else ()
    host = ("peak_host_bytes_per_node",) if _on_host(one) else ()
    is_timed = any(cell.time is not None for cell in one.cells)
    time = ("step_seconds", "exposed_fraction", "tokens_per_second_per_gpu", "mfu") if is_timed else ()
    next_one = ("limited_by", *(["next_needed_bytes"] if any(cell.next for cell in one.cells) else []))
    return ["fits_value", "runs_value", *of_model, "needed_bytes", *host, *time, *next_one]


def report(results: Sequence[HardwareResult], failure: NothingFits | None, options: TableOptions | None = None) -> str:
    """Return one table per server or GPU; the first line is the answer."""
    options = options or TableOptions()
    several = len(results) > 1 or any(len(one.answered) > 1 for one in results)
    lines = nothing_fits_lines(failure, several) if failure else []
    for one in results:
        assumed = assumed_lines(each for cell in one.cells for each in cell.shown.assumptions)
        said = [] if failure and len(results) == 1 else [answer(one.document), *assumed, ""]
        lines += [*([""] if lines else []), *said, *_table(one, options)]
    return "\n".join(lines)


def live_facts(result: HardwareResult) -> list[Fact]:
    """Return the conditions of all settings, with the model that is searched."""
    tried = [cell.at or cell.beyond for cell in result.cells]
    answers = [
        cell.question.document() if found is None else found.document(with_time=False, with_communication=False)
        for cell, found in zip(result.cells, tried, strict=True)
    ]
    return setting_facts(result.document, answers, [model_line(result.cells[0])])


def _table(result: HardwareResult, options: TableOptions) -> list[str]:
    first, one = result.cells[0], result.document
    lines = [fact(*each) for each in live_facts(result)]
    timed = next((cell.at for cell in result.answered if cell.at is not None), None)
    if result.with_time and timed is not None:
        lines.append(fact("rates", f"{rests_on(timed.speed, first.check.profile)}; time of what fits, in eager"))
    if result.answered:
        lines += ["", *_rows(result, one, options)]
    notes = note_facts(result.answers)
    lines += ["", *(fact(*note) for note in notes)] if notes else []
    return [*lines, *_unanswered(result)]


def settings_rows(result: HardwareResult, options: TableOptions) -> list[tuple[SearchResult, Row]]:
    """Return the settings with an answer, each with its row: those under which something fits first, or as sorted."""
    rows = zip(result.cells, setting_rows(result.document, result.answers), strict=True)
    answered = (one for one in rows if one[0].is_answered)
    return options.arranged(sorted(answered, key=lambda one: one[0].fits_value is None))


def all_rows(results: Sequence[HardwareResult], options: TableOptions) -> list[Row]:
    """Return a row for every setting on every kind of hardware, with or without an answer."""
    rows = [row for one in results for _, row in settings_rows(one, options)]
    others = [row for one in results for row in setting_rows(one.document, one.answers) if row["fits"] is None]
    return [*rows, *([] if options.only_fits else [row for row in others if row["impossible"] or row["unknown"]])]


def _rows(result: HardwareResult, one: MaxSizeDocument, options: TableOptions) -> list[str]:
    rows = settings_rows(result, options)
    if not rows:
        return ["nothing fits under any setting"]
    shown = [row for _, row in rows]
    if options.columns:
        return table_lines([answer_column(name, shown) for name in options.columns])
    columns = [answer_column(name, shown, _DROPPED) for name in usual_columns(one)]
    return table_lines([*label_columns([cell.shown for cell, _ in rows], differing(one), 40), *columns])


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


def nothing_fits_lines(found: NothingFits, several: bool) -> list[str]:
    """Return the answer as one line, then one line for each change that would help or would not."""
    question = found.prediction.question
    nearest = f"{question.hardware.name if question.hardware else ''}, {title(question.values, ['checkpointing'])}"
    lines = [nothing_fits_sentence(found) + (f" (nearest: {nearest})" if several else "")]
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
    text, model = QUANTITY_TEXTS[found.cell.quantity.name], prediction.model.name
    smallest = text.smallest.format(model=model, value=f"{found.cell.quantity.values[0]:,}")
    if lacks_host_memory(found.cell):
        need, has = format_gib(prediction.host.peak_bytes), format_gib(prediction.host_memory_bytes or 0)
        return f"nothing fits: {smallest} needs {need} of {has} of host memory on a node (predicted)"
    need, has = format_gib(prediction.needed_bytes), format_gib(prediction.gpu_bytes or 0)
    phase = prediction.memory.peak_phase
    mostly = prediction.largest_category.replace("_", " ")
    return f"nothing fits: {smallest} needs {need} of {has} in phase {phase}, mostly {mostly} (predicted)"
