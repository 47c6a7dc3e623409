"""``fsdp-bench plan``: which servers, how many, which setting, how long, at what price."""

from pathlib import Path

import click

from fsdp_bench.catalog.loader import load_user_catalog
from fsdp_bench.cli.common.assumptions import calibration_option, headroom_option
from fsdp_bench.cli.common.exports import Export, export_options
from fsdp_bench.cli.common.options import SetupCommand, SetupOptions, setup_options
from fsdp_bench.cli.common.printing import print_json, print_text
from fsdp_bench.cli.common.setups import read_choices, read_model, read_other_code
from fsdp_bench.plan.purchase.beyond import MOST_NODES
from fsdp_bench.plan.purchase.document import document
from fsdp_bench.plan.purchase.goal import Goal, read_terms
from fsdp_bench.plan.purchase.planner import NODES, kinds_of, plan
from fsdp_bench.rates.scaled import read_scaling
from fsdp_bench.report.terminal import new_console
from fsdp_bench.spec.codec import to_builtins
from fsdp_bench.spec.errors import ExitCode, SpecError, shown
from fsdp_bench.spec.setup import OPTIONS, PLANNED

_SEARCHED = (*(name for name in PLANNED if name != "offload"), "checkpointing_policy", "batch")
_WITHOUT = (
    *("gpu", "nodes", "world_size", "accumulate", "shard_size", "gpus_per_node"),
    *(name for name, one in OPTIONS.items() if one.not_planned is not None),
)


@click.command("plan", cls=SetupCommand)
@setup_options(lists=PLANNED, repeatable=("server",), without=_WITHOUT, searched=_SEARCHED)
@click.option("--tokens", metavar="1T", help="Tokens to train on. Without it: the best setting on the fewest GPUs.")
@click.option("--deadline", metavar="30d", help="When training must have ended: days, hours (h) or weeks (w).")
@click.option("--budget", metavar="200k", help="The most that it may cost.")
@click.option("--nodes", metavar="N,N-M", help="Numbers of servers to choose from.  [default: 1-64]")
@click.option(
    "--global-batch", metavar="4M", help="Tokens of an optimizer step on all GPUs. Default: one micro-batch each."
)
@click.option("--price", metavar="'$2.10/gpu-hour'", help="The price of every server, instead of the catalogue's.")
@click.option(
    "--tariff", metavar="on-demand|reserved|spot", help="Which of the catalogue's prices counts.  [default: on-demand]"
)
@headroom_option
@calibration_option
@export_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document: bytes, seconds, prices.")
def command(
    options: SetupOptions,
    server: tuple[str, ...],
    nodes: str | None,
    export: Export | None,
    calibration: Path | None,
    as_json: bool,
    **stated: str | None,
) -> int:
    """Find which servers, how many and which setting train a model: how long it takes, and at what price.

    Settings that are not stated are searched: strategy, api, checkpointing, loss, micro-batch; offload only if nothing
    fits without. Without --server all servers of the catalogue are looked at, which takes half a minute.

    \b
    fsdp-bench plan --model Llama-3.1-8B --tokens 1T --deadline 30d
    fsdp-bench plan --model Qwen2.5-7B --tokens 300B --server p5.48xlarge
    fsdp-bench plan --hf-config config.json --server g6e.48xlarge --nodes 1-4
    fsdp-bench plan --tokens 1T --each bs=1,2,4 -- torchrun train.py --bs {bs}

    With -- and a training command it plans for that script, by rehearsals: fsdp-bench plan --help -- says how.

    Exit codes: 0 there is a plan, 3 nothing fits or meets the deadline and the budget, 2 bad input.
    """
    terms = read_terms(**stated)
    catalog = load_user_catalog(options.catalog)
    counts = parse_nodes(nodes) if nodes is not None else NODES
    fixed, open_fields = read_choices(options)
    model = read_model(options)
    other, scaling = read_other_code(options, model), None if calibration is None else read_scaling(calibration)
    goal = Goal(model=model, other=other, fixed=fixed, open=open_fields, calibration=scaling, **vars(terms))
    kinds = kinds_of(catalog.under_power(options.power), [word for name in server for word in name.split(",")])
    with new_console(error=True).status("searching") as status:
        found = plan(goal, kinds, counts, lambda what: status.update(f"searching {what}"))
    winner = found.picked.winner
    if as_json:
        exports = {} if export is None else export.document(winner, options)
        print_json({**to_builtins(document(found)), **exports})
        if "error" in exports:
            return ExitCode.BAD_INPUT
    else:
        from fsdp_bench.report.text.plan import plan_text

        print_text(plan_text(document(found, with_step=False)), "red" if winner is None else "green")
        if export is not None:
            export.print(winner, options)
    return ExitCode.DOES_NOT_FIT if winner is None else ExitCode.DONE


def parse_nodes(text: str) -> list[int]:
    """Read ``4``, ``1,2,8`` or ``1-16``. Raises SpecError for anything else, and for more than the most nodes."""
    found: list[int] = []
    for word in text.split(","):
        low, dash, high = word.strip().partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()):
            raise SpecError(f"nodes: {shown(text)} is not allowed; write it like '4', '1,2,8' or '1-16'")
        if dash and int(high) < int(low):
            raise SpecError(f"nodes: {shown(text)} is not allowed; the smaller number first: '{high}-{low}'")
        found += range(int(low), int(high or low) + 1)
    if not found or min(found) < 1 or max(found) > MOST_NODES:
        raise SpecError(f"nodes: {shown(text)} is not allowed; 1 to {MOST_NODES}")
    return sorted(set(found))
