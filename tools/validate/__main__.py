"""``python -m tools.validate``: predictions beside dry runs and rehearsals of drawn setups, and published numbers.

A user's own results are compared by ``fsdp-bench validate``.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.progress import Progress

from fsdp_bench.catalog.lookup import CODES
from fsdp_bench.cli.common.lists import Count
from fsdp_bench.cli.common.options import given_options
from fsdp_bench.cli.common.printing import save_chart
from fsdp_bench.report.terminal import new_console, print_lines
from fsdp_bench.report.validation import format_validation
from fsdp_bench.spec.codec import to_builtins, to_json
from fsdp_bench.spec.errors import ExitCode, FsdpBenchError, SpecError, printable
from fsdp_bench.spec.subprocesses.dry_run import KernelSet
from fsdp_bench.validate.memory import MemoryComparison, Summary
from tools.validate.dry_run import validate_dry_runs
from tools.validate.published.peaks import compare_fits, compare_published, format_fits, format_published
from tools.validate.published.ranges import format_speed
from tools.validate.published.rehearsed import (
    compare_rehearsed,
    compare_rehearsed_outcomes,
    compare_rehearsed_speeds,
    format_rehearsed,
    read_rehearsed,
    summarize,
)
from tools.validate.published.sizes import compare_published_sizes, published_document, published_slide, published_text
from tools.validate.published.speed import compare_speed
from tools.validate.random_setups import Code
from tools.validate.random_setups import Progress as ShowProgress
from tools.validate.rehearsal import validate_rehearsals

_OPTIONS = {
    "dry-run": ("cells", "seed", "kernels", "real-tensors", "code", "model-type"),
    "rehearsal": ("cells", "seed", "compiled", "float8", "code", "model-type"),
    "published": ("rehearsed",),
    "published-sizes": ("chart",),
}
"""The options that only some references take, by reference."""


@click.command("validate", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--against", required=True, type=click.Choice(list(_OPTIONS)), help="What predictions are compared with.")
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
@click.option(
    "--rehearsed",
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    help="Compare records of rehearsals of published runs instead of predictions, for published.",
)
@click.option("--chart", type=click.Path(path_type=Path), help="Draw the comparison, for published-sizes.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(
    against: str,
    cells: int,
    seed: int,
    kernels: KernelSet,
    real_tensors: bool,
    code: Code,
    model_type: str | None,
    compiled: bool,
    float8: bool,
    rehearsed: Path | None,
    chart: Path | None,
    as_json: bool,
) -> int:
    """Compare predictions with dry runs or rehearsals of drawn setups, or with published numbers.

    \b
    python -m tools.validate --against dry-run --cells 50
    python -m tools.validate --against dry-run --code huggingface --cells 40
    python -m tools.validate --against rehearsal --cells 50 --seed 7
    python -m tools.validate --against published
    """
    _refuse_unused(against)
    if against == "published":
        return _published(as_json) if rehearsed is None else _rehearsed(rehearsed, as_json)
    if against == "published-sizes":
        return _published_sizes(chart, as_json)
    if against == "rehearsal":
        _refuse_unrehearsed(code, model_type, float8)
        with _progress("rehearsals") as show:
            found = validate_rehearsals(cells, seed, compiled, show, code, model_type, float8)
        return _compared(*found, as_json)
    _refuse_unlike(code, model_type, kernels, real_tensors)
    with _progress("dry runs") as show:
        found = validate_dry_runs(cells, seed, kernels, real_tensors, show, code, model_type)
    _compared(*found, as_json)
    # The reference is exact with real tensors, so every cell must be equal.
    differ = real_tensors and found[1].num_equal < found[1].num_cells
    return ExitCode.CRASHED if differ else ExitCode.DONE


def _refuse_unused(against: str) -> None:
    for name in (given.replace("_", "-") for given in given_options()):
        owners = [owner for owner, options in _OPTIONS.items() if name in options]
        if owners and against not in owners:
            raise SpecError(
                f"--{name} means nothing with --against {against}; it goes with --against {' or '.join(owners)}"
            )


def _refuse_unrehearsed(code: Code, model_type: str | None, float8: bool) -> None:
    if code == "torchtitan":
        raise SpecError("--code: 'torchtitan' is not allowed with --against rehearsal; benchmark or huggingface")
    if model_type is not None and code == "benchmark":
        raise SpecError("--model-type goes with --code huggingface")
    if float8 and code != "benchmark":
        raise SpecError(f"--float8: is for benchmark models, not --code {code}")


def _refuse_unlike(code: Code, model_type: str | None, kernels: KernelSet, real_tensors: bool) -> None:
    """Refuse options of benchmark models with other code, and the other way round."""
    if real_tensors and kernels != "cpu":
        raise SpecError(f"--real-tensors: run on the CPU; not with --kernels {kernels}")
    if code == "benchmark" and model_type is not None:
        raise SpecError("--model-type goes with --code huggingface or torchtitan")
    given = [name.replace("_", "-") for name in ("kernels", "real_tensors") if name in given_options()]
    if code != "benchmark" and given:
        raise SpecError(f"--{given[0]}: is for benchmark models; --code {code} dry-runs CUDA's kernels")


@contextmanager
def _progress(what: str) -> Iterator[ShowProgress]:
    with Progress(console=new_console(error=True)) as bar:
        task = bar.add_task(what, total=None)

        def show(done: int, total: int, text: str) -> None:
            bar.update(task, completed=done, total=total or None, description=printable(text))

        yield show


def _print(as_json: bool, document: dict[str, Any], text: str) -> int:
    if as_json:
        sys.stdout.write(to_json(document).decode())
    else:
        print_lines(text)
    return ExitCode.DONE


def _compared(comparisons: list[MemoryComparison], summary: Summary, as_json: bool) -> int:
    document = {"summary": to_builtins(summary), "cells": to_builtins(comparisons)}
    return _print(as_json, document, format_validation(comparisons, summary))


def _published(as_json: bool) -> int:
    rows, fits, (speeds, summary) = compare_published(), compare_fits(), compare_speed()
    throughput = {"rows": to_builtins(speeds), "summary": to_builtins(summary)}
    document = {"memory": to_builtins(rows), "fits": to_builtins(fits), "throughput": throughput}
    texts = (format_published(rows), format_fits(fits), format_speed(speeds, summary))
    return _print(as_json, document, "\n\n".join(texts))


def _rehearsed(folder: Path, as_json: bool) -> int:
    records = read_rehearsed(folder)
    peaks, speeds = compare_rehearsed(records), compare_rehearsed_speeds(records)
    outcomes = compare_rehearsed_outcomes(records)
    first, other = (summarize([peak for peak in peaks if peak.is_first is flag]) for flag in (True, False))
    summary = {"first": to_builtins(first), "other": to_builtins(other)}
    document = {"summary": summary, "peaks": peaks, "speeds": speeds, "outcomes": outcomes}
    return _print(as_json, document, format_rehearsed(records, peaks, first, other, speeds, outcomes))


def _published_sizes(chart: Path | None, as_json: bool) -> int:
    found = compare_published_sizes()
    if chart is not None:
        save_chart(published_slide(found), chart)
    return _print(as_json, published_document(found), published_text(found))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; print an error in one line and return its exit code."""
    try:
        return command.main(arguments, "python -m tools.validate", standalone_mode=False) or ExitCode.DONE
    except click.ClickException as error:
        print(f"validate: {error.format_message()}", file=sys.stderr)
        return error.exit_code
    except FsdpBenchError as error:
        print(f"validate: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
