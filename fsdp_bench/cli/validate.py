"""``fsdp-bench validate``: compare predictions with a folder of results."""

from pathlib import Path

import click

from fsdp_bench.cli.common.assumptions import calibration_option
from fsdp_bench.cli.common.options import FILE
from fsdp_bench.cli.common.printing import print_json, read_all_but_broken, write_text
from fsdp_bench.report.terminal import print_lines
from fsdp_bench.spec.calibration_profile import read_profile
from fsdp_bench.spec.codec import to_builtins
from fsdp_bench.spec.errors import SpecError

DEVELOPERS = ("dry-run", "rehearsal", "published")
"""References of the comparisons that only tools/ in the clone makes: with drawn setups, and with published ones."""


@click.command("validate")
@click.option("--against", required=True, metavar="RESULTS", help="The folder of results that predictions are for.")
@calibration_option
@click.option("--page", type=FILE, help="Write the comparison as a page (.md).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(against: str, calibration: Path | None, page: Path | None, as_json: bool) -> None:
    """Compare predictions with measured or rehearsed results: errors per phase and the largest.

    Measured results are also compared in time: with a calibration of the machine, or by their GPU's datasheet.

    \b
    fsdp-bench validate --against results/xeon-2-cores/cpu --page validation.md
    """
    if page is not None and page.suffix.lower() != ".md":
        raise SpecError(f"--page: {str(page)!r} is not allowed; the page is Markdown, a file that ends in .md")
    if against in DEVELOPERS and not Path(against).exists():
        raise SpecError(
            f"--against: {against!r} is no folder of results; in the clone of fsdp-bench,"
            f" python -m tools.validate --against {against} compares what developers compare"
        )
    from fsdp_bench.report.validation import agreement_line, format_time, format_validation, rates_text, validation_page
    from fsdp_bench.validate.results import validate_results

    profile = read_profile(calibration) if calibration else None
    found = validate_results(str(Path(against)), read_all_but_broken(Path(against)), profile)
    if page is not None:
        write_text(page, validation_page(found, calibration), "--page", "page")
    if as_json:
        time = {"summary": to_builtins(found.time_summary), "trials": to_builtins(found.times)}
        document = {"summary": to_builtins(found.summary), "cells": to_builtins(found.comparisons)}
        print_json({**document, "time": time, "agreements": to_builtins(found.agreements)})
        return
    print_lines(format_validation(found.comparisons, found.summary))
    print_lines("\n" + format_time(found.times, found.time_summary, rates_text(found)))
    if (line := agreement_line(found.agreements)) is not None:
        print_lines(f"\n{line}")
