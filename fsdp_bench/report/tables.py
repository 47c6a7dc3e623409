"""Results as a table on the terminal."""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.table import Table

from fsdp_bench.report import terminal
from fsdp_bench.report.terminal import add_row
from fsdp_bench.spec.record import Outcome, TrialRecord
from fsdp_bench.spec.units import format_gib, format_seconds
from fsdp_bench.sweep.flat import most_of_any_rank

COLUMNS = (
    "model", "world", "strategy", "api", "precision", "checkpointing", "offload", "outcome",
    "peak allocated", "in phase", "reserved", "step", "tokens/s per rank", "MFU", "comm. total", "exposed",
)  # fmt: skip


DISAGREEMENT = 0.1
"""How far the two parts of a step that are exposed communication may be apart before it is said."""


def print_table(records: list[TrialRecord], console: Console) -> None:
    """Print one row a trial that ran, what was skipped in a line, and what the columns mean."""
    ran = [record for record in records if record.outcome is not Outcome.SKIPPED]
    table = Table(title=_title(ran), title_justify="left", header_style="bold", box=None, padding=(0, 1))
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in COLUMNS[:8] else "right", no_wrap=True)
    for record in ran:
        add_row(table, _row(record))
    terminal.print_table(table, console, 210)
    for line in _footnotes(records, ran):
        terminal.note(console, line)


def _footnotes(records: list[TrialRecord], ran: list[TrialRecord]) -> list[str]:
    """Return what was skipped, what marks mean, what is suspect, what MFU is of, and the models' shapes."""
    skipped = Counter(record.reason for record in records if record.outcome is Outcome.SKIPPED)
    lines = [f"skipped {count}: {reason}" for reason, count in skipped.items()]
    if any(map(disagrees, ran)):
        lines.append(
            "* exposed, from the profiler, is a part of its step that is more than 10 points away from what the step"
            " takes less without communication: `fsdp-bench report RESULTS --communication` shows both"
        )
    if any(record.device == "emulated" for record in ran):
        lines.append(
            "emulated: rank 0 of the world, alone; collectives end at once, so that its steps, tokens/s and MFU are the"
            " job's compute, without communication"
        )
    lines += [f"suspect {record.id}: {suspicion}" for record in ran for suspicion in record.suspect]
    lines += dict.fromkeys(_peak(record) for record in ran if record.peak_flops_source)
    return [*lines, *dict.fromkeys(f"{record.model.name}: {record.model.describe()}" for record in ran)]


def _peak(record: TrialRecord) -> str:
    peak = (record.peak_flops_per_second or 0) / 1e12
    return (
        "MFU = model FLOPs (3 x forward, attention causal, no recomputation) / seconds / dense peak"
        f" {peak:.4g} TFLOP/s ({record.peak_flops_source})"
    )


def _title(ran: list[TrialRecord]) -> str:
    counts = Counter(record.outcome.value for record in ran)
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    kind = "live tensor bytes" if any(r.hardware == "cpu" for r in ran) else "torch.cuda.max_memory_allocated"
    return f"measured: {len(ran)} trials ({outcomes}); peak allocated is {kind} of the worst rank, times are medians"


def _row(record: TrialRecord) -> list[str]:
    setup, memory = record.setup, record.worst_rank_memory
    strategy = setup.strategy.value
    if record.effective_strategy != strategy:
        strategy += f" (ran {record.effective_strategy})"
    return [
        record.model.name,
        f"{setup.world_size} emulated" if record.device == "emulated" else str(setup.world_size),
        strategy,
        setup.api.value,
        str(setup.precision),
        setup.checkpointing.value,
        setup.offload.value,
        record.outcome.value if record.fits or record.outcome is not Outcome.OK else "ok, with retries",
        _bytes(memory.peak_allocated_bytes if memory else None),
        memory.peak_phase if memory else "unknown",
        _bytes(most_of_any_rank(record, "peak_reserved_bytes")[0]),
        _seconds(record.step_seconds),
        f"{record.tokens_per_second_per_gpu:,.0f}" if record.tokens_per_second_per_gpu else "unknown",
        f"{record.mfu:.1%}" if record.mfu is not None else "unknown",
        _seconds(record.communication_seconds),
        _seconds(record.exposed_communication_seconds) + ("*" if disagrees(record) else ""),
    ]


def disagrees(record: TrialRecord) -> bool:
    """Whether the two ways to find exposed communication are far apart."""
    return (record.exposed_disagreement or 0.0) > DISAGREEMENT


def _bytes(value: int | None) -> str:
    return "unknown" if value is None else format_gib(value)


def _seconds(value: float | None) -> str:
    return "unknown" if value is None else format_seconds(value)
