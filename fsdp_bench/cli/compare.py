"""``fsdp-bench compare``: which bytes and which milliseconds differ between two setups or results, and why."""

import shlex
from collections.abc import Sequence
from itertools import groupby, takewhile
from pathlib import Path

import click

from fsdp_bench.cli import rehearse
from fsdp_bench.cli.common.assumptions import AssumptionOptions, assumption_options, read_questions
from fsdp_bench.cli.common.options import SetupCommand, SetupOptions, setup_options
from fsdp_bench.cli.common.printing import COLOURS, print_json, print_text
from fsdp_bench.plan.compare.comparison import Comparison, compare, document
from fsdp_bench.plan.compare.reasons import reasons
from fsdp_bench.plan.compare.scripts import DEFAULT_LIMIT, Gate, ScriptComparison, ScriptSide, limit_bytes, read_script
from fsdp_bench.plan.compare.scripts import document as script_document
from fsdp_bench.plan.compare.side import Side, read_side
from fsdp_bench.plan.prediction import answer
from fsdp_bench.plan.question import Question
from fsdp_bench.plan.script.each import answer_each
from fsdp_bench.plan.script.variants import Variant, read_combinations
from fsdp_bench.rehearse.run import RehearsalError
from fsdp_bench.report.terminal import print_answer, print_line
from fsdp_bench.report.text import compare as text
from fsdp_bench.report.text import compare_scripts as of_scripts
from fsdp_bench.report.text.each import answered_line
from fsdp_bench.spec.errors import ExitCode, SpecError, shown
from fsdp_bench.spec.subprocesses.rehearsal import RehearsalOutcome


class _Compare(click.Command):
    """Takes the commands that follow ``--`` apart from the words before it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words before the first ``--``; keep each command."""
        before, *ctx.meta[_COMMANDS] = (
            list(words) for is_divider, words in groupby(["", *args], lambda word: word == "--") if not is_divider
        )
        return super().parse_args(ctx, before[1:])


_COMMANDS = f"{__name__}.commands"


