"""``fsdp-bench report RESULTS``."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from rich.console import Console

from fsdp_bench.report.communication_table import communication_rows, print_communication
from fsdp_bench.report.tables import print_table
from fsdp_bench.spec.codec import to_json
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.sweep.flat import flat_row
from fsdp_bench.sweep.store import read_records


@click.command("report")
@click.argument("results", type=click.Path(path_type=Path))
@click.option(
    "--communication", is_flag=True, help="A row a trial and kind: calls, bytes, seconds, bus bandwidth; exposed twice."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document: a row a trial, bytes and seconds.")
def command(results: Path, communication: bool, as_json: bool) -> int:
    """Print the table of the RESULTS in a folder: a sweep's, a machine's, or all."""
    records = read_records(results)
    if communication:
        _communication(records, as_json)
    elif as_json:
        sys.stdout.write(to_json({"source": "measured", "trials": [flat_row(r) for r in records]}).decode())
    else:
        print_table(records, Console())
    return 0


def _communication(records: list[TrialRecord], as_json: bool) -> None:
    if as_json:
        sys.stdout.write(to_json({"source": "measured", "trials": communication_rows(records)}).decode())
    else:
        print_communication(records, Console())
