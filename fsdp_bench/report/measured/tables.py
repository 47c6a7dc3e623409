"""Measured results as a table: the conclusion, one row per trial, and footnotes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fsdp_bench.report import terminal
from fsdp_bench.report.measured.conclusion import conclusion
from fsdp_bench.report.table import TableColumn, table_lines
from fsdp_bench.report.text.speed import step_text
from fsdp_bench.spec.field import Field
from fsdp_bench.spec.rank_report import Outcome
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.spec.setup import FIELDS
from fsdp_bench.spec.units import format_gib
from fsdp_bench.sweep.results.flat import most_of_any_rank

if TYPE_CHECKING:
    from rich.console import Console

UNKNOWN = "unknown"
DISAGREEMENT = 0.1
"""Largest difference between the two measurements of exposed communication, as a fraction of the step.

A trial with a larger difference is marked. The measurements are by the profiler and by steps without communication."""


def strategy_text(record: TrialRecord) -> str:
    """Return the requested strategy, and the effective one if that differs."""
    requested, effective = record.setup.strategy.value, record.effective_strategy
    return requested if effective == requested else f"{requested} (ran {effective})"


def outcome_text(record: TrialRecord) -> str:
    """Return how a trial ended."""
    return record.outcome.value if record.fits or record.outcome is not Outcome.OK else "ok, with retries"


def _world(record: TrialRecord) -> str:
    return f"{record.setup.world_size} {record.alone}".rstrip()


_SETTINGS: dict[str, Callable[[TrialRecord], str]] = {
    "strategy": strategy_text,
    "model": lambda r: r.model.name,
    "world\nsize": _world,
}
"""The first columns: the header, and the function that returns the cell of a trial."""


def setting_fields(records: Sequence[TrialRecord], usual: Callable[[Field], bool]) -> list[Field]:
    """Return the fields of the setup that a table of trials has a column for: usual ones, and what trials differ in."""
    setups = [record.setup for record in records]
    have = (one for one in FIELDS.values() if one.has_column)
    return [one for one in have if usual(one) or len({getattr(setup, one.name) for setup in setups}) > 1]


class Finding(NamedTuple):
    """A measurement that tables of trials have a column for."""

    value: Callable[[TrialRecord], Any]
    form: Callable[[Any], str] = str
    drop_priority: int = 0
    """TableColumn.drop_priority."""
    mark: Callable[[TrialRecord], str] = lambda record: ""

    def text(self, record: TrialRecord) -> str:
        """Return the cell of a trial."""
        value = self.value(record)
        return UNKNOWN if value is None else f"{self.form(value)}{self.mark(record)}"


def _worst(name: str) -> Callable[[TrialRecord], Any]:
    return lambda record: getattr(record.worst_rank_memory, name, None) or None


_FINDINGS = {
    "outcome": Finding(outcome_text),
    "peak\nallocated": Finding(_worst("peak_allocated_bytes"), format_gib),
    "in phase": Finding(_worst("peak_phase"), drop_priority=3),
    "reserved": Finding(lambda record: most_of_any_rank(record, "peak_reserved_bytes")[0], format_gib, 2),
    "step": Finding(lambda record: record.step_seconds, step_text, 5),
    "tokens/s\nper rank": Finding(lambda record: record.tokens_per_second_per_gpu or None, "{:,.0f}".format),
    "MFU": Finding(lambda record: record.mfu, "{:.1%}".format, 1),
    "comm.\ntotal": Finding(lambda record: record.communication_seconds, step_text, 6),
    "comm.\nexposed": Finding(
        lambda record: record.exposed_communication_seconds, step_text, 4, lambda r: "*" if disagrees(r) else ""
    ),
}
"""Measurements by the header of their column."""
WORDS = ("outcome", "in phase")
"""Headers of columns that are not of numbers."""

_MEMORY = ("outcome", "peak\nallocated", "in phase", "reserved")
"""Columns of trials that were all rehearsed, which has no times."""


def print_table(records: list[TrialRecord], console: Console) -> None:
    """Print the conclusion and one row per trial that ran, sorted by model, world size and memory."""
    ran = sorted((record for record in records if record.outcome is not Outcome.SKIPPED), key=_order)
    beginning = [conclusion(ran), ""] if ran else []
    terminal.note_lines(console, [*beginning, _title(ran), *_tables(ran, console.width), *_footnotes(records, ran)])


def _tables(ran: list[TrialRecord], width: int) -> list[str]:
    """Return one table per combination of model and world size."""
    groups: dict[str, list[TrialRecord]] = {}
    for record in ran:
        groups.setdefault(f"{record.model.name}, world size {_world(record)}", []).append(record)
    if len(groups) < 2:
        return table_lines(_columns(ran), width) if ran else []
    lines = []
    for name, records in groups.items():
        lines += ["", f"{name}:", *table_lines(_columns(records, ("model", "world\nsize")), width)]
    return [*lines, ""]


def _columns(ran: list[TrialRecord], without: tuple[str, ...] = ()) -> list[TableColumn]:
    settings = [
        TableColumn(header, tuple(map(cell, ran))) for header, cell in _SETTINGS.items() if header not in without
    ]
    for one in setting_fields(ran, lambda one: one.labelled or one.is_size):
        cells = tuple(one.text(getattr(record.setup, one.name)) for record in ran)
        settings.append(TableColumn(one.column or one.title.replace(" ", "\n"), cells))
    findings = [
        TableColumn(header, tuple(map(one.text, ran)), header not in WORDS, one.drop_priority)
        for header, one in findings_of(ran).items()
    ]
    return [*settings, *findings]


def findings_of(records: Sequence[TrialRecord]) -> dict[str, Finding]:
    """Return the measurements that some of the trials have, by the header of their column."""
    has_times = any(record.source != "rehearsed" for record in records)
    return {header: one for header, one in _FINDINGS.items() if has_times or header in _MEMORY}


def _order(record: TrialRecord) -> tuple[object, ...]:
    peak = most_of_any_rank(record, "peak_allocated_bytes")[0]
    failed = record.outcome is not Outcome.OK
    return (
        record.num_parameters,
        record.model.name,
        record.setup.world_size,
        failed,
        peak or 0,
        record.step_seconds or 0,
    )


def _title(ran: list[TrialRecord]) -> str:
    counts = Counter(record.outcome.value for record in ran)
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    kind = "live tensor bytes" if any(r.hardware == "cpu" for r in ran) else "torch.cuda.max_memory_allocated"
    sources = dict.fromkeys(record.source for record in ran) or ("measured",)
    times = ", times are medians" if "measured" in sources else ""
    return f"{' and '.join(sources)}: {len(ran)} trials ({outcomes}); peak allocated is {kind} of the worst rank{times}"


def _footnotes(records: list[TrialRecord], ran: list[TrialRecord]) -> list[str]:
    """Return notes on skipped trials, marks, suspect measurements, MFU and the dimensions of the models."""
    skipped = Counter(record.reason for record in records if record.outcome is Outcome.SKIPPED)
    lines = [f"skipped {count}: {reason}" for reason, count in skipped.items()]
    if any(map(disagrees, ran)):
        lines.append(
            "* by the profiler; steps without communication save another part of the step, by more than 10 points"
            " (fsdp-bench report RESULTS --communication)"
        )
    if any(record.device == "emulated" for record in ran):
        lines.append(
            "emulated: rank 0 of the world, alone; collectives end at once, so that its steps, tokens/s and MFU are the"
            " job's compute, without communication"
        )
    for gpu in dict.fromkeys(record.run.rehearsed_on for record in ran if record.run.rehearsed_on is not None):
        lines.append(
            f"rehearsed: rank 0 of the world in PyTorch's CUDA build on a stand-in for NVIDIA's libraries, as on"
            f" {gpu.product_name} with {format_gib(gpu.available_bytes)} for torch; kernels do nothing: no times"
        )
    lines += [f"suspect {record.id}: {suspicion}" for record in ran for suspicion in record.suspect]
    lines += dict.fromkeys(_peak_flops(record) for record in ran if record.peak_flops_source)
    return [*lines, *dict.fromkeys(f"{record.model.name}: {record.model.describe()}" for record in ran)]


def _peak_flops(record: TrialRecord) -> str:
    peak = (record.peak_flops_per_second or 0) / 1e12
    return (
        "MFU = model FLOPs (3 x forward, attention causal, no recomputation) / seconds / dense peak"
        f" {peak:.4g} TFLOP/s ({record.peak_flops_source})"
    )


def disagrees(record: TrialRecord) -> bool:
    """Whether the two measurements of exposed communication differ by more than DISAGREEMENT."""
    return (record.exposed_disagreement or 0.0) > DISAGREEMENT
