"""``fsdp-bench predict``: predict memory, time and fit of setups."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fsdp_bench.cli.common.charts import check_chart, save_figure
from fsdp_bench.cli.common.exports import Exporter, export_options, read_export_options
from fsdp_bench.cli.common.options import SetupCommand, SetupOptions, calibration_option, headroom_option, setup_options
from fsdp_bench.cli.common.setups import read_model, read_setups, sliding_window_of
from fsdp_bench.plan.document import document, refusal
from fsdp_bench.plan.gpu_memory_option import sized, stated_headroom, without_context
from fsdp_bench.plan.question import Prediction, Question, answer
from fsdp_bench.replay.host_memory import Build
from fsdp_bench.report.terminal import print_answer, print_lines
from fsdp_bench.spec.codec import to_json
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.exit_codes import ExitCode
from fsdp_bench.spec.profile import read_profile

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FILE = click.Path(path_type=Path)
LISTS = ("strategy", "api", "precision", "offload", "checkpointing", "optimizer")


@click.command("predict", cls=SetupCommand)
@setup_options(lists=LISTS)
@click.option(
    "--kernels",
    default="cuda",
    show_default=True,
    type=click.Choice(["cuda", "cpu"]),
    help="Predict CUDA or CPU operators.",
)
@click.option(
    "--load",
    default=Build.META.value,
    show_default=True,
    type=click.Choice([build.value for build in Build]),
    help="Where parameters are initialized before sharding: on meta, on rank 0's host memory, or on every rank's.",
)
@click.option("--gpu-memory", metavar="24GiB", help="GPU memory that a process can use, instead of the catalogue's.")
@headroom_option
@calibration_option
@click.option("--expandable-segments", is_flag=True, help="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.")
@click.option("--chart", type=_FILE, metavar="FILE.png", help="Draw memory over the step; .svg too.")
@click.option("--step-chart", type=_FILE, metavar="FILE.png", help="Draw what runs when in the step, stream by stream.")
@click.option("--trade-off", type=_FILE, metavar="FILE.png", help="Draw memory against speed, one point per setup.")
@click.option(
    "--scaling", type=_FILE, metavar="FILE.png", help="Draw speed over the number of nodes, up to --nodes (64)."
)
@export_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document: bytes and seconds.")
def command(
    options: SetupOptions,
    kernels: str,
    load: str,
    gpu_memory: str | None,
    headroom: str | None,
    calibration: Path | None,
    expandable_segments: bool,
    chart: Path | None,
    step_chart: Path | None,
    trade_off: Path | None,
    scaling: Path | None,
    export: tuple[str, ...],
    export_dir: Path | None,
    as_json: bool,
) -> int:
    """Predict memory, time and fit of a setup, with the breakdown at the peak.

    Options that take lists make several setups: a table, the fastest that fits first.

    \b
    fsdp-bench predict --model Llama-3.1-8B --server p5.48xlarge
    fsdp-bench predict --params 70B --server p5.48xlarge --nodes 4 --strategy all
    fsdp-bench predict --hf-config config.json --gpu H100-SXM --chart memory.png

    Exit codes: 0 it fits or that is unknown, 3 it does not fit (of several: none fits), 2 bad input.
    """
    asked = read_export_options(export, export_dir)
    setups, hardware = read_setups(options)
    if asked is not None and len(setups) > 1:
        raise SpecError(f"export: of one setup, not of {len(setups)}; give each option one value")
    model, window = read_model(options), sliding_window_of(options)
    profile = read_profile(calibration) if calibration else None
    if gpu_memory is not None:
        hardware = sized(hardware, gpu_memory, profile)
    elif hardware is not None:
        hardware = without_context(hardware, profile)
    kept = stated_headroom(headroom, hardware)
    questions = [
        Question(model, setup, hardware, kernels, Build(load), expandable_segments, profile, kept, window)
        for setup in setups
    ]
    refused = [question for question in questions if question.impossible]
    if len(refused) == len(questions):
        raise SpecError(refused[0].impossible)
    for path in (chart, step_chart, trade_off, scaling):
        if path is not None:
            check_chart(path)
    predictions = [answer(question) for question in questions if not question.impossible]
    for path, figure in _figures(predictions, refused, chart, step_chart, trade_off, scaling):
        save_figure(figure, path)
    _print(predictions, questions, Exporter(asked, options) if asked else None, as_json)
    nothing_fits = all(prediction.fits is False for prediction in predictions)
    return ExitCode.DOES_NOT_FIT if nothing_fits else ExitCode.DONE


def _print(
    predictions: Sequence[Prediction], questions: Sequence[Question], exporter: Exporter | None, as_json: bool
) -> None:
    if as_json:
        exports = {} if exporter is None else {"exports": exporter.write(predictions[0])}
        sys.stdout.write(to_json({**_document(predictions, questions), **exports}).decode())
        return
    from fsdp_bench.plan.advice.remedies import remedies
    from fsdp_bench.report.text.prediction import report
    from fsdp_bench.report.text.prediction_table import side_by_side

    if len(questions) == 1:
        answer_line, *lines = report(predictions[0], remedies(predictions[0])).split("\n")
        colour = {True: "green", False: "red", None: "yellow"}[predictions[0].fits]
        print_answer(answer_line, colour)
        print_lines("\n".join(lines))
        if exporter is not None:
            exporter.print(predictions[0])
    else:
        refused = [question for question in questions if question.impossible]
        first, *lines = side_by_side(predictions, refused).split("\n")
        print_answer(first, None)
        print_lines("\n".join(lines))


def _document(predictions: Sequence[Prediction], questions: Sequence[Question]) -> dict[str, Any]:
    """Return the JSON document of one setup, or of several in the order of the options."""
    if len(questions) == 1:
        return document(predictions[0])
    answers = iter(predictions)
    return {"predictions": [refusal(q) if q.impossible else document(next(answers)) for q in questions]}


def _figures(
    predictions: Sequence[Prediction],
    refused: Sequence[Question],
    chart: Path | None,
    step_chart: Path | None,
    trade_off: Path | None,
    scaling: Path | None,
) -> list[tuple[Path, Figure]]:
    """Make every chart before any is written, so that an error in one leaves no file."""
    made: list[tuple[Path, Figure]] = []
    questions = [prediction.question for prediction in predictions]
    if chart is not None:
        from fsdp_bench.report.charts.memory_timeline import timeline_figure

        made.append((chart, timeline_figure(predictions, refused)))
    if step_chart is not None:
        from fsdp_bench.report.charts.step import step_figure

        made.append((step_chart, step_figure(questions)))
    if trade_off is not None:
        from fsdp_bench.report.charts.trade_off import trade_off_figure

        made.append((trade_off, trade_off_figure(predictions)))
    if scaling is not None:
        from fsdp_bench.report.charts.scaling import scaling_figure

        made.append((scaling, scaling_figure(questions)))
    return made
