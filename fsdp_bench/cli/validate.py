"""``fsdp-bench validate``: compare predictions with dry runs, rehearsals, published or measured numbers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal

import click

from fsdp_bench.catalog.lookup import CODES
from fsdp_bench.cli.common.lists import Count
from fsdp_bench.cli.common.options import calibration_option, given_options
from fsdp_bench.cli.common.sweeping import read_all_but_broken
from fsdp_bench.report.terminal import new_console, print_line, print_lines
from fsdp_bench.spec.codec import to_builtins, to_json, write_atomically
from fsdp_bench.spec.errors import SpecError, nearest, printable
from fsdp_bench.spec.exit_codes import ExitCode
from fsdp_bench.spec.profile import Profile, read_profile
from fsdp_bench.spec.subprocesses.dry_run import ModelCode
from fsdp_bench.validate.memory import MemoryComparison, Summary

Code = Literal["huggingface", "torchtitan", "benchmark"]

_OPTIONS = {
    "dry-run": ("cells", "seed", "kernels", "real-tensors", "code", "model-type"),
    "rehearsal": ("cells", "seed", "compiled", "float8", "code", "model-type"),
    "published": ("rehearsed",),
    "RESULTS": ("calibration", "page"),
}
"""The options that only one reference takes, by reference."""


@click.command("validate")
@click.option(
    "--against",
    required=True,
    metavar="dry-run|rehearsal|published|RESULTS",
    help="What predictions are compared with.",
)
@click.option(
    "--cells", default=200, show_default=True, type=Count(), help="Setups drawn at random, for dry-run and rehearsal."
)
@click.option("--seed", default=1, show_default=True, type=int, help="Seed of the random draw, for both.")
@click.option(
    "--kernels",
    default="cpu",
    show_default=True,
    type=click.Choice(["cpu", "cuda"]),
    help="Predict and dry-run CUDA or CPU operators, for dry-run.",
)
@click.option(
    "--real-tensors",
    is_flag=True,
    help="Draw small models, and train each also with real tensors on the CPU, for dry-run.",
)
@click.option(
    "--code",
    default="benchmark",
    show_default=True,
    type=click.Choice(CODES),
    help="Draw benchmark models, or small ones of the catalogue in Hugging Face's code, or, for dry-run, torchtitan's.",
)
@click.option(
    "--model-type",
    metavar="NAME",
    help="With --code huggingface or torchtitan: of one architecture, as in config.json.",
)
@click.option("--compiled", is_flag=True, help="Draw setups whose blocks are compiled, for rehearsal.")
@click.option("--float8", is_flag=True, help="Draw setups in float8, for rehearsal of benchmark models.")
@calibration_option
@click.option(
    "--rehearsed",
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    help="Compare records of rehearsals of published runs instead of predictions, for published.",
)
@click.option("--page", type=click.Path(path_type=Path), help="Write the comparison with RESULTS as a page (.md).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(
    against: str,
    cells: int,
    seed: int,
    kernels: Any,
    real_tensors: bool,
    code: Code,
    model_type: str | None,
    compiled: bool,
    float8: bool,
    calibration: Path | None,
    rehearsed: Path | None,
    page: Path | None,
    as_json: bool,
) -> int:
    """Compare predictions with dry runs, rehearsals, published or measured numbers: errors per phase and the largest.

    Measured results are also compared in time: with a calibration of the machine, or by their GPU's datasheet.

    \b
    fsdp-bench validate --against dry-run --cells 50
    fsdp-bench validate --against dry-run --code huggingface --cells 40
    fsdp-bench validate --against rehearsal --cells 50 --seed 7
    fsdp-bench validate --against results/h200/throughput --page validation.md
    """
    _refuse_unused(against)
    if page is not None and page.suffix.lower() != ".md":
        raise SpecError(f"--page: {str(page)!r} is not allowed; the page is Markdown, a file that ends in .md")
    if real_tensors and kernels != "cpu":
        raise SpecError(f"--real-tensors: run on the CPU; not with --kernels {kernels}")
    if against == "published":
        return _published(as_json) if rehearsed is None else _rehearsed(rehearsed, as_json)
    if against == "rehearsal":
        return _against_rehearsals(cells, seed, compiled, float8, code, model_type, as_json)
    if code != "benchmark":
        if given := [name for name in ("kernels", "real_tensors") if name in given_options()]:
            name = given[0].replace("_", "-")
            raise SpecError(f"--{name}: is for benchmark models; --code {code} dry-runs CUDA's kernels")
        return _against_architectures(cells, seed, model_type, code, as_json)
    if model_type is not None:
        raise SpecError("--model-type goes with --code huggingface or torchtitan")
    if against == "dry-run":
        return _against_dry_runs(cells, seed, kernels, real_tensors, as_json)
    return _against_results(Path(against), read_profile(calibration) if calibration else None, page, as_json)


def _refuse_unused(against: str) -> None:
    """Refuse options that would be ignored, and a reference that is neither known nor a folder."""
    kind = against if against in _OPTIONS else "RESULTS"
    if kind == "RESULTS" and not Path(against).exists() and (close := nearest(against, [*_OPTIONS][:3])):
        raise SpecError(f"--against: {against!r} is no folder of results{close}")
    for name in (given.replace("_", "-") for given in given_options()):
        owners = [owner for owner, options in _OPTIONS.items() if name in options]
        if owners and kind not in owners:
            raise SpecError(
                f"--{name} means nothing with --against {against}; it goes with --against {' or '.join(owners)}"
            )


def _against_dry_runs(cells: int, seed: int, kernels: Any, real_tensors: bool, as_json: bool) -> int:
    from rich.progress import Progress

    from fsdp_bench.report.validation.memory import format_validation
    from fsdp_bench.validate.dry_run import validate_dry_runs

    with Progress(console=new_console(error=True)) as bar:
        task = bar.add_task("dry runs", total=None)
        comparisons, summary = validate_dry_runs(
            cells, seed, kernels, real_tensors, lambda done, total: bar.update(task, completed=done, total=total)
        )
    if as_json:
        sys.stdout.write(to_json(_document(comparisons, summary)).decode())
    else:
        print_lines(format_validation(comparisons, summary))
    # The reference is exact with real tensors, so every cell must be equal.
    differ = real_tensors and summary.num_equal < summary.num_cells
    return ExitCode.CRASHED if differ else ExitCode.DONE


def _against_architectures(cells: int, seed: int, model_type: str | None, code: ModelCode, as_json: bool) -> int:
    from rich.progress import Progress

    from fsdp_bench.report.validation.memory import format_validation
    from fsdp_bench.validate.dry_run import validate_architectures

    with Progress(console=new_console(error=True)) as bar:
        task = bar.add_task("dry runs", total=None)
        comparisons, summary = validate_architectures(
            cells,
            seed,
            model_type,
            lambda done, total: bar.update(task, completed=done, total=total, description="dry runs"),
            lambda what: bar.update(task, description=printable(what)),
            code,
        )
    if as_json:
        sys.stdout.write(to_json(_document(comparisons, summary)).decode())
    else:
        print_lines(format_validation(comparisons, summary))
    return ExitCode.DONE


def _against_rehearsals(
    cells: int, seed: int, compiled: bool, float8: bool, code: Code, model_type: str | None, as_json: bool
) -> int:
    if code == "torchtitan":
        raise SpecError("--code: 'torchtitan' is not allowed with --against rehearsal; benchmark or huggingface")
    if model_type is not None and code == "benchmark":
        raise SpecError("--model-type goes with --code huggingface")
    if float8 and code != "benchmark":
        raise SpecError(f"--float8: is for benchmark models, not --code {code}")
    from rich.progress import Progress

    from fsdp_bench.report.validation.memory import format_validation
    from fsdp_bench.validate.rehearsal import validate_rehearsals

    with Progress(console=new_console(error=True)) as bar:
        task = bar.add_task("rehearsals", total=cells)
        comparisons, summary = validate_rehearsals(
            cells, seed, compiled, lambda done, _total: bar.update(task, completed=done), code, model_type, float8
        )
    if as_json:
        sys.stdout.write(to_json(_document(comparisons, summary)).decode())
    else:
        print_lines(format_validation(comparisons, summary))
    return ExitCode.DONE


def _against_results(folder: Path, profile: Profile | None, page: Path | None, as_json: bool) -> int:
    from fsdp_bench.report.validation.memory import agreement_line, format_validation
    from fsdp_bench.report.validation.page import rates_text, validation_page
    from fsdp_bench.report.validation.step_time import format_time
    from fsdp_bench.validate.results import validate_results

    found = validate_results(str(folder), read_all_but_broken(folder), profile)
    if page is not None:
        _write_page(page, validation_page(found))
    if as_json:
        time = {"summary": to_builtins(found.time_summary), "trials": to_builtins(found.times)}
        document = _document(found.comparisons, found.summary)
        sys.stdout.write(to_json({**document, "time": time, "agreements": to_builtins(found.agreements)}).decode())
        return ExitCode.DONE
    print_lines(format_validation(found.comparisons, found.summary))
    print_lines("\n" + format_time(found.times, found.time_summary, rates_text(found)))
    if (line := agreement_line(found.agreements)) is not None:
        print_lines(f"\n{line}")
    return ExitCode.DONE


def _published(as_json: bool) -> int:
    from fsdp_bench.report.validation.published_fits import format_fits
    from fsdp_bench.report.validation.published_peaks import format_published
    from fsdp_bench.report.validation.published_speed import format_speed
    from fsdp_bench.validate.published.fits import compare_fits
    from fsdp_bench.validate.published.peaks import compare_published
    from fsdp_bench.validate.published.speed import compare_speed

    rows, fits, (speeds, summary) = compare_published(), compare_fits(), compare_speed()
    if as_json:
        throughput = {"rows": to_builtins(speeds), "summary": to_builtins(summary)}
        document = {"memory": to_builtins(rows), "fits": to_builtins(fits), "throughput": throughput}
        sys.stdout.write(to_json(document).decode())
    else:
        texts = (format_published(rows), format_fits(fits), format_speed(speeds, summary))
        print_lines("\n\n".join(texts))
    return ExitCode.DONE


def _rehearsed(folder: Path, as_json: bool) -> int:
    from fsdp_bench.report.validation.published_rehearsed import format_rehearsed
    from fsdp_bench.validate.published.rehearsed import (
        compare_rehearsed,
        compare_rehearsed_outcomes,
        compare_rehearsed_speeds,
        read_rehearsed,
        summarize,
    )

    records = read_rehearsed(folder)
    peaks, speeds = compare_rehearsed(records), compare_rehearsed_speeds(records)
    outcomes = compare_rehearsed_outcomes(records)
    first, other = (summarize([peak for peak in peaks if peak.is_first is flag]) for flag in (True, False))
    if as_json:
        summary = {"first": to_builtins(first), "other": to_builtins(other)}
        document = {"summary": summary, "peaks": to_builtins(peaks), "speeds": to_builtins(speeds)}
        document["outcomes"] = to_builtins(outcomes)
        sys.stdout.write(to_json(document).decode())
    else:
        print_lines(format_rehearsed(records, peaks, first, other, speeds, outcomes))
    return ExitCode.DONE


def _write_page(page: Path, text: str) -> None:
    try:
        write_atomically(page, text.encode())
    except OSError as error:
        raise SpecError(f"--page: {str(page)!r} cannot be written: {error.strerror or error}") from error
    print_line(f"page: {page}", error=True)


def _document(comparisons: list[MemoryComparison], summary: Summary) -> dict[str, Any]:
    return {"summary": to_builtins(summary), "cells": to_builtins(comparisons)}
