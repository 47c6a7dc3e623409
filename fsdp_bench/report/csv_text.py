"""Rows as CSV: the text of a file that spreadsheets and pandas read."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from io import StringIO

from fsdp_bench.plan.table.columns import Row
from fsdp_bench.sweep.results.flat import csv_row


def csv_text(columns: Sequence[str], rows: Sequence[Row]) -> str:
    """Return rows as CSV: a line of column names, then a line for each row; what is not known is empty."""
    output = StringIO()
    writer = csv.DictWriter(output, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(csv_row({name: row[name] for name in columns}) for row in rows)
    return output.getvalue()
