"""``fsdp-bench validate``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from fsdp_bench.cli.options import calibration_option
from fsdp_bench.spec.codec import to_builtins, to_json
from fsdp_bench.spec.dry_run import DryRunSpec
from fsdp_bench.spec.profile import read_profile
from fsdp_bench.sweep.drawn_cells import draw_cells
from fsdp_bench.sweep.store import read_records
from fsdp_bench.sweep.time_validation import compare_time, summarize_time
from fsdp_bench.sweep.validation import Comparison, Summary, compare_with_dry_run, compare_with_record, summarize


@click.command("validate")
@click.option(
    "--against", required=True, metavar="dry-run|published|RESULTS", help="What predictions are held against."
)
@click.option("--cells", default=200, type=click.IntRange(min=1), help="Cells of the drawn grid, for dry-run.")
@click.option("--seed", default=1, type=int, help="Seed of the drawn grid.")
@click.option("--kernels", default="cpu", type=click.Choice(["cpu", "cuda"]), help="Kernel set of the dry run.")
@calibration_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(against: str, cells: int, seed: int, kernels: Any, calibration: Path | None, as_json: bool) -> int:
    """Predicted against dry run, published or measured numbers: the error per cell and phase, the worst cells named.

    Measured results are also compared in time: with a calibration of the machine, or by their GPU's datasheet.
    """
    if against == "published":
        return _published(as_json)
    profile = read_profile(calibration) if calibration else None
    comparisons = _dry_run(cells, seed, kernels) if against == "dry-run" else _results(Path(against))
    name = f"dry run, kernels {kernels}, seed {seed}" if against == "dry-run" else f"measured in {against}"
    summary = summarize(comparisons, name)
    times = [] if against == "dry-run" else [compare_time(one, profile) for one in read_records(Path(against))]
    if as_json:
        time = {"summary": to_builtins(summarize_time(times)), "trials": to_builtins(times)} if times else None
        sys.stdout.write(to_json({**_document(comparisons, summary), "time": time}).decode())
        return 0
    from fsdp_bench.report.time_validation import format_time
    from fsdp_bench.report.validation import format_validation

    print(format_validation(comparisons, summary))
    if times:
        source = f"rates measured on {profile.machine}, {profile.measured_on}" if profile else "rates of datasheets"
        print("", format_time(times, summarize_time(times), source), sep="\n")
    return 0


def _dry_run(count: int, seed: int, kernels: Any) -> list[Comparison]:
    from rich.console import Console
    from rich.progress import Progress

    from fsdp_bench.sweep.dry_run import dry_runs

    cells = draw_cells(count, seed, kernels)
    specs = [DryRunSpec(model=cell.model, setup=cell.setup, kernels=kernels) for cell in cells]
    comparisons: list[Comparison | None] = [None] * count
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("dry runs", total=count)
        for index, answer in dry_runs(specs, os.cpu_count() or 1):
            comparisons[index] = compare_with_dry_run(cells[index], answer, kernels)
            progress.advance(task)
    return [comparison for comparison in comparisons if comparison is not None]


def _results(folder: Path) -> list[Comparison]:
    return [compare_with_record(record) for record in read_records(folder)]


def _published(as_json: bool) -> int:
    from fsdp_bench.predict.published import compare_published
    from fsdp_bench.predict.published_speed import compare_speed
    from fsdp_bench.report.published import format_published
    from fsdp_bench.report.published_speed import format_speed

    rows, (speeds, summary) = compare_published(), compare_speed()
    if as_json:
        throughput = {"rows": to_builtins(speeds), "summary": to_builtins(summary)}
        sys.stdout.write(to_json({"memory": to_builtins(rows), "throughput": throughput}).decode())
    else:
        print(format_published(rows), format_speed(speeds, summary), sep="\n\n")
    return 0


def _document(comparisons: list[Comparison], summary: Summary) -> dict[str, Any]:
    return {
        "summary": to_builtins(summary),
        "cells": [
            {
                "label": c.label,
                "error": c.error,
                "phases": {
                    phase: {"predicted_bytes": e.predicted_bytes, "reference_bytes": e.reference_bytes}
                    for phase, e in c.phases.items()
                },
            }
            for c in comparisons
        ],
    }
