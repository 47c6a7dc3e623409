"""Setups as text: one as a line; several by what differs between them, in a table and in a sentence."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from fsdp_bench.catalog.lookup import place_names
from fsdp_bench.plan.question import Question
from fsdp_bench.report.text.common import fact
from fsdp_bench.spec.field import DEFAULT, Field
from fsdp_bench.spec.recording.model import code_of, lora_of
from fsdp_bench.spec.setup import FIELDS as SETUP
from fsdp_bench.spec.setup import TrainSetup
from fsdp_bench.spec.units import format_gib

HARDWARE = ("server", "gpu", "num_nodes", "gpus_per_node", "world_size")
PLACES = ("model", "code", "lora", *HARDWARE)
"""Fields in which setups may differ, beside those of a step: the model and the hardware."""
_COLUMNS = [one for one in SETUP.values() if one.has_column]
SIZES = tuple(one.name for one in _COLUMNS if one.is_size)
_USUAL = tuple(one.name for one in _COLUMNS if not one.seldom and not one.is_size)
SELDOM = tuple(one.name for one in _COLUMNS if one.seldom)
"""Fields that are printed only if they differ from TrainSetup's default."""
FIELDS = (*_USUAL, *SIZES, *SELDOM)
"""The fields of a step, without the strategy, in the order of a table's columns."""

_OTHER = Field(None, "")
NUMBERS = (
    *("num_nodes", "gpus_per_node", "world_size"),
    *(one.name for one in _COLUMNS if one.kind is int and not one.is_magnitude),
)
"""Fields whose column is aligned on the right."""
_PLAIN = ("model", "server", "gpu", *(one.name for one in _COLUMNS if one.is_plain))
"""Fields whose values say in a sentence what they are."""
_HEADERS = {"num_nodes": "nodes", "world_size": "GPUs", **{one.name: one.header for one in _COLUMNS}}


def setup_line(setup: TrainSetup) -> str:
    """Return a setup as one line: the main fields, then other fields that differ from their defaults."""
    name = setup.strategy.value
    if setup.effective_strategy is not setup.strategy:
        name += f" (runs as {setup.effective_strategy.value})"
    ranks = _ranks(setup)
    if 1 < setup.shard_group_size < setup.world_size:
        ranks += f" in shard groups of {setup.shard_group_size}"
    parts = [
        f"{name} under {setup.api.value}",
        ranks,
        str(setup.precision),
        f"batch {setup.micro_batch_size} x {setup.sequence_length} tokens",
        f"checkpointing {setup.checkpointing.value}",
        f"offload {setup.offload.value}",
        setup.optimizer.value,
    ]
    return ", ".join([*parts, *seldom(setup)])


def seldom(setup: TrainSetup, without: Collection[str] = ()) -> list[str]:
    """Return the fields in SELDOM that differ from their defaults."""
    return [f"{spaced(one.name)} {one.text(getattr(setup, one.name))}" for one in setup.changed(*without)]


def _ranks(setup: TrainSetup) -> str:
    return "1 rank" if setup.world_size == 1 else f"{setup.world_size} ranks"


def varying_fields(questions: Sequence[Question]) -> list[str]:
    """Return what setups differ in, without the strategy: model, hardware, fields of the step."""
    return varying([_values_of(one) for one in questions])


