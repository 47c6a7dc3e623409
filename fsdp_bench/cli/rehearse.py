"""``fsdp-bench rehearse``: a real training command as one rank, on a stand-in for NVIDIA's libraries."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fsdp_bench.catalog.loader import load_user_catalog
from fsdp_bench.cli.common.assumptions import calibration_option, gpu_memory_option, headroom_option
from fsdp_bench.cli.common.interrupts import INTERRUPTED
from fsdp_bench.cli.common.lists import Count
from fsdp_bench.cli.common.options import FILE
from fsdp_bench.cli.common.printing import (
    COLOURS,
    PICTURES,
    TRACES,
    check_file,
    print_json,
    print_text,
    save_chart,
    write_rows,
    write_text,
)
from fsdp_bench.plan.rehearsal import Rehearsal, together, worst_of
from fsdp_bench.plan.rehearsal_document import rehearsal_document
from fsdp_bench.plan.rehearse_command import CommandToRehearse
from fsdp_bench.plan.script.each import answer_each, answered_row, each_document, in_order
from fsdp_bench.plan.script.rehearsals import Answered
from fsdp_bench.plan.script.variants import Variant, read_combinations
from fsdp_bench.report.terminal import print_line
from fsdp_bench.report.text.each import answered_line
from fsdp_bench.report.text.rehearsal import report_text, several
from fsdp_bench.spec.codec import to_json
from fsdp_bench.spec.errors import ExitCode, SpecError
from fsdp_bench.spec.subprocesses.rehearsal import RehearsalOutcome

if TYPE_CHECKING:
    from fsdp_bench.report.html.blocks import Page

OF_OUTPUT = ("chart", "csv", "page", "trace", "as_json")
"""Options that decide nothing that is rehearsed."""


@dataclass(frozen=True)
class Files:
    """The files that are asked for."""

    chart: Path | None
    csv: Path | None
    page: Path | None
    trace: Path | None

    def check(self, with_time: bool) -> None:
        """Refuse those that cannot be written, before anything is rehearsed. Raises SpecError."""
        endings = {"chart": PICTURES, "trace": TRACES}
        for option, path in (("chart", self.chart), ("csv", self.csv), ("html", self.page), ("trace", self.trace)):
            if path is not None:
                check_file(path, option, endings.get(option, ()))
        if self.trace is not None and not with_time:
            raise SpecError("trace: it is of the step whose time --time computes; add --time")


@click.command("rehearse", context_settings={"allow_interspersed_args": False})
@click.option("--server", metavar="NAME,..", help="Servers of the catalogue (fsdp-bench servers).")
@click.option("--gpu", metavar="NAME,..", help="Only GPUs; links and host memory are then unknown.")
@click.option("--nodes", metavar="N,..", help="Servers; 1 by default.")
@click.option("--gpus-per-node", metavar="N,..", help="GPUs used on each; by default all of the server's.")
@click.option(
    "--world-size",
    metavar="N,..",
    help="GPUs in total. Default: all of the server's, or as torchrun says; 1 for plain python.",
)
@click.option(
    "--each",
    multiple=True,
    metavar="NAME=A,B",
    help="Rehearse the command with each value in the place of {NAME}; {NAME:TEXT|OTHER} is TEXT where it is on.",
)
@click.option("--env", multiple=True, metavar="NAME=TEXT", help="Set a variable for the command; may have {NAME}.")
@click.option(
    "--edit",
    multiple=True,
    metavar="FILE:KEY=TEXT",
    help="Let the command find a value in a YAML, TOML or JSON file, which stays as it is; may have {NAME}.",
)
@click.option("--strategy", metavar="all|NAME,..", help="The sharding strategies, for what accelerate launch starts.")
@click.option("--power", metavar="500W", help="Power limit of each GPU (nvidia-smi -pl), for --time.")
@click.option("--catalog", type=FILE, metavar="FILE", help="A TOML file with further hardware.")
@gpu_memory_option
@headroom_option
@click.option(
    "--steps",
    metavar="N|all",
    help="End the script after so many optimizer steps. Default: 4, or 3 if the third repeats the second.",
)
@click.option("--rank", type=int, default=None, metavar="N", help="The rank to run. Default: 0.")
@click.option("--ranks", metavar="0,7|all|stages", help="Run several ranks in turn and name the worst.")
@click.option("--max-gpu-memory", metavar="70GiB", help="Exit with 3 if a GPU needs more: for CI.")
@click.option(
    "--random-weights", is_flag=True, help="Models need no checkpoint (transformers, diffusers, timm, torchvision)."
)
@click.option(
    "--random-data",
    is_flag=False,
    flag_value="",
    metavar="[WORDS|COLUMN=KIND,..]",
    help="Tokenizers and datasets that are not here are random, of so many words a text (2048).",
)
@click.option(
    "--balanced-routing",
    is_flag=True,
    help="Mixture of experts: each expert gets equally many tokens. Without it, unknown.",
)
@click.option(
    "--unsupported",
    type=click.Choice(["stop", "warn"]),
    default="stop",
    help="If the script calls an unsupported CUDA function: stop (default), or warn and go on, without cuDNN.",
)
@click.option("--time", is_flag=True, help="Also how long a step would take, with the rates that predict uses.")
@click.option(
    "--tokens-per-step",
    type=Count(),
    metavar="N",
    help="With --time: tokens of one rank in an optimizer step. By default as many as its embedding looks up.",
)
@calibration_option
@click.option(
    "--timeout",
    type=float,
    metavar="SECONDS",
    help="End the script if it takes longer, and say what was seen. Default: never.",
)
@click.option("--chart", type=FILE, metavar="FILE.png", help="Draw memory over time; of several as bars.")
@click.option("--csv", type=FILE, metavar="FILE", help="Write the table of several, bytes and seconds.")
@click.option(
    "--html", "page", type=FILE, metavar="FILE.html", help="Write a page: memory, the lines that hold it, the step."
)
@click.option(
    "--trace", type=FILE, metavar="FILE.json", help="With --time: the step for ui.perfetto.dev; .json.gz too."
)
@click.option("--snapshot", type=FILE, metavar="FILE.pickle", help="For pytorch.org/memory_viz.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND")
def command(**given: Any) -> int:
    """Run one rank of a real, unmodified training command without a GPU, and say whether it fits.

    PyTorch's CUDA build runs on a stand-in for NVIDIA's libraries: memory is counted, kernels do nothing. COMMAND is
    what you would start on the cluster: python, torchrun or accelerate launch, and its arguments.

    \b
    fsdp-bench rehearse --server p5.48xlarge --nodes 8 -- torchrun train.py
    fsdp-bench rehearse --gpu H100-SXM --world-size 64 -- python train.py
    fsdp-bench rehearse --time --gpu H100-SXM --html page.html -- python train.py
    fsdp-bench rehearse --gpu H200 --each bs=1,2 -- torchrun train.py --bs {bs}

    Your files stay as they are: changes by the script reach the disk in temporary folders alone. A machine that cannot
    promise this is named before the script starts.

    Exit codes: 0: fits, or unknown; of several, one does. 3: does not fit, or only with allocation retries.
    2: bad input. 1: the script failed, or --timeout ended it. 130: interrupted. What was seen until then is printed;
    of several, the same command goes on where it ended.
    """
    files = Files(*(given.pop(name) for name in OF_OUTPUT[:-1]))
    files.check(given["time"])
    as_json, words = given.pop("as_json"), given.pop("words")
    variants = read_combinations(words, **read_options(given)).variants()
    if len(variants) > 1:
        return _each(variants, files, as_json)
    if files.csv is not None:
        raise SpecError("csv: it is for several combinations: --each NAME=A,B, or several servers")
    assert variants[0].asked is not None
    return _one(variants[0].asked, shlex.join(variants[0].command), files, as_json)


def read_options(given: dict[str, Any]) -> dict[str, Any]:
    """Return the options as Python takes them. Raises SpecError for a bad catalogue, or ranks given twice."""
    rank, ranks = given.pop("rank"), given.pop("ranks")
    if rank is not None and ranks is not None:
        raise SpecError("--rank and --ranks each say which ranks; keep one")
    return {
        "ranks": ranks if ranks is not None else rank or 0,
        "stops_at_unsupported": given.pop("unsupported") == "stop",
        "catalog": load_user_catalog(given.pop("catalog")).under_power(given.pop("power")),
        **given,
    }


def _one(asked: CommandToRehearse, command_line: str, files: Files, as_json: bool) -> int:
    """Rehearse one command, each of its ranks in turn."""
    ran = list[Rehearsal]()
    begin = "rehearsing rank {}: what the script prints follows"
    for one in asked.answers(lambda rank: print_line(begin.format(rank), error=True)):
        ran.append(one)
        if one.report.outcome is RehearsalOutcome.INTERRUPTED:
            break  # no rank after it
    found = together(ran)
    worst = worst_of(found)
    if as_json:
        documents = [rehearsal_document(one) for one in found]
        print_json({"ranks": documents} if max(len(asked.ranks), len(found)) > 1 else documents[0])
    else:
        print_text(several(found) if len(found) > 1 else report_text(worst), COLOURS[worst.fits])
    if files.chart is not None:
        from fsdp_bench.report.charts.rehearsal import rehearsal_slide

        save_chart(rehearsal_slide(worst), files.chart)
    if files.page is not None:
        from fsdp_bench.report.html.rehearsal import rehearsal_page

        _write_page(rehearsal_page(found, command_line), files.page)
    _write_trace({f"rank {one.report.rank} of {one.report.world_size}": one for one in found}, files.trace)
    outcomes = {one.report.outcome for one in found}
    if RehearsalOutcome.INTERRUPTED in outcomes:
        print_line(f"fsdp-bench: {INTERRUPTED}", error=True)
        return ExitCode.INTERRUPTED
    if outcomes & {RehearsalOutcome.FAILED, RehearsalOutcome.TIMED_OUT}:
        return ExitCode.CRASHED
    return ExitCode.DOES_NOT_FIT if worst.fits is False else ExitCode.DONE


def _write_page(page: Page, path: Path) -> None:
    from fsdp_bench.report.html.write import html

    write_text(path, html(page, date.today()), "html", "page")


def _write_trace(found: Mapping[str, Rehearsal], path: Path | None) -> None:
    """Write the steps by the names of their processes; if none is known, say why."""
    if path is None:
        return
    from fsdp_bench.report.trace import rehearsal_trace

    document = rehearsal_trace(found)
    if document is not None:
        write_text(path, to_json(document).decode(), "trace", "trace")
    else:
        why = next((one.why_no_time for one in found.values()), "nothing was rehearsed")
        print_line(f"no trace: {why}", error=True)


def _each(variants: Sequence[Variant], files: Files, as_json: bool) -> int:
    """Rehearse every combination, after which the best is the answer."""
    done, print_answered = list[Answered](), counted_lines(len(variants))

    def progress(one: Answered) -> None:
        done.append(one)
        print_answered(one)

    answers, is_interrupted = done, False
    try:
        answers = answer_each(variants, progress)
    except KeyboardInterrupt:
        if not done:
            raise
        is_interrupted = True
    if as_json:
        print_json(each_document(answers))
    else:
        from fsdp_bench.report.text.each import each_text

        print_text(each_text(answers), COLOURS[in_order(answers)[0].fits])
    if files.csv is not None:
        write_rows(files.csv, [answered_row(one) for one in in_order(answers)])
    if files.chart is not None:
        from fsdp_bench.report.charts.rehearsal import each_slide

        save_chart(each_slide(answers), files.chart)
    if files.page is not None:
        from fsdp_bench.report.html.rehearsal import each_page

        _write_page(each_page(answers), files.page)
    _write_trace({one.variant.title: one.worst for one in answers if one.worst is not None}, files.trace)
    if is_interrupted:
        print_line(f"fsdp-bench: {INTERRUPTED}", error=True)
        return ExitCode.INTERRUPTED
    return exit_code(answers)


def counted_lines(total: int | None = None) -> Callable[[Answered], None]:
    """Return a function that prints a line with the number of each rehearsal, and of how many, on standard error."""
    numbers, of = itertools.count(1), "" if total is None else f" of {total}"
    return lambda one: print_line(f"{next(numbers)}{of}: {answered_line(one)}", error=True)


def exit_code(answers: Sequence[Answered]) -> ExitCode:
    """Return the exit code of several rehearsals: DONE if anything fits, or nothing is known."""
    if in_order(answers)[0].fits:
        return ExitCode.DONE
    if any(one.has_failed for one in answers):
        return ExitCode.CRASHED
    return ExitCode.DOES_NOT_FIT if all(one.fits is False for one in answers) else ExitCode.DONE
