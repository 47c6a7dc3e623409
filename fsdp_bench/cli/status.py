"""``fsdp-bench status DIR``: how far sweeps are, while they run and later."""

from pathlib import Path

import click

from fsdp_bench.cli.common.printing import print_json
from fsdp_bench.report.measured.progress_text import status_lines
from fsdp_bench.report.terminal import print_lines
from fsdp_bench.sweep.progress import status_of


@click.command("status")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document: counts and seconds.")
def command(folder: Path, as_json: bool) -> None:
    """Say how far a sweep is: done, running, left, and the time left. DIR is a sweep's folder, or one above.

    Works while the sweep runs, on any node that sees the folder, and changes nothing.

    \b
    fsdp-bench status results
    fsdp-bench status results/MACHINE/SWEEP
    """
    found = status_of(folder)
    if as_json:
        print_json({"sweeps": found})
    else:
        for status in found:
            print_lines("\n".join(status_lines(status)))
