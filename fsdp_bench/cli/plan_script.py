"""``fsdp-bench plan -- COMMAND``: which servers, how many, how long, at what price, for one's own training script."""

from typing import Any

import click

from fsdp_bench.cli import plan, rehearse
from fsdp_bench.cli.common.printing import print_json, print_text
from fsdp_bench.cli.plan import parse_nodes
from fsdp_bench.plan.purchase.goal import TERMS
from fsdp_bench.plan.purchase.planner import NODES
from fsdp_bench.plan.script.purchase import plan_command, script_document
from fsdp_bench.spec.errors import ExitCode

_OF_REHEARSALS = (
    *("each", "env", "edit", "strategy", "power", "catalog", "steps", "rank", "ranks", "random_weights"),
    *("random_data", "balanced_routing", "unsupported", "tokens_per_step", "timeout", "words"),
)
"""Options of rehearse that plans take."""


@click.command("plan", context_settings={"allow_interspersed_args": False})
@click.option("--server", multiple=True, metavar="NAME,..", help="Servers to choose from. Default: all that can be.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document: bytes, seconds, prices.")
def script_command(server: tuple[str, ...], nodes: str | None, as_json: bool, **given: Any) -> int:
    """Find which servers, how many and which values train your own script: how long it takes, and at what price.

    The script is rehearsed on each kind of GPU and few numbers of nodes. Each line of the answer was rehearsed by
    itself; its time is predicted from what it issued. Without --server all servers of the catalogue are looked at.

    \b
    fsdp-bench plan --tokens 1T --deadline 30d --each bs=1,2,4 -- \\
        torchrun train.py --bs {bs}
    fsdp-bench plan --tokens 300B --server p5.48xlarge --strategy all -- \\
        accelerate launch train.py

    Exit codes: 0 there is a plan, 3 nothing fits or meets the deadline and the budget, 2 bad input, 130 interrupted:
    the same command goes on where it ended.
    """
    words, options = given.pop("words"), rehearse.read_options(given)
    servers = [word for name in server for word in name.split(",")]
    counts = parse_nodes(nodes) if nodes is not None else NODES
    found = plan_command(words, servers=servers, nodes=counts, progress=rehearse.counted_lines(), **options)
    if as_json:
        print_json(script_document(found))
    else:
        from fsdp_bench.report.text.plan import plan_text

        print_text(plan_text(script_document(found)), "red" if found.winner is None else "green")
    return ExitCode.DOES_NOT_FIT if found.winner is None else ExitCode.DONE


script_command.params += [one for one in plan.command.params if one.name in ("nodes", *TERMS)]
script_command.params += [one for one in rehearse.command.params if one.name in _OF_REHEARSALS]