def varying(setups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return which of PLACES and FIELDS differ between setups, each given by its values; one may lack some of them."""
    found = [field for field in (*PLACES, *FIELDS) if len({one.get(field) for one in setups}) > 1]
    if "server" in found:  # each has its own
        found = [field for field in found if field not in ("gpu", "gpus_per_node")]
    if any(one.get("num_nodes") is not None for one in setups):
        found = [field for field in found if field != "world_size"]
    return found


def _values_of(question: Question) -> dict[str, Any]:
    values = dict(zip(HARDWARE, place_names(question.hardware), strict=False))
    values |= {field: getattr(question.setup, field) for field in ("world_size", *FIELDS)}
    if question.model is None:  # a dry run of a user's own module
        return values
    lora = lora_of(question.model)
    return {**values, "model": question.model.name, "code": code_of(question.model), "lora": lora and lora.text()}


def common_line(setup: TrainSetup, varying: Sequence[str], sought: str | None = None, strategy: bool = False) -> str:
    """Return the fields that the setups share.

    Args:
        setup: one of the setups.
        varying: what they differ in, without the strategy.
        sought: the field whose best value is searched for, if any.
        strategy: whether they share the strategy.
    """
    parts = [setup.strategy.value] if strategy else []
    if not set(varying) & set(HARDWARE):
        parts.append("as few ranks as fit" if sought == "world_size" else _ranks(setup))
    parts += [] if "api" in varying else [setup.api.value]
    batch = "as many as fit" if sought == "micro_batch_size" else setup.micro_batch_size
    tokens = "as many tokens as fit" if sought == "sequence_length" else f"{setup.sequence_length} tokens"
    sizes = [*([] if "micro_batch_size" in varying else [f"batch {batch}"])]
    sizes += [] if "sequence_length" in varying else [tokens]
    parts += [" x ".join(sizes)] if sizes else []
    for field in _USUAL:
        if field not in (*varying, "api"):
            value = str(getattr(setup, field))
            parts.append(value if field in _PLAIN else f"{field} {value}")
    return ", ".join([*parts, *seldom(setup, varying)])


def strategy_text(question: Question) -> str:
    """Return a setup's strategy, with the size of its shard groups and what runs instead, if that is another."""
    setup = question.setup
    shard = None if question.impossible else setup.shard_group_size
    return strategy_name(setup.strategy, setup.effective_strategy, shard, setup.world_size)


def strategy_name(strategy: Any, runs: Any, shard: Any, ranks: Any) -> str:
    """Return a strategy as a table names it, from what may be values of a JSON document.

    Args:
        strategy: the strategy that is asked for.
        runs: the strategy that runs; None: the same.
        shard: the size of its shard groups; None if there are none.
        ranks: the number of ranks.
    """
    name = str(strategy)
    if isinstance(shard, int) and isinstance(ranks, int) and 1 < shard < ranks:
        name += f" ({shard})"
    return name if runs in (None, strategy) else f"{name} (runs {runs})"


def labels(question: Question, varying: Sequence[str]) -> list[str]:
    """Return the cells that identify a setup in a table: its strategy and the varying fields."""
    values = _values_of(question)
    return [strategy_text(question), *(value_text(field, values[field]) for field in varying)]


def title(question: Question, varying: Sequence[str]) -> str:
    """Return the name of a setup in a sentence: its strategy and the varying fields."""
    return ", ".join([strategy_text(question), *names_of(question, varying)])


def names_of(question: Question, varying: Sequence[str]) -> list[str]:
    """Return the varying fields of a setup as in a sentence, without those that have no value of their own."""
    return named_values(_values_of(question), varying)


def named_values(values: Mapping[str, Any], fields: Iterable[str]) -> list[str]:
    """Return fields with their values as in a sentence, without those that have no value of their own."""
    texts = ((field, value_text(field, values.get(field))) for field in fields)
    return [named(field, text) for field, text in texts if text != DEFAULT]


def named(field: str, value: str) -> str:
    """Return a field with its value, as in a sentence."""
    if field in _PLAIN:
        return value
    if field in ("num_nodes", "world_size"):
        return f"{value} {header_of(field)}" if value != "1" else f"1 {header_of(field)[:-1]}"
    return f"{spaced(SETUP[field].word if field in SETUP else field)} {value}"


def value_text(field: str, value: Any) -> str:
    """Return the value of a field of the setup, as text."""
    return SETUP.get(field, _OTHER).text(value)


def value_of(setup: TrainSetup, field: str) -> str:
    """Return the value of a field of a setup, as text."""
    return value_text(field, getattr(setup, field))


def header_of(field: str) -> str:
    """Return the header of a field's column."""
    return _HEADERS.get(field, field.replace("_", "\n"))


def spaced(name: str) -> str:
    """Return a field's name with blanks for underscores."""
    return name.replace("_", " ")


def hardware_facts(questions: Sequence[Question], prefix: str = "") -> list[str]:
    """Return the hardware of the questions, and the source of each GPU's usable memory."""
    counts: dict[tuple[str | None, ...], list[Question]] = {}
    for question in questions:
        server, gpu, _, each = place_names(question.hardware)
        counts.setdefault((server, gpu, str(each)), []).append(question)
    return [line for alike in counts.values() for line in _hardware_facts(alike, prefix)]


def _hardware_facts(questions: Sequence[Question], prefix: str) -> list[str]:
    """Return the hardware of questions that differ in the number of nodes or GPUs alone."""
    hardware = questions[0].hardware
    if hardware is None:
        return [fact("hardware", "none named")]
    counts = sorted({q.hardware.count(q.setup.world_size) for q in questions if q.hardware})
    numbers = ", ".join(map(str, counts)) if len(counts) <= 6 else f"{counts[0]} to {counts[-1]}"
    name, gpu = f"{numbers} x {hardware.name_with_gpus}", hardware.gpu
    source = gpu.usable_memory_source
    if gpu.usable_memory_bytes is None or source is None:
        return [fact("hardware", f"{prefix}{name}; usable memory unknown")]
    return [
        fact("hardware", f"{prefix}{name}; {format_gib(gpu.usable_memory_bytes)} usable on each"),
        fact("", f"source: {source.title} ({source.date})"),
    ]