@click.command("compare", cls=_Compare, context_settings={"ignore_unknown_options": True})
@click.option("--baseline", metavar="FILE", help="Compare B with this file: exit with 3 if it needs more memory.")
@click.option("--limit", metavar="SIZE|%", help=f"With --baseline: by how much it may grow. Default: {DEFAULT_LIMIT}.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document: bytes and seconds, B less A.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="A B [OPTIONS OF BOTH] [-- COMMAND]..")
def command(words: Sequence[str], as_json: bool, baseline: str | None, limit: str | None) -> int:
    """Say which bytes and which milliseconds differ between A and B, and why.

    A and B are files or setups. A file is a JSON document of predict, dry-run or rehearse (FILE#2: the second of
    several), or the record of a trial. A setup is the options of predict in quotes; options after A and B are of both.

    \b
    fsdp-bench compare "--strategy FULL_SHARD" "--strategy SHARD_GRAD_OP" \\
        --model Llama-3.1-8B --server p5.48xlarge
    fsdp-bench compare "" "--checkpointing full" --params 7B --server p5.48xlarge
    fsdp-bench compare predicted.json results/MACHINE/SWEEP/trials/ID.json

    A command after -- is rehearsed, with options of rehearse before it: bytes by line of the script, and with --time
    milliseconds by operator.

    \b
    fsdp-bench compare --server p5.48xlarge -- torchrun a.py -- torchrun b.py
    fsdp-bench compare --server p5.48xlarge --each bs=1,2 -- torchrun x.py {bs}
    fsdp-bench compare old.json --time --server p5.48xlarge -- torchrun train.py
    fsdp-bench compare --baseline old.json --limit 500MiB new.json

    Exit codes: 0 compared, 2 bad input. 1: a command failed. With --baseline 3: B does not fit, or grew.
    """
    commands: list[list[str]] = click.get_current_context().meta[_COMMANDS]
    if limit is not None and baseline is None:
        raise SpecError("--limit: it counts for --baseline, which is not given")
    limit_bytes(limit or DEFAULT_LIMIT)  # or it is refused, before anything runs
    if commands or baseline is not None:
        sides = _scripts([baseline] if baseline is not None else [], words, commands)
        if baseline is not None:
            return _gate(Gate(sides[1], sides[0], limit or DEFAULT_LIMIT), as_json)
        _show(ScriptComparison(*sides), as_json)
        has_failed = any(one.found.outcome is RehearsalOutcome.FAILED for one in sides)
        return ExitCode.CRASHED if has_failed else ExitCode.DONE
    if len(words) < 2:
        raise SpecError("compare: name two, A and B: files, setups as options in quotes, or commands after --")
    a, b, *common = words
    if common and not common[0].startswith("-"):
        raise SpecError(
            f"compare: after A and B come options of both, not {shown(common[0])}; options of A or B alone go in quotes"
        )
    are_files = [bool(word.strip()) and not word.strip().startswith("-") for word in (a, b)]
    if all(are_files) and common:
        raise SpecError(f"compare: {shown(common[0])} goes with a setup, and A and B are files; leave it out")
    found = compare(
        *(
            Path(word) if is_file else _of_setup(word, common, name)
            for name, word, is_file in zip(("A", "B"), (a, b), are_files, strict=True)
        )
    )
    _show(found, as_json)
    return ExitCode.DONE


def _show(found: Comparison | ScriptComparison, as_json: bool) -> None:
    if isinstance(found, ScriptComparison):
        if as_json:
            print_json(script_document(found, of_scripts.answer(found)))
        else:
            print_text(of_scripts.comparison_text(found))
    elif as_json:
        print_json(document(found, text.answer(found), reasons(found)))
    else:
        print_text(text.comparison_text(found))


def _gate(gate: Gate, as_json: bool) -> int:
    """Print a gate's answer in one line, or as JSON."""
    assert gate.comparison is not None
    line = of_scripts.gate_line(gate)
    if as_json:
        compared = script_document(gate.comparison, of_scripts.answer(gate.comparison))
        print_json({"status": gate.status, "line": line, "limit": gate.limit, "comparison": compared})
    else:
        print_answer(line, COLOURS[gate.status.exit_code == ExitCode.DONE])
    return gate.status.exit_code


def _scripts(baseline: Sequence[str], words: Sequence[str], commands: Sequence[Sequence[str]]) -> list[ScriptSide]:
    """Return two rehearsals: of files, then of commands, which are rehearsed with the options before them.

    Raises:
        SpecError: if they are more or fewer than two.
        RehearsalError: if one cannot be rehearsed.
    """
    files = [*baseline, *takewhile(lambda word: not word.startswith("-"), words)]
    options = words[len(files) - len(baseline) :]
    if options and not commands:
        raise SpecError(f"compare: {shown(options[0])} goes with a command, which follows --")
    variants = list[Variant]()
    for one in commands:
        given = rehearse.command.make_context("fsdp-bench compare", [*options, "--", *one]).params
        unused = [name for name in rehearse.OF_OUTPUT if given.pop(name)]
        if names := [option.opts[0] for option in rehearse.command.params if option.name in unused]:
            raise SpecError(f"compare: {names[0]} is for rehearse alone; leave it out")
        variants += read_combinations(given.pop("words"), **rehearse.read_options(given)).variants()
    if len(files) + len(variants) != 2:
        counts = f"files: {len(files)}, rehearsals of commands: {len(variants)}"
        raise SpecError(f"compare: it takes two, A and B, not these ({counts}); -- stands before each command")
    sides = [read_script(file, file) for file in files]
    names = [
        variant.title if variant.values else name for name, variant in zip("AB"[len(files) :], variants, strict=True)
    ]
    answers = answer_each(variants, lambda one: print_line(answered_line(one), error=True)) if variants else []
    for name, answered in zip(names, answers, strict=True):
        if answered.worst is None:
            raise RehearsalError(f"{name}: {answered.reason}")
        sides.append(read_script(answered.worst, name))
    return sides


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
