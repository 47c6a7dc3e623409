"""``fsdp-bench check``: a gate for pull requests. A file's commands still fit their GPUs, and need no more memory."""

from pathlib import Path

import click

from fsdp_bench.cli.common.options import FILE
from fsdp_bench.cli.common.printing import print_json
from fsdp_bench.plan.check import CheckRow, check, document
from fsdp_bench.report.terminal import print_line, print_unwrapped
from fsdp_bench.report.text.check import answer, check_text, row_answer, row_line


@click.command("check")
@click.argument("file", type=FILE)
@click.option("--update", is_flag=True, help="Write what is found as the baseline, beside FILE.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(file: Path, update: bool, as_json: bool) -> int:
    """Rehearse the commands that FILE lists, and compare each with the baseline beside it.

    FILE is TOML. Each [recipes.NAME] has a command, the GPUs that it is meant for, and options of rehearse. Commands
    run in FILE's folder. The answer is Markdown.

    \b
    limit = "1%"
    [recipes.llama-8b]
    command = "torchrun --nproc-per-node 8 train.py --bs 2"
    server = "p5.48xlarge"

    \b
    fsdp-bench check recipes.toml --update    writes recipes.baseline.json
    fsdp-bench check recipes.toml             compares with it

    Exit codes: 0 all pass. 3: one does not fit any more, or a peak grew by more than the limit. 1: one crashed.
    2: bad input. 130: interrupted, and the same command resumes.
    """

    def progress(row: CheckRow, number: int, total: int) -> None:
        print_line(f"{number} of {total}: {row_answer(row)}", error=True)

    found = check(file, update, progress)
    if as_json:
        print_json(document(found, answer(found), {row.name: row_line(row) for row in found.rows}))
    else:
        print_unwrapped(check_text(found))
    return found.exit_code
