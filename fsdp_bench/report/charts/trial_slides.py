"""Grouping of measured trials into charts: which trials share a chart, their order, their labels and the conditions.

A field that varies within a chart is a level of labels below its bars; other fields are in its conditions. A chart
never mixes kinds of device, devices, versions of torch or run plans. Trials that are too many for one chart are split
over several.
"""

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from itertools import groupby

from fsdp_bench.report.charts.slide import in_file_name
from fsdp_bench.report.charts.trial_facts import (
    NESTING,
    ORDER,
    conditions,
    device_name,
    device_of,
    facts,
    field_title,
    notes_of,
    order_of,
    phrase,
    torch_version,
    value_label,
)
from fsdp_bench.spec.rank_report import Outcome
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.spec.setup import FIELDS

MAX_BARS = 24
"""Most bars in one chart that remain legible."""

MAX_MODELS = 3
"""Most models that share a chart if they have few bars."""

_SPLIT_FIRST = ("model", "world_size")


@dataclass(frozen=True)
class Group:
    """The bars of one strategy."""

    header: str
    trials: tuple[tuple[tuple[str, ...], TrialRecord], ...]
    """The trials in order, each with one label per level, outermost first."""
    collapsed: bool = False
    """Whether all trials of the group were skipped; one bar without labels then stands for all."""


@dataclass(frozen=True)
class ChartTrials:
    """The trials of one chart, and the texts of the chart."""

    suffix: str
    """Suffix of the file name: empty, or ``-`` and the values that distinguish this chart from the others."""
    levels: tuple[str, ...]
    """The titles of the bars' labels, outermost first."""
    place: str
    """The number of ranks and their device: ``4 ranks, NVIDIA H100``."""
    subtitle: str
    """The models, the ranks, and the values that are constant here but vary in the sweep."""
    conditions: tuple[str, ...]
    """Facts to print below the chart, in order."""
    notes: tuple[str, ...]
    """Reasons why some trials have no bar, and suspect measurements."""
    groups: tuple[Group, ...]

    @property
    def records(self) -> list[TrialRecord]:
        """The trials, in the order of their bars."""
        return [record for group in self.groups for _, record in group.trials]


def group_by_chart(records: Iterable[TrialRecord], machine: str) -> list[ChartTrials]:
    """Group measured and rehearsed records of one sweep by chart; these never share one. Dry runs are left out."""
    measured = [record for record in records if record.device != "fake"]
    kinds = len({record.device for record in measured})
    made: list[ChartTrials] = []
    names: Counter[str] = Counter()
    for members in _comparable(measured):
        for values, part in split(members):
            device = (members[0].device,) if kinds > 1 else ()
            name = in_file_name("-".join((*device, *values)))
            names[name] += 1
            number = (str(names[name]),) if names[name] > 1 else ()
            suffix = "".join(f"-{word}" for word in (name, *number) if word)
            made.append(_chart_trials(part, values, machine, suffix))
    return made


def split(records: list[TrialRecord]) -> list[tuple[tuple[str, ...], list[TrialRecord]]]:
    """Split records too many for one chart by varying fields, recursively; each part has labels that tell it apart."""
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
    values = sorted({_get(record, field) for record in records}, key=order_of)
    return [[record for record in records if _get(record, field) == value] for value in values]


def _merge(parts: list[list[TrialRecord]]) -> list[list[TrialRecord]]:
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
    """Choose the field to split by: the model or the number of ranks if they vary.

    Otherwise choose the first field after which every part has few enough bars, or else the first field that varies.
    """
    varying = varying_fields(records)
    for field in _SPLIT_FIRST:
        if field in varying:
            return field
    candidates = sorted(varying, key=lambda field: FIELDS[field].seldom)
    if len({record.setup.strategy for record in records}) > 1:
        candidates.append("strategy")
    enough = (field for field in candidates if max(map(len, _parts(records, field))) <= MAX_BARS)
    return next(enough, next(iter(candidates), None))


def varying_fields(records: list[TrialRecord]) -> list[str]:
    """Return the fields in which records differ, in order of NESTING after others, the outermost level first.

    That some strategies have no shard group is no difference.
    """
    found = [facts(record) for record in records]
    values = {name: {fact[name] for fact in found} - ({None} if name == "shard_size" else set()) for name in found[0]}
    varying = [name for name, own in values.items() if len(own) > 1]
    return sorted(varying, key=lambda name: NESTING.index(name) if name in NESTING else -1)


def _comparable(records: list[TrialRecord]) -> list[list[TrialRecord]]:
    """Group records by device, version of torch and run plan, which a chart never mixes.

    A trial that was skipped or crashed early has no device or version; it is grouped with trials of the same kind of
    device.
    """
    made: dict[Hashable, list[TrialRecord]] = {}
    # of each kind of device the first known value
    known = {
        find: {record.device: value for record in reversed(records) if (value := find(record))}
        for find in (device_name, torch_version)
    }
    for record in records:
        where = tuple(find(record) or known[find].get(record.device, "unknown") for find in known)
        run = record.run
        plan = run.warmup_steps, run.steps, run.communication_steps, run.memory_limit_bytes, run.threads_per_rank
        made.setdefault((record.device, *where, *plan, run.rehearsed_on), []).append(record)
    return [members for members in made.values() if any(r.outcome is not Outcome.SKIPPED for r in members)]


def _chart_trials(records: list[TrialRecord], values: tuple[str, ...], machine: str, suffix: str) -> ChartTrials:
    levels = varying_fields(records)
    models = sorted({record.model for record in records}, key=order_of)
    model = models[0].describe() if len(models) == 1 else phrase("model", *models)
    ranks = phrase("world_size", *sorted({record.setup.world_size for record in records}))
    named = {ranks, *(phrase("model", model) for model in models)}
    return ChartTrials(
        suffix=suffix,
        levels=tuple(field_title(level) for level in levels),
        place=f"{ranks}, {device_of(records)}",
        subtitle=", ".join([model, ranks, *(value for value in values if value not in named)]),
        conditions=conditions(records, machine),
        notes=notes_of(records),
        groups=tuple(_groups(records, levels)),
    )


def _groups(records: list[TrialRecord], levels: list[str]) -> Iterable[Group]:
    """Group by requested and effective strategy; a strategy whose trials were all skipped is one group."""
    ran = {record.setup.strategy for record in records if record.outcome is not Outcome.SKIPPED}

    def key(record: TrialRecord) -> tuple[int, str]:
        strategy, effective = record.setup.strategy, record.effective_strategy
        return ORDER.index(strategy), "" if effective == strategy.value or strategy not in ran else effective

    for (place, effective), members in groupby(sorted(records, key=key), key=key):
        ordered = sorted(members, key=lambda record: [order_of(facts(record)[level]) for level in levels])
        header = ORDER[place].value + (f"\n(ran {effective})" if effective else "")
        labels = (tuple(value_label(level, facts(one)[level]) for level in levels) for one in ordered)
        yield Group(header, tuple(zip(labels, ordered, strict=True)), collapsed=ORDER[place] not in ran)
