"""``fsdp-bench predict``: predict memory, time and fit of setups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fsdp_bench.cli.common.assumptions import AssumptionOptions, assumption_options, read_questions
from fsdp_bench.cli.common.exports import Export, export_options
from fsdp_bench.cli.common.options import EVERY_OPTION, FILE, SetupCommand, SetupOptions, setup_options
from fsdp_bench.cli.common.printing import (
    COLOURS,
    PICTURES,
    TRACES,
    AnswerTable,
    check_file,
    print_json,
    print_text,
    save_chart,
    show_progress,
    table_options,
    write_text,
)
from fsdp_bench.plan.document import encoded
from fsdp_bench.plan.prediction import Prediction, answers
from fsdp_bench.plan.question import Question
from fsdp_bench.plan.table import PREDICTION_COLUMNS
from fsdp_bench.spec.codec import to_json
from fsdp_bench.spec.errors import ExitCode, SpecError

if TYPE_CHECKING:
    from fsdp_bench.report.charts.description import Slide


_FEW = 20
"""Up to so many predictions are shown without progress: they take a second or two."""


@click.command("predict", cls=SetupCommand)
@setup_options(lists=EVERY_OPTION)
@assumption_options()
@click.option("--chart", type=FILE, metavar="FILE.png", help="Draw memory over the step; .svg too.")
@click.option("--step-chart", type=FILE, metavar="FILE.png", help="Draw what runs when in the step, stream by stream.")
@click.option("--trade-off", type=FILE, metavar="FILE.png", help="Draw memory against speed, one point per setup.")
@click.option(
    "--scaling", type=FILE, metavar="FILE.png", help="Draw speed over the number of nodes, up to --nodes (64)."
)
@click.option("--trace", type=FILE, metavar="FILE.json", help="Write the step for ui.perfetto.dev; .json.gz too.")
@table_options(PREDICTION_COLUMNS)
@export_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document: bytes and seconds.")
def command(
    options: SetupOptions,
    assumed: AssumptionOptions,
    table: AnswerTable,
    export: Export | None,
    trace: Path | None,
    as_json: bool,
    **charts: Path | None,
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
    questions = read_questions(options, assumed)
    _refuse_contradictions(questions, table, export)
    possible, refused = [q for q in questions if not q.impossible], [q for q in questions if q.impossible]
    files = {name: path for name, path in charts.items() if path is not None}
    for path in files.values():
        check_file(path, "chart", PICTURES)
    if trace is not None:
        check_file(trace, "trace", TRACES)
    total = len(possible)
    predictions = list(answers(possible, lambda done: show_progress(done, total) if total > _FEW else None))
    for name, slide in _slides(predictions, refused, files).items():
        save_chart(slide, files[name])
    if trace is not None:
        from fsdp_bench.report.trace import prediction_trace

        write_text(trace, to_json(prediction_trace(possible)).decode(), "trace", "trace")
    if table.csv is not None:
        from fsdp_bench.report.text.prediction_table import arranged

        table.write([row for _, row in arranged(predictions, refused, table.options)])
    exported = {}
    if as_json and not table.is_all_output:
        exported = {} if export is None else export.document(predictions[0], options)
        print_json({**_document(predictions, questions), **exported})
    elif not table.is_all_output:
        _print(predictions, refused, table)
        if export is not None:
            export.print(predictions[0], options)
    if "error" in exported:
        return ExitCode.BAD_INPUT
    nothing_fits = all(prediction.fits is False for prediction in predictions)
    return ExitCode.DOES_NOT_FIT if nothing_fits else ExitCode.DONE


def _refuse_contradictions(questions: Sequence[Question], table: AnswerTable, export: Export | None) -> None:
    if export is not None and len(questions) > 1:
        raise SpecError(f"export: of one setup, not of {len(questions)}; give each option one value")
    if len(questions) == 1 and table.options.is_given and table.csv is None:
        raise SpecError("--sort, --only-fits and --columns are of a table of several setups; one was given")
    if export is not None and table.is_all_output:
        raise SpecError("csv: - prints nothing but the table; with --export name a file")
    if all(question.impossible for question in questions):
        raise SpecError(questions[0].impossible)


def _print(predictions: Sequence[Prediction], refused: Sequence[Question], table: AnswerTable) -> None:
    from fsdp_bench.plan.remedies import remedies
    from fsdp_bench.report.text.prediction import report
    from fsdp_bench.report.text.prediction_table import side_by_side

    if len(predictions) + len(refused) == 1:
        print_text(report(predictions[0], remedies(predictions[0])), COLOURS[predictions[0].fits])
    else:
        print_text(side_by_side(predictions, refused, table.options))


def _document(predictions: Sequence[Prediction], questions: Sequence[Question]) -> dict[str, Any]:
    if len(questions) == 1:
        return encoded(predictions[0].document(), predictions[0].model)
    found = iter(predictions)
    documents = [(q if q.impossible else next(found)).document() for q in questions]
    return {"predictions": [encoded(one, q.model) for one, q in zip(documents, questions, strict=True)]}


def _slides(
    predictions: Sequence[Prediction], refused: Sequence[Question], files: Mapping[str, Path]
) -> dict[str, Slide]:
    """Make every chart before any is written, so that an error in one leaves no file."""
    if not files:
        return {}
    from fsdp_bench.plan.setup_text import PLACES, varying
    from fsdp_bench.report.charts.memory_timeline import timeline_slide
    from fsdp_bench.report.charts.scaling import scaling_slide
    from fsdp_bench.report.charts.step import step_slide
    from fsdp_bench.report.charts.trade_off import trade_off_slide

    questions = [prediction.question for prediction in predictions]
    if several := [field for field in varying([one.values for one in questions]) if field in PLACES]:
        what = several[0].replace("_", " ").replace("num ", "")
        raise SpecError(f"chart: the setups differ in {what}; a picture is of one")
    slides: dict[str, Callable[[], Slide]] = {
        "chart": lambda: timeline_slide(predictions, refused),
        "step_chart": lambda: step_slide(questions),
        "trade_off": lambda: trade_off_slide(predictions),
        "scaling": lambda: scaling_slide(questions),
    }
    return {name: slide() for name, slide in slides.items() if name in files}
