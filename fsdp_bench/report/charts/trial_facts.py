"""Texts about trials in charts: their settings in order, the conditions, and the reasons for missing bars."""

from collections import Counter
from collections.abc import Hashable
from enum import StrEnum

from fsdp_bench.plan.setup_text import FIELDS as COLUMNS
from fsdp_bench.plan.setup_text import setup_line, value_text
from fsdp_bench.spec.model_code import TrainedModel
from fsdp_bench.spec.rank_report import Outcome
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.spec.setup import FIELDS, Precision, ShardingStrategy
from fsdp_bench.spec.subprocesses.rehearsal import RehearsedGpu
from fsdp_bench.spec.units import format_count, format_gib

ORDER = (
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.HYBRID_SHARD,
    ShardingStrategy.HYBRID_SHARD_ZERO2,
    ShardingStrategy.NO_SHARD,
)

NESTING = tuple(reversed(COLUMNS))
"""Fields that may vary within a strategy, the outermost level of labels first: the last columns of a table, which are
seldom changed, are the outermost levels."""

SKIPPED = "skipped"
_OOM = {Outcome.OOM_GPU: "OOM", Outcome.OOM_HOST: "OOM (host)"}

Facts = dict[str, Hashable]
"""A trial's model and setup by field name, without the strategy, by which the bars are grouped."""


def facts(record: TrialRecord) -> Facts:
    """Return a trial's model and setup; ``shard_size`` is the shard group's size, or None without shard groups."""
    setup = record.setup
    found: Facts = {"model": record.model, **{field: getattr(setup, field) for field in setup.__struct_fields__}}
    grouped = setup.strategy.is_hybrid and record.outcome is not Outcome.SKIPPED
    found["shard_size"] = setup.shard_group_size if grouped else None
    del found["strategy"]
    return found


def value_label(field: str, value: Hashable) -> str:
    """Return a value as the axis prints it: ``full``, ``2``, ``fsdp1``, ``llama 6.74B``."""
    if isinstance(value, TrainedModel):
        return f"{value.kind} {format_count(value.num_parameters)}"
    return "" if field == "shard_size" and value is None else value_text(field, value)


def phrase(field: str, *values: Hashable) -> str:
    """Return a field with its values: ``checkpointing full``, ``2 / 4 ranks``, ``fsdp1``."""
    text = " / ".join(value_label(field, value) for value in values)
    if field == "world_size":
        return f"{text} rank" if values == (1,) else f"{text} ranks"
    is_plain = field in ("model", "strategy") or FIELDS[field].is_plain
    return text if is_plain else f"{field_title(field)} {text}"


def field_title(field: str) -> str:
    """Return a field's name as a title."""
    return FIELDS[field].title if field in FIELDS else field


def order_of(value: Hashable) -> tuple[float, str]:
    """Return a key to sort values by: numbers by size, members of an enumeration in its order."""
    if isinstance(value, TrainedModel):
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


def torch_version(record: TrialRecord) -> str | None:
    """Return the ranks' version of torch; None if no rank got far enough to report it."""
    return next((rank.environment["torch"] for rank in record.ranks if "torch" in rank.environment), None)


def conditions(records: list[TrialRecord], machine: str) -> tuple[str, ...]:
    """Return the conditions that a reader needs to repeat a chart: source, machine, versions and the setup.

    A field that varies is a label of each bar.
    """
    first = records[0]
    torch = next((version for record in records if (version := torch_version(record))), "unknown")
    run = first.run
    lines = [f"source: {first.source}", f"machine: {machine}", f"device: {device_of(records)}", f"torch {torch}"]
    models = sorted({record.model for record in records}, key=order_of)
    lines.append(f"model: {', '.join(model.describe() for model in models)}")
    own = list(map(facts, records))
    differing = [name for name in own[0] if len({one[name] for one in own}) > 1]
    lines.append(f"setup: {setup_line(first.setup, ('strategy', *differing))}")
    groups = sorted({str(one["shard_size"]) for one in own if one["shard_size"] is not None})
    lines += [f"shard group {' / '.join(groups)}"] if groups else []
    if run.rehearsed_on is not None:
        lines.append(f"{run.warmup_steps + run.steps} steps; {kept_free(run.rehearsed_on)}")
    else:
        lines.append(f"{run.steps} measured steps after {run.warmup_steps} warm-up, {run.communication_steps} profiled")
    if run.memory_limit_bytes is not None:
        lines.append(f"limit of {format_gib(run.memory_limit_bytes)} per rank")
    return tuple(lines)


def kept_free(gpu: RehearsedGpu) -> str:
    """Return the memory of a rehearsed GPU, and how much of it is kept free, as text."""
    return (
        f"{format_gib(gpu.usable_bytes)} of GPU memory, {format_gib(gpu.kept_free_bytes)} of it kept free for the CUDA"
        " context and NCCL"
    )


def device_of(records: list[TrialRecord]) -> str:
    """Return a description of the device that the trials ran on."""
    name = next((found for record in records if (found := device_name(record))), "GPU of unknown name")
    if records[0].hardware == "cpu":
        if records[0].device == "emulated":
            return "CPU, one process as rank 0 of the world (emulated)"
        backends = (rank.environment.get("backend") for record in records for rank in record.ranks)
        return f"CPU, {next((backend for backend in backends if backend), 'gloo')}"
    if records[0].device == "rehearsed":
        return f"{records[0].run.rehearsed_on.product_name if records[0].run.rehearsed_on else name} (rehearsed)"
    return f"{name}, one GPU as rank 0 of the world (emulated)" if records[0].device == "emulated" else name


def notes_of(records: list[TrialRecord]) -> tuple[str, ...]:
    """Return one line per reason for missing bars and per suspicion, each with its number of trials."""
    failed = [record for record in records if record.outcome is not Outcome.OK and not record.outcome.is_oom]
    reasons = Counter((ended(record), record.reason or "no reason recorded") for record in failed)
    lines = [f"{count} {outcome}: {reason}" for (outcome, reason), count in reasons.items()]
    suspects = Counter(suspicion for record in records for suspicion in record.suspect)
    return tuple(lines + [f"{count} suspect: {suspicion}" for suspicion, count in suspects.items()])


def device_name(record: TrialRecord) -> str | None:
    """Return torch's name of the ranks' device; None if no rank got far enough to report it."""
    return next((rank.device_name for rank in record.ranks if rank.device_name != "unknown"), None)


def ended(record: TrialRecord) -> str:
    """Return a short label for the outcome of a trial that did not end ok."""
    if record.outcome.is_oom and "budget" in limits_exceeded(record):
        return "OOM (budget)"
    return _OOM.get(record.outcome, record.outcome.value)


def limits_exceeded(record: TrialRecord) -> set[str]:
    """Return which memory ran out according to the ranks: device, budget or host."""
    return {r.failure.limit for r in record.ranks if r.failure and r.failure.limit and r.outcome.is_oom}
