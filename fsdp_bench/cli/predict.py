"""``fsdp-bench predict``: predict memory, time and fit of setups."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fsdp_bench.cli.common.assumptions import AssumptionOptions, assumption_options, read_questions
from fsdp_bench.cli.common.exports import Exporter, export_options, read_export_options
from fsdp_bench.cli.common.options import (
    EVERY_OPTION,
    SetupCommand,
    SetupOptions,
    setup_options,
)
from fsdp_bench.cli.common.printing import (
    check_chart,
    check_csv,
    progress_line,
    read_table,
    refuse_unlike,
    save_chart,
    table_options,
    write_csv,
)
from fsdp_bench.plan.document import encoded
from fsdp_bench.plan.prediction import Prediction, answers
from fsdp_bench.plan.question import Question
from fsdp_bench.plan.table import PREDICTION_COLUMNS, TableOptions
from fsdp_bench.report.terminal import print_answer, print_lines
from fsdp_bench.spec.codec import to_json
from fsdp_bench.spec.errors import ExitCode, SpecError

if TYPE_CHECKING:
    from fsdp_bench.report.charts.description import Slide

_FILE = click.Path(path_type=Path)


@click.command("predict", cls=SetupCommand)
@setup_options(lists=EVERY_OPTION)
@assumption_options
@click.option("--chart", type=_FILE, metavar="FILE.png", help="Draw memory over the step; .svg too.")
@click.option("--step-chart", type=_FILE, metavar="FILE.png", help="Draw what runs when in the step, stream by stream.")
@click.option("--trade-off", type=_FILE, metavar="FILE.png", help="Draw memory against speed, one point per setup.")
@click.option(
    "--scaling", type=_FILE, metavar="FILE.png", help="Draw speed over the number of nodes, up to --nodes (64)."
)
@table_options
@export_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document: bytes and seconds.")
def command(
    options: SetupOptions,
    assumed: AssumptionOptions,
    chart: Path | None,
    step_chart: Path | None,
    trade_off: Path | None,
    scaling: Path | None,
    sort: str | None,
    only_fits: bool,
    columns: str | None,
    csv: Path | None,
    export: tuple[str, ...],
    export_dir: Path | None,
    as_json: bool,
) -> int:
    """Predict memory, time and fit of a setup, with the breakdown at the peak.

    Every option of the model, the hardware and the setup takes several values by comma, or all: --batch 1,2,4
    --compile on,off. Their combinations are a table, the fastest that fits first.

    \b
    fsdp-bench predict --model Llama-3.1-8B --server p5.48xlarge
    fsdp-bench predict --params 70B --server p5.48xlarge --nodes 4 --strategy all
    fsdp-bench predict --hf-config config.json --gpu H100-SXM --chart memory.png
    fsdp-bench predict --params 7B --server p5.48xlarge --nodes 1,2 --batch 1,2,4

    Exit codes: 0 it fits or that is unknown, 3 it does not fit (of several: none fits), 2 bad input.
    """
    table = read_table(PREDICTION_COLUMNS, sort, columns, only_fits, csv, as_json)
    asked = read_export_options(export, export_dir)
    questions = read_questions(options, assumed)
    if asked is not None and len(questions) > 1:
        raise SpecError(f"export: of one setup, not of {len(questions)}; give each option one value")
    if len(questions) == 1 and table.is_given and csv is None:
        raise SpecError("--sort, --only-fits and --columns are of a table of several setups; one was given")
    if asked is not None and str(csv) == "-":
        raise SpecError("csv: - prints nothing but the table; with --export name a file")
    possible = [question for question in questions if not question.impossible]
    if not possible:
        raise SpecError(questions[0].impossible)
    for path in (chart, step_chart, trade_off, scaling):
        if path is not None:
            check_chart(path)
    check_csv(csv)
    predictions = list(answers(possible, progress_line("setups", len(possible))))
    refused = [question for question in questions if question.impossible]
    for path, slide in _slides(predictions, refused, chart, step_chart, trade_off, scaling):
        save_chart(slide, path)
    if csv is not None:
        from fsdp_bench.report.text.prediction_table import arranged

        write_csv(csv, PREDICTION_COLUMNS, [row for _, row in arranged(predictions, refused, table)])
    exporter = Exporter(asked, options) if asked else None
    if str(csv) != "-" and not _print(predictions, questions, table, exporter, as_json):
        return ExitCode.BAD_INPUT
    nothing_fits = all(prediction.fits is False for prediction in predictions)
    return ExitCode.DOES_NOT_FIT if nothing_fits else ExitCode.DONE


def _print(
    predictions: Sequence[Prediction],
    questions: Sequence[Question],
    table: TableOptions,
    exporter: Exporter | None,
    as_json: bool,
) -> bool:
    """Print the answers, and return whether all was exported that was to be."""
    if as_json:
        exports = {} if exporter is None else exporter.document(predictions[0])
        sys.stdout.write(to_json({**_document(predictions, questions), **exports}).decode())
        return "error" not in exports
    from fsdp_bench.plan.remedies import remedies
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
        first, *lines = side_by_side(predictions, refused, table).split("\n")
        print_answer(first, None)
        print_lines("\n".join(lines))
    return True


def _document(predictions: Sequence[Prediction], questions: Sequence[Question]) -> dict[str, Any]:
    """Return the JSON document of one setup, or of several in the order of the options."""
    if len(questions) == 1:
        return encoded(predictions[0].document(), predictions[0].model)
    found = iter(predictions)
    documents = [(q if q.impossible else next(found)).document() for q in questions]
    return {"predictions": [encoded(one, q.model) for one, q in zip(documents, questions, strict=True)]}


def _slides(
    predictions: Sequence[Prediction],
    refused: Sequence[Question],
    chart: Path | None,
    step_chart: Path | None,
    trade_off: Path | None,
    scaling: Path | None,
) -> list[tuple[Path, Slide]]:
    """Make every chart before any is written, so that an error in one leaves no file."""
    made: list[tuple[Path, Slide]] = []
    if not any((chart, step_chart, trade_off, scaling)):
        return made
    refuse_unlike([prediction.question for prediction in predictions])
    questions = [prediction.question for prediction in predictions]
    if chart is not None:
        from fsdp_bench.report.charts.memory_timeline import timeline_slide

        made.append((chart, timeline_slide(predictions, refused)))
    if step_chart is not None:
        from fsdp_bench.report.charts.step import step_slide

        made.append((step_chart, step_slide(questions)))
    if trade_off is not None:
        from fsdp_bench.report.charts.trade_off import trade_off_slide

        made.append((trade_off, trade_off_slide(predictions)))
    if scaling is not None:
        from fsdp_bench.report.charts.scaling import scaling_slide

        made.append((scaling, scaling_slide(questions)))
    return made
