"""``fsdp-bench chart RESULTS``."""

from __future__ import annotations

from pathlib import Path

import click

from fsdp_bench.spec.errors import ResultsError
from fsdp_bench.sweep.store import machine_description, read_records


@click.command("chart")
@click.argument("results", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="Folder for the pictures; by default the sweep's own.")
def command(results: Path, out: Path | None) -> int:
    """Draw the charts of the sweep in RESULTS, a folder results/MACHINE/SWEEP."""
    from fsdp_bench.report.charts import draw_all

    records = read_records(results)
    if len({record.sweep for record in records}) > 1:
        raise ResultsError(f"{results}: holds several sweeps; name one: results/MACHINE/SWEEP")
    folder = out or results
    try:
        folder.mkdir(parents=True, exist_ok=True)
        paths = draw_all(records, folder, machine_description(results))
    except OSError as error:
        raise ResultsError(f"{folder}: pictures cannot be written: {error.strerror}") from None
    for path in paths:
        print(path)
    if not paths:
        raise ResultsError(f"{results}: no trial here ended ok, so there is nothing to draw")
    return 0
