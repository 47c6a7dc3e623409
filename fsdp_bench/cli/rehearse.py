"""``fsdp-bench rehearse``: a real training command as one rank, on a stand-in for NVIDIA's libraries."""

from __future__ import annotations

from typing import Any

import click

from fsdp_bench.catalog.loader import load_user_catalog
from fsdp_bench.cli.common.assumptions import gpu_memory_option, headroom_option
from fsdp_bench.cli.common.interrupts import INTERRUPTED
from fsdp_bench.cli.common.lists import Count
from fsdp_bench.cli.common.options import FILE
from fsdp_bench.cli.common.printing import COLOURS, check_chart, print_json, print_text, save_chart
from fsdp_bench.plan.rehearsal import Rehearsal, worst_of
from fsdp_bench.plan.rehearsal_document import rehearsal_document
from fsdp_bench.plan.rehearse_command import CommandToRehearse, command_to_rehearse
from fsdp_bench.report.terminal import print_line
from fsdp_bench.report.text.rehearsal import report_text, several
from fsdp_bench.spec.errors import ExitCode, SpecError
from fsdp_bench.spec.subprocesses.rehearsal import RehearsalOutcome


@click.command("rehearse", context_settings={"allow_interspersed_args": False})
@click.option("--server", metavar="NAME", help="A server of the catalogue (fsdp-bench servers).")
@click.option("--gpu", metavar="NAME", help="Only a GPU; links and host memory are then unknown.")
@click.option("--nodes", type=Count(), metavar="N", help="Servers; 1 by default.")
@click.option("--gpus-per-node", type=Count(), metavar="N", help="GPUs used on each; by default all of the server's.")
@click.option(
    "--world-size",
    type=Count(),
    metavar="N",
    help="GPUs in total. Default: all of the server's, or as torchrun says; 1 for plain python.",
)
@click.option("--catalog", type=FILE, metavar="FILE", help="A TOML file with further hardware.")
@gpu_memory_option
@headroom_option
@click.option("--steps", default="4", metavar="N|all", help="End the script after so many optimizer steps. Default: 4.")
@click.option("--rank", type=int, default=None, metavar="N", help="The rank to run. Default: 0.")
@click.option("--ranks", metavar="0,7|all", help="Run several ranks in turn and name the worst.")
@click.option("--max-gpu-memory", metavar="70GiB", help="Exit with 3 if a GPU needs more: for CI.")
@click.option("--random-weights", is_flag=True, help="from_pretrained makes models from their configuration alone.")
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
@click.option(
    "--timeout",
    type=float,
    metavar="SECONDS",
    help="End the script if it takes longer, and say what was seen. Default: never.",
)
@click.option("--chart", type=FILE, metavar="FILE.png", help="Draw memory over time.")
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
    fsdp-bench rehearse --time --server p5.48xlarge -- torchrun train.py

    Your files stay as they are: changes by the script reach the disk in temporary folders alone. A machine that cannot
    promise this is named before the script starts.

    Exit codes: 0: fits, or unknown. 3: does not fit, or only with allocation retries.
    2: bad input. 1: the script failed, or --timeout ended it. 130: interrupted. What was seen until then is printed.
    """
    chart, as_json = given.pop("chart"), given.pop("as_json")
    if chart is not None:
        check_chart(chart)
    asked = read_command(given)
    found = run(asked)
    worst = worst_of(found)
    if as_json:
        documents = [rehearsal_document(one) for one in found]
        print_json({"ranks": documents} if len(asked.ranks) > 1 else documents[0])
    else:
        print_text(several(found) if len(found) > 1 else report_text(worst), COLOURS[worst.fits])
    if chart is not None:
        from fsdp_bench.report.charts.rehearsal import rehearsal_slide

        save_chart(rehearsal_slide(worst), chart)
    outcomes = {one.report.outcome for one in found}
    if RehearsalOutcome.INTERRUPTED in outcomes:
        print_line(f"fsdp-bench: {INTERRUPTED}", error=True)
        return ExitCode.INTERRUPTED
    if outcomes & {RehearsalOutcome.FAILED, RehearsalOutcome.TIMED_OUT}:
        return ExitCode.CRASHED
    return ExitCode.DOES_NOT_FIT if worst.fits is False else ExitCode.DONE


def read_command(given: dict[str, Any]) -> CommandToRehearse:
    """Read the command's options, but those of its output.

    Raises SpecError for what is not allowed.
    """
    rank, ranks = given.pop("rank"), given.pop("ranks")
    if rank is not None and ranks is not None:
        raise SpecError("--rank and --ranks each say which ranks; keep one")
    return command_to_rehearse(
        given.pop("words"),
        ranks=ranks if ranks is not None else rank or 0,
        stops_at_unsupported=given.pop("unsupported") == "stop",
        catalog=load_user_catalog(given.pop("catalog")),
        **given,
    )


def run(asked: CommandToRehearse) -> list[Rehearsal]:
    """Run each rank, after a line that says so; none after one that is interrupted."""
    found = []
    answers = asked.answers()
    for rank in asked.ranks:
        print_line(f"rehearsing rank {rank}: what the script prints follows", error=True)
        found.append(next(answers))
        if found[-1].report.outcome is RehearsalOutcome.INTERRUPTED:
            break
    return found
