"""``fsdp-bench chart RESULTS``: draw the charts of a sweep."""

from pathlib import Path

import click

from fsdp_bench.cli.common.printing import read_all_but_broken
from fsdp_bench.report.terminal import print_line
from fsdp_bench.spec.errors import ResultsError
from fsdp_bench.sweep.results.load import machine_description, read_frontier_of, sweep_folders


@click.command("chart")
@click.argument("results", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="Folder for the charts; by default the sweep's own.")
def command(results: Path, out: Path | None) -> None:
    """Draw the charts of the sweep in RESULTS: results/MACHINE/SWEEP, or a folder above it that holds no other sweep.

    \b
    fsdp-bench chart results/MACHINE/SWEEP --out charts
    """
    from fsdp_bench.report.charts.frontier import draw_frontier
    from fsdp_bench.report.charts.trial_bars import draw_all

    home, *others = sweep_folders(results)
    if others:
        named = ", ".join(str(folder) for folder in (home, *others[:2])) + (", ..." if others[2:] else "")
        raise ResultsError(f"{results}: holds several sweeps; name one: {named}")
    records, frontier = read_all_but_broken(home), read_frontier_of(home)
    folder = out or home
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if frontier is not None:
            paths = draw_frontier(frontier, folder)
        else:
            paths = draw_all(records, folder, machine_description(home))
    except OSError as error:
        raise ResultsError(f"{folder}: pictures cannot be written: {error.strerror}") from None
    for path in paths:
        print_line(path)
    if not paths:
        raise ResultsError(f"{results}: no trial here ended ok, so there is nothing to draw")
