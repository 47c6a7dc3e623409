"""Measured results as a table on the terminal: what all trials share above it, what differs in its columns."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fsdp_bench.report import terminal
from fsdp_bench.report.measured.conclusion import conclusion
from fsdp_bench.spec.rank_report import Outcome
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.spec.text import printable
from fsdp_bench.spec.units import format_gib, format_seconds
from fsdp_bench.sweep.results.flat import most_of_any_rank

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

UNKNOWN = "unknown"
DISAGREEMENT = 0.1
"""How far the two parts of a step that are exposed communication may be apart before it is said."""
NARROWEST = 100
"""Columns of characters that a table may take wherever it is printed."""


@dataclass(frozen=True)
class Column:
    """One column: its header, what it prints of a trial, and when it is left out."""

    header: str
    cell: Callable[[TrialRecord], str]
    is_setting: bool = False
    """Whether it is a condition: where all trials share its value, it is said once above the table."""
    rank: int = 0
    """Where the table is too wide, the column with the highest rank goes first; 0 stays."""


def _allocated(record: TrialRecord) -> str:
    memory = record.worst_rank_memory
    return _bytes(memory.peak_allocated_bytes if memory else None)


def _phase(record: TrialRecord) -> str:
    return record.worst_rank_memory.peak_phase or UNKNOWN if record.worst_rank_memory else UNKNOWN


def _strategy(record: TrialRecord) -> str:
    requested, effective = record.setup.strategy.value, record.effective_strategy
    return requested if effective == requested else f"{requested} (ran {effective})"


def _outcome(record: TrialRecord) -> str:
    return record.outcome.value if record.fits or record.outcome is not Outcome.OK else "ok, with retries"


def _speed(record: TrialRecord) -> str:
    speed = record.tokens_per_second_per_gpu
    return f"{speed:,.0f}" if speed else UNKNOWN


COLUMNS = (
    Column("model", lambda r: r.model.name, is_setting=True),
    Column("world\nsize", lambda r: f"{r.setup.world_size}{' emulated' * (r.device == 'emulated')}", is_setting=True),
    Column("strategy", _strategy),
    Column("api", lambda r: r.setup.api.value, is_setting=True),
    Column("precision", lambda r: str(r.setup.precision), is_setting=True),
    Column("check-\npointing", lambda r: r.setup.checkpointing.value, is_setting=True),
    Column("offload", lambda r: r.setup.offload.value, is_setting=True),
    Column("batch", lambda r: str(r.setup.micro_batch_size), is_setting=True),
    Column("sequence", lambda r: str(r.setup.sequence_length), is_setting=True),
    Column("outcome", _outcome, is_setting=True),
    Column("peak\nallocated", _allocated),
    Column("in phase", _phase, rank=3),
    Column("reserved", lambda r: _bytes(most_of_any_rank(r, "peak_reserved_bytes")[0]), rank=2),
    Column("step", lambda r: _seconds(r.step_seconds), rank=5),
    Column("tokens/s\nper rank", _speed),
    Column("MFU", lambda r: UNKNOWN if r.mfu is None else f"{r.mfu:.1%}", rank=1),
    Column("comm.\ntotal", lambda r: _seconds(r.communication_seconds), rank=6),
    Column("comm.\nexposed",
           lambda r: _seconds(r.exposed_communication_seconds) + ("*" if disagrees(r) else ""), rank=4),
)  # fmt: skip
TEXT_COLUMNS = COLUMNS[:10]


def print_table(records: list[TrialRecord], console: Console) -> None:
    """Print one row a trial that ran, by model and world size and then from the least memory; end in a conclusion."""
    ran = sorted((record for record in records if record.outcome is not Outcome.SKIPPED), key=_order)
    width = max(console.width, NARROWEST)
    table, left_out = _fitting_table(ran, width)
    terminal.print_table(table, console, width)
    ending = [conclusion(ran)] if ran else []
    for text in [*_left_out_lines(left_out), *_footnotes(records, ran), *ending]:
        for line in textwrap.wrap(printable(text), width, break_on_hyphens=False):
            terminal.note(console, line)


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


def _fitting_table(ran: list[TrialRecord], width: int) -> tuple[Table, list[Column]]:
    """Return a table of at most so many characters, if its settings leave room for that, and the columns left out."""
    from rich.measure import Measurement

    shown = [column for column in COLUMNS if not _is_shared(column, ran) and not _is_unknown(column, ran)]
    left_out: list[Column] = []
    measuring = terminal.new_console(width=1000)
    while True:
        table = _table(ran, shown)
        widest = max(shown, key=lambda column: column.rank, default=None)
        if widest is None or not widest.rank or Measurement.get(measuring, measuring.options, table).maximum <= width:
            return table, left_out
        shown.remove(widest)
        left_out.append(widest)


def _table(ran: list[TrialRecord], shown: list[Column]) -> Table:
    from rich.table import Table

    table = Table(
        title=_title(ran), title_justify="left", header_style="bold", box=None, padding=(0, 1), collapse_padding=True,
        pad_edge=False,
    )  # fmt: skip
    for column in shown:
        table.add_column(column.header, justify="left" if column in TEXT_COLUMNS else "right", no_wrap=True)
    for record in ran:
        terminal.add_row(table, (column.cell(record) for column in shown))
    return table


def _is_shared(column: Column, ran: list[TrialRecord]) -> bool:
    return column.is_setting and len({column.cell(record) for record in ran}) == 1


def _is_unknown(column: Column, ran: list[TrialRecord]) -> bool:
    return bool(column.rank and ran) and all(column.cell(record) == UNKNOWN for record in ran)


def _left_out_lines(left_out: list[Column]) -> list[str]:
    if not left_out:
        return []
    names = ", ".join(column.header.replace("-\n", "").replace("\n", " ") for column in left_out)
    return [f"left out at this width, but in trials.csv: {names}"]


def _title(ran: list[TrialRecord]) -> str:
    counts = Counter(record.outcome.value for record in ran)
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    kind = "live tensor bytes" if any(r.hardware == "cpu" for r in ran) else "torch.cuda.max_memory_allocated"
    title = f"measured: {len(ran)} trials ({outcomes}); peak allocated is {kind} of the worst rank, times are medians"
    shared = [
        _shared(column, ran[0])
        for column in COLUMNS
        if _is_shared(column, ran) and not (column.header == "outcome" and ran[0].fits)
    ]
    unknown = [column.header.replace("\n", " ") for column in COLUMNS if _is_unknown(column, ran)]
    lines = [title, f"with {', '.join(shared)}" if shared else ""]
    lines.append(f"unknown here: {', '.join(unknown)}" if unknown else "")
    return "\n".join(filter(None, lines))


def _shared(column: Column, record: TrialRecord) -> str:
    """Return a condition that all trials share: ``sequence 2048``; what a value says by itself stands alone."""
    name, value = column.header.replace("-\n", "").replace("\n", " "), column.cell(record)
    return value if name in ("model", "api", "precision", "outcome") else f"{name} {value}"


def _footnotes(records: list[TrialRecord], ran: list[TrialRecord]) -> list[str]:
    """Return what was skipped, what marks mean, what is suspect, what MFU is of, and the models' shapes."""
    skipped = Counter(record.reason for record in records if record.outcome is Outcome.SKIPPED)
    lines = [f"skipped {count}: {reason}" for reason, count in skipped.items()]
    if any(map(disagrees, ran)):
        lines.append(
            "* more than 10 points away, as a part of its step, from what steps without communication save"
            " (fsdp-bench report RESULTS --communication)"
        )
    if any(record.device == "emulated" for record in ran):
        lines.append(
            "emulated: rank 0 of the world, alone; collectives end at once, so that its steps, tokens/s and MFU are the"
            " job's compute, without communication"
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
    """Whether the two ways to find exposed communication are far apart."""
    return (record.exposed_disagreement or 0.0) > DISAGREEMENT


def _bytes(value: int | None) -> str:
    return UNKNOWN if value is None else format_gib(value)


def _seconds(value: float | None) -> str:
    return UNKNOWN if value is None else format_seconds(value)
