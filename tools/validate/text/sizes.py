"""The published chart of largest models as text, with predictions and the conditions that it does not state."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_bench.plan.max_size import SettingResult
from fsdp_bench.report.table import table_columns, table_lines
from fsdp_bench.report.text.common import fact
from fsdp_bench.spec.units import format_count, format_gib
from tools.validate.published.sizes import ASSUMED, CLAIM, NOT_STATED, PRECISIONS, SERVER, SizeComparison


def published_text(found: Sequence[SizeComparison]) -> str:
    """Return the chart as a table, followed by the conditions that are not stated."""
    header = ["strategy", "batch", "reserved of the GPU", "published", *(f"predicted,\n{name}" for name in PRECISIONS)]
    rows = [
        [
            c.published.strategy.value,
            str(c.published.micro_batch_size),
            f"{c.published.as_printed} = {format_gib(c.published.reserved_bytes)}",
            format_count(c.published.num_parameters),
            *(_size(cell) for _, cell in c.cells()),
        ]
        for c in found
    ]
    return "\n".join([
        f"largest model on 8 x A10G ({SERVER}): published beside predicted; {CLAIM}",
        "",
        *table_lines(table_columns(header, rows, {"batch", *header[2:]}, ["reserved of the GPU"])),
        "",
        fact("source", f"{found[0].published.source} ({found[0].published.date})"),
        fact("not stated", "; ".join(NOT_STATED)),
        fact("assumed", "; ".join(ASSUMED)),
        fact("predicted is", "the largest that reserves no more, without allocation retries, than the published run"),
    ])  # fmt: skip


def _size(cell: SettingResult) -> str:
    return format_count(cell.at.question.model.num_parameters) if cell.at else "none fits"
