"""Which trials share a picture, in which order, how each is labelled, and the conditions that the picture prints.

What varies inside a picture is a level of labels under its bars; what does not is in its conditions. Kinds of device,
devices, versions of torch and run plans are never mixed. What is too much for one picture becomes several.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from typing import Generic, TypeVar

from fsdp_bench.report.charts.bars import device_name, ended
from fsdp_bench.spec.model import ModelShape
from fsdp_bench.spec.rank_report import Outcome
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.spec.setup import Precision, ShardingStrategy, TrainSetup
from fsdp_bench.spec.text import in_file_name
from fsdp_bench.spec.units import format_count, format_gib

T = TypeVar("T")

MAX_BARS = 24
"""Bars that a slide shows legibly."""

MAX_MODELS = 3
"""Models that share a picture when their bars are few."""

ORDER = (
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.HYBRID_SHARD,
    ShardingStrategy.HYBRID_SHARD_ZERO2,
    ShardingStrategy.NO_SHARD,
)

Facts = dict[str, Hashable]
"""What a trial trained, by the setup's field names, and its model. No strategy: that is the group."""

_SPLIT_FIRST = ("model", "world_size")
_SPLIT_NEXT = ("micro_batch_size", "sequence_length", "precision", "checkpointing", "offload", "api")
_ALWAYS = (
    "model",
    "world_size",
    "precision",
    "micro_batch_size",
    "sequence_length",
    "optimizer",
    "api",
    "checkpointing",
    "offload",
)
_OUTER = ("model", "world_size", "shard_size", "sequence_length", "micro_batch_size", "checkpointing", "precision")
_INNER = ("offload", "api")
_TITLES = {
    "world_size": "ranks",
    "shard_size": "shard group",
    "micro_batch_size": "batch",
    "sequence_length": "sequence",
    "gradient_accumulation_steps": "accumulate",
}
_NAMES = {
    "micro_batch_size": "batch per rank",
    "world_size": "world size",
    "sequence_length": "sequence length",
    "shard_size": "shard group size",
}
_PLAIN = ("model", "precision", "api")
"""Fields whose values need no name beside them in a title."""


@dataclass(frozen=True)
class Slot(Generic[T]):
    """One trial's place in a picture, or that of whatever else has a bar."""

    record: T
    labels: tuple[str, ...]
    """One word a level, outermost first."""


@dataclass(frozen=True)
class Group(Generic[T]):
    """The trials of one strategy."""

    header: str
    """The strategy, and the one that really ran where that differs."""
    slots: tuple[Slot[T], ...]
    collapsed: bool = False
    """Whether all of the group was skipped, so that one word stands for its slots."""

    @property
    def shown(self) -> tuple[Slot[T], ...]:
        """The slots that have a bar: of a collapsed group one, without labels."""
        return (Slot(self.slots[0].record, ()),) if self.collapsed else self.slots


@dataclass(frozen=True)
class Slide:
    """One picture's worth of trials."""

    suffix: str
    """For the file's name: empty, or ``-`` and what tells this picture from its siblings."""
    levels: tuple[str, ...]
    """The titles of the slots' labels, outermost first."""
    place: str
    """The ranks and what they ran on: ``4 ranks, NVIDIA H100``."""
    subtitle: str
    """The models, the ranks, and what is constant here but varies in the sweep."""
    conditions: tuple[str, ...]
    """Facts to print on the picture, in order."""
    notes: tuple[str, ...]
    """Why some trials have no bar, and which measurements are suspect."""
    groups: tuple[Group[TrialRecord], ...]


def slides(records: Iterable[TrialRecord], machine: str) -> list[Slide]:
    """Sort measured records into pictures.

    Args:
        records: trials of one sweep on one machine; those of a dry run (device ``fake``) are left out.
        machine: one line that describes the machine.
    """
    measured = [record for record in records if record.source == "measured" and record.device != "fake"]
    kinds = len({record.device for record in measured})
    made: list[Slide] = []
    names: Counter[str] = Counter()
    for members in _comparable(measured):
        for values, part in split(members):
            device = (members[0].device,) if kinds > 1 else ()
            name = in_file_name("-".join((*device, *values)))
            names[name] += 1
            number = (str(names[name]),) if names[name] > 1 else ()
            suffix = "".join(f"-{word}" for word in (name, *number) if word)
            made.append(_slide(part, values, machine, suffix))
    return made


def facts(record: TrialRecord) -> Facts:
    """Return what a trial trained. ``shard_size`` is that of the group, and None where nothing is in groups."""
    setup = record.setup
    found: Facts = {"model": record.model, **{field: getattr(setup, field) for field in setup.__struct_fields__}}
    grouped = setup.strategy.is_hybrid and record.outcome is not Outcome.SKIPPED
    found["shard_size"] = setup.shard_group_size if grouped else None
    del found["strategy"]
    return found


