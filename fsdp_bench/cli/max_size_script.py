"""``fsdp-bench max-size -- COMMAND``: the largest value of a placeholder with which a script fits."""

from typing import Any

import click

from fsdp_bench.cli import rehearse
from fsdp_bench.cli.common.interrupts import INTERRUPTED
from fsdp_bench.cli.common.options import FILE
from fsdp_bench.cli.common.printing import COLOURS, PICTURES, check_file, print_json, print_text, save_chart, write_rows
from fsdp_bench.plan.script.each import answered_row
from fsdp_bench.plan.script.largest import largest_document, read_search
from fsdp_bench.report.terminal import print_line
from fsdp_bench.spec.errors import ExitCode


@click.command("max-size", context_settings={"allow_interspersed_args": False})
@click.option(
    "--of",
    multiple=True,
    required=True,
    metavar="NAME[=1..64[:2]]",
    help="The placeholder {NAME} whose largest value is searched, or nodes: the fewest. Twice: the frontier of both.",
)
@click.option("--chart", type=FILE, metavar="FILE.png", help="Draw memory over the value; of several as bars.")
@click.option("--csv", type=FILE, metavar="FILE", help="Write all that was rehearsed, bytes and seconds.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def script_command(of: tuple[str, ...], **given: Any) -> int:
    """Find the largest value with which your own training script fits, or the fewest nodes, in few rehearsals.

    The value that fits and the next one that does not are both rehearsed. The options are those of rehearse.

    \b
    fsdp-bench max-size --of bs --server p5.48xlarge -- torchrun train.py {bs}
    fsdp-bench max-size --of nodes --server p5.48xlarge -- torchrun train.py
    fsdp-bench max-size --of seq=512..65536:512 --each bs=1,2 --gpu H100-SXM \\
        -- torchrun train.py --bs {bs} --seq {seq}
    fsdp-bench max-size --of bs=1..8 --of seq --gpu H100-SXM \\
        -- torchrun train.py --bs {bs} --seq {seq}

    Exit codes: 0: something fits, or that is unknown. 3: nothing does. 2: bad input. 1: the script failed, or --timeout
    ended it. 130: interrupted; the same command goes on where it ended.
    """
    chart, csv, as_json = (given.pop(name) for name in ("chart", "csv", "as_json"))
    if chart is not None:
        check_file(chart, "chart", PICTURES)
    if csv is not None:
        check_file(csv, "csv")
    search = read_search(given.pop("words"), of, **rehearse.read_options(given))
    is_interrupted = False
    try:
        search.run(rehearse.counted_lines())
    except KeyboardInterrupt:
        if not search.found:
            raise
        is_interrupted = True
    found = search.found
    answers = [one for each in found for one in each.tried.values()]
    if as_json:
        print_json(largest_document(search))
    else:
        from fsdp_bench.report.text.each import largest_text

        fits = any(one.fits for one in found) or (None if any(one.fits is None for one in found) else False)
        print_text(largest_text(found), COLOURS[fits])
    if csv is not None:
        write_rows(csv, [answered_row(one) for one in answers])
    if chart is not None:
        from fsdp_bench.report.charts.rehearsal import largest_slide

        save_chart(largest_slide(found), chart)
    if is_interrupted:
        print_line(f"fsdp-bench: {INTERRUPTED}", error=True)
        return ExitCode.INTERRUPTED
    return rehearse.exit_code(answers)


script_command.params += [one for one in rehearse.command.params if one.name not in (*rehearse.OF_OUTPUT, "snapshot")]
