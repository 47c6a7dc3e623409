"""``fsdp-bench compare``: which bytes and which milliseconds differ between two setups or results, and why."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import click

from fsdp_bench.cli.common.assumptions import AssumptionOptions, assumption_options, read_questions
from fsdp_bench.cli.common.options import SetupCommand, SetupOptions, setup_options
from fsdp_bench.cli.common.printing import print_json, print_text
from fsdp_bench.plan.compare.comparison import Comparison, document
from fsdp_bench.plan.compare.reasons import reasons
from fsdp_bench.plan.compare.side import Side, read_side
from fsdp_bench.plan.prediction import answer
from fsdp_bench.plan.question import Question
from fsdp_bench.report.text import compare as text
from fsdp_bench.spec.errors import SpecError, shown


@click.command("compare", context_settings={"ignore_unknown_options": True})
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document: bytes and seconds, B less A.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="A B [OPTIONS OF BOTH]")
def command(words: Sequence[str], as_json: bool) -> None:
    """Say which bytes and which milliseconds differ between A and B, and why.

    A and B are files or setups. A file is a JSON document of predict or dry-run (FILE#2: the second of several), or
    the record of a trial. A setup is the options of predict in quotes; options after A and B are of both.

    \b
    fsdp-bench compare "--strategy FULL_SHARD" "--strategy SHARD_GRAD_OP" \\
        --model Llama-3.1-8B --server p5.48xlarge
    fsdp-bench compare "" "--checkpointing full" --params 7B --server p5.48xlarge
    fsdp-bench compare predicted.json results/MACHINE/SWEEP/trials/ID.json

    Exit codes: 0 compared, 2 bad input.
    """
    if len(words) < 2:
        raise SpecError("compare: name two, A and B: files, or setups as options in quotes")
    a, b, *common = words
    if common and not common[0].startswith("-"):
        raise SpecError(
            f"compare: after A and B come options of both, not {shown(common[0])}; options of A or B alone go in quotes"
        )
    are_files = [_is_file(word) for word in (a, b)]
    if all(are_files) and common:
        raise SpecError(f"compare: {shown(common[0])} goes with a setup, and A and B are files; leave it out")
    sides = [
        read_side(Path(word), word) if is_file else _of_setup(word, common, name)
        for name, word, is_file in zip(("A", "B"), (a, b), are_files, strict=True)
    ]
    found = Comparison(*sides)
    if as_json:
        print_json(document(found, text.answer(found), reasons(found)))
    else:
        print_text(text.comparison_text(found))


def _is_file(word: str) -> bool:
    return bool(word.strip()) and not word.strip().startswith("-")


def _of_setup(quoted: str, common: Sequence[str], name: str) -> Side:
    """Predict the setup of options in quotes and the options of both; what is in quotes counts, where both say it."""
    try:
        own = shlex.split(quoted)
    except ValueError as error:
        raise SpecError(f"{name}: {shown(quoted)} cannot be read as options: {error}") from None
    question: Question = _setup.main([*common, *own], "fsdp-bench compare", standalone_mode=False)
    if question.impossible:
        raise SpecError(f"{name}: {question.impossible}")
    return read_side(answer(question), quoted.strip() or "the options of both")


@click.command(cls=SetupCommand, add_help_option=False)
@setup_options()
@assumption_options()
def _setup(options: SetupOptions, assumed: AssumptionOptions) -> Question:
    (question,) = read_questions(options, assumed)
    return question