def word(field: str, value: Hashable) -> str:
    """Return a value as the axis says it beside the field's title: ``full``, ``2``, ``fsdp1``, ``llama 6.74B``."""
    if isinstance(value, ModelShape):
        return f"{value.family.value} {format_count(value.num_parameters)}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if field == "shard_size" and value is None else str(value)


def phrase(field: str, *values: Hashable) -> str:
    """Return a field with its values: ``checkpointing full``, ``2 / 4 ranks``, ``fsdp1``."""
    text = " / ".join(word(field, value) for value in values)
    if field == "world_size":
        return f"{text} rank" if values == (1,) else f"{text} ranks"
    return text if field in _PLAIN or field == "strategy" else f"{_title(field)} {text}"


def _title(field: str) -> str:
    return _TITLES.get(field, field.replace("_", " "))


def split(records: list[TrialRecord]) -> list[tuple[tuple[str, ...], list[TrialRecord]]]:
    """Split what is too much for one picture by a field that varies, again and again.

    Returns:
        The parts, each with the words that tell it from the others. Every record is in one of them.
    """
    field = None if len(records) <= MAX_BARS else _split_field(records)
    if field is None:
        chunks = [records[start : start + MAX_BARS] for start in range(0, len(records), MAX_BARS)]
        return [((), chunk) for chunk in chunks]
    parts = _parts(records, field)
    if field == "model":
        parts = _merge(parts)
    made = []
    for part in parts:
        own = tuple(phrase(field, value) for value in dict.fromkeys(_get(record, field) for record in part))
        made += [((*own, *rest), sub) for rest, sub in split(part)]
    return made


def _get(record: TrialRecord, field: str) -> Hashable:
    return record.setup.strategy if field == "strategy" else facts(record)[field]


def _parts(records: list[TrialRecord], field: str) -> list[list[TrialRecord]]:
    values = sorted({_get(record, field) for record in records}, key=_rank)
    return [[record for record in records if _get(record, field) == value] for value in values]


def _merge(parts: list[list[TrialRecord]]) -> list[list[TrialRecord]]:
    """Put neighbours with few bars into one picture."""
    merged: list[list[TrialRecord]] = []
    for part in parts:
        last = merged[-1] if merged else []
        models = {record.model for record in last + part}
        if last and len(last) + len(part) <= MAX_BARS and len(models) <= MAX_MODELS:
            merged[-1] = last + part
        else:
            merged.append(part)
    return merged


def _split_field(records: list[TrialRecord]) -> str | None:
    """Choose the field to split by: the model and the ranks; else the first that suffices; else the first."""
    varying = varying_fields(records)
    for field in _SPLIT_FIRST:
        if field in varying:
            return field
    candidates = [field for field in _SPLIT_NEXT if field in varying]
    candidates += [field for field in varying if field not in candidates]
    if len({record.setup.strategy for record in records}) > 1:
        candidates.append("strategy")
    enough = (field for field in candidates if max(map(len, _parts(records, field))) <= MAX_BARS)
    return next(enough, next(iter(candidates), None))


def varying_fields(records: list[TrialRecord]) -> list[str]:
    """Return the fields in which records differ. Having shard groups or none is the strategy's affair."""
    all_facts = [facts(record) for record in records]
    return [field for field in all_facts[0] if len({fact[field] for fact in all_facts if fact[field] is not None
                                                    or field != "shard_size"}) > 1]  # fmt: skip


def _rank(value: Hashable) -> tuple[float, str]:
    """Return where a value stands among its like: numbers by size, words in the order of their vocabulary."""
    if isinstance(value, ModelShape):
        return value.num_parameters, value.name
    if isinstance(value, Precision):
        return -value.store_bytes + 0.5 * (value.compute != "fp32"), value.name
    if isinstance(value, int | float):
        return value, ""
    if isinstance(value, ShardingStrategy):
        return ORDER.index(value), ""
    if isinstance(value, StrEnum):
        return list(type(value)).index(value), ""
    return -1.0, str(value)


def _comparable(records: list[TrialRecord]) -> list[list[TrialRecord]]:
    """Group records by what a picture never mixes.

    A trial that was skipped, or that crashed before it could say where it ran, joins the others of its kind.
    """
    made: dict[Hashable, list[TrialRecord]] = {}
    known = {key: _only(key, records) for key in (device_name, torch_version)}
    for record in records:
        where = tuple(find(record) or known[find].get(record.device, "unknown") for find in known)
        made.setdefault((record.device, *where, _plan(record)), []).append(record)
    return [members for members in made.values() if any(r.outcome is not Outcome.SKIPPED for r in members)]


def _only(find: Callable[[TrialRecord], str | None], records: list[TrialRecord]) -> dict[str, str]:
    """Return by kind of device what the records that know it agree on, or the first of what they say."""
    return {record.device: value for record in reversed(records) if (value := find(record))}


