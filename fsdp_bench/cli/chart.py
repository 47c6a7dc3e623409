"""``fsdp-bench chart RESULTS``."""

from __future__ import annotations

from pathlib import Path

import click

from fsdp_bench.spec.errors import ResultsError
from fsdp_bench.sweep.store import machine_description, read_frontier_of, read_records


@click.command("chart")
@click.argument("results", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="Folder for the pictures; by default the sweep's own.")
def command(results: Path, out: Path | None) -> int:
    """Draw the charts of the sweep in RESULTS, a folder results/MACHINE/SWEEP."""
    from fsdp_bench.report.charts import draw_all
    from fsdp_bench.report.frontier_chart import draw_frontier

    records, frontier = read_records(results), read_frontier_of(results)
    if len({record.sweep for record in records}) > 1:
        raise ResultsError(f"{results}: holds several sweeps; name one: results/MACHINE/SWEEP")
    folder = out or results
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if frontier is not None:
            paths = draw_frontier(frontier, folder)
        else:
            paths = draw_all(records, folder, machine_description(results))
    except OSError as error:
        raise ResultsError(f"{folder}: pictures cannot be written: {error.strerror}") from None
    for path in paths:
        print(path)
    if not paths:
        raise ResultsError(f"{results}: no trial here ended ok, so there is nothing to draw")
    return 0