def _plan(record: TrialRecord) -> Hashable:
    run = record.run
    return run.warmup_steps, run.steps, run.communication_steps, run.memory_limit_bytes, run.threads_per_rank


def torch_version(record: TrialRecord) -> str | None:
    """Return the torch that the ranks ran; None where no rank got far enough to say."""
    return next((rank.environment["torch"] for rank in record.ranks if "torch" in rank.environment), None)


def _slide(records: list[TrialRecord], values: tuple[str, ...], machine: str, suffix: str) -> Slide:
    varying = varying_fields(records)
    middle = [field for field in varying if field not in _OUTER + _INNER]
    levels = [field for field in (*_OUTER, *middle, *_INNER) if field in varying]
    models = sorted({record.model for record in records}, key=_rank)
    model = models[0].describe() if len(models) == 1 else phrase("model", *models)
    ranks = phrase("world_size", *sorted({record.setup.world_size for record in records}))
    told = {ranks, *(phrase("model", model) for model in models)}
    return Slide(
        suffix=suffix,
        levels=tuple(_title(level) for level in levels),
        place=f"{ranks}, {_device(records)}",
        subtitle=", ".join([model, ranks, *(value for value in values if value not in told)]),
        conditions=conditions(records, machine),
        notes=_notes(records),
        groups=tuple(_groups(records, levels)),
    )


def _groups(records: list[TrialRecord], levels: list[str]) -> Iterable[Group[TrialRecord]]:
    """Group by the strategy requested and the one that ran; a strategy of which nothing ran is one group."""
    ran = {record.setup.strategy for record in records if record.outcome is not Outcome.SKIPPED}

    def key(record: TrialRecord) -> tuple[int, str]:
        strategy, effective = record.setup.strategy, record.effective_strategy
        return ORDER.index(strategy), "" if effective == strategy.value or strategy not in ran else effective

    for (place, effective), members in groupby(sorted(records, key=key), key=key):
        ordered = sorted(members, key=lambda record: [_rank(facts(record)[level]) for level in levels])
        header = ORDER[place].value + (f"\n(ran {effective})" if effective else "")
        slots = [Slot(record, tuple(word(level, facts(record)[level]) for level in levels)) for record in ordered]
        yield Group(header, tuple(slots), collapsed=ORDER[place] not in ran)


def conditions(records: list[TrialRecord], machine: str) -> tuple[str, ...]:
    """Return what a reader needs to know to repeat a picture: source, machine, versions, and the whole setup.

    A fact that varies is listed with all its values; one that has PyTorch's or our default is named only where every
    picture names it.
    """
    first = records[0]
    torch = next((version for record in records if (version := torch_version(record))), "unknown")
    run = first.run
    told = [f"source: {first.source}", f"machine: {machine}", f"device: {_device(records)}", f"torch {torch}"]
    fields = dict.fromkeys((*_ALWAYS, *facts(first)))
    told += [text for field in fields if (text := _condition(field, records))]
    told.append(f"{run.steps} measured steps after {run.warmup_steps} warm-up, {run.communication_steps} profiled")
    if run.memory_limit_bytes is not None:
        told.append(f"limit of {format_gib(run.memory_limit_bytes)} per rank")
    return tuple(told)


def _device(records: list[TrialRecord]) -> str:
    name = next((found for record in records if (found := device_name(record))), "GPU of unknown name")
    if records[0].hardware == "cpu":
        if records[0].device == "emulated":
            return "CPU, one process as rank 0 of the world (emulated)"
        backends = (rank.environment.get("backend") for record in records for rank in record.ranks)
        return f"CPU, {next((backend for backend in backends if backend), 'gloo')}"
    return f"{name}, one GPU as rank 0 of the world (emulated)" if records[0].device == "emulated" else name


def _condition(field: str, records: list[TrialRecord]) -> str | None:
    """Return a field's value, or values, with its name; None for a default that need not be told."""
    values = sorted({facts(record)[field] for record in records}, key=_rank)
    if field == "shard_size":
        values = [value for value in values if value is not None]
    if not values or (field not in _ALWAYS and field != "shard_size" and values == [getattr(TrainSetup(), field)]):
        return None
    if field == "model":
        return "model: " + ", ".join(value.describe() for value in values if isinstance(value, ModelShape))
    return f"{_NAMES.get(field, _title(field))} {' / '.join(word(field, value) for value in values)}"


def _notes(records: list[TrialRecord]) -> tuple[str, ...]:
    """Return one line for each reason why trials have no bar, with their number, and for what is suspect."""
    failed = [record for record in records if record.outcome is not Outcome.OK and not record.outcome.is_oom]
    reasons = Counter((ended(record), record.reason or "no reason recorded") for record in failed)
    lines = [f"{count} {outcome}: {reason}" for (outcome, reason), count in reasons.items()]
    suspects = Counter(suspicion for record in records for suspicion in record.suspect)
    return tuple(lines + [f"{count} suspect: {suspicion}" for suspicion, count in suspects.items()])
