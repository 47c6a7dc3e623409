"""The command line ``fsdp-bench``. This is the one place that turns errors into a line and an exit code."""

import errno
import importlib
import os
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn, TextIO

import click

from fsdp_bench.cli.common.interrupts import INTERRUPTED, drop, forgiving_streams, raised_once
from fsdp_bench.spec.errors import ExitCode, FsdpBenchError, nearest, shortened, shown
from fsdp_bench.version import __version__

COMMANDS = {
    "sweep": "Train every trial of a sweep file; the same command resumes it.",
    "submit": "Run a sweep file as a job of Slurm, on several nodes, which resumes after its time limit.",
    "status": "Say how far a sweep is: done, running, left, and the time left.",
    "dry-run": "Run a setup through PyTorch's own FSDP code without GPUs.",
    "record": "Record a model's code once, so that it can be predicted.",
    "rehearse": "Run a real training command without GPUs: whether it fits, and where it peaks.",
    "check": "Rehearse a file's commands, and compare each with a baseline: for pull requests.",
    "chart": "Draw charts of measured results.",
    "report": "Print measured results as a table.",
    "plan": "Find which servers, how many and which setting train a model or a script: how long, at what price.",
    "predict": "Predict memory, time and fit of one or several setups.",
    "compare": "Say which bytes and milliseconds differ between two setups, results or scripts, and why.",
    "max-size": "Find the largest model, batch or sequence that fits, or the fewest GPUs.",
    "calibrate": "Measure this machine's rates, or scale a datasheet's by a run of yours.",
    "validate": "Compare predictions with your own results, measured or rehearsed.",
    "servers": "Print the catalogue's servers and GPUs, with sources.",
    "models": "Print the catalogue's models, with sources.",
    "doctor": "Show this machine's hardware and what a sweep will use.",
}
"""Each command has a file in cli/, which is imported only when the command is used, so that --help stays fast."""

OF_SCRIPTS = {"max-size": "max_size_script", "plan": "plan_script"}
"""The file of each command that asks about a training script if ``-- COMMAND`` follows."""

MOST_CHARACTERS = 480
"""Most characters of an error message; the middle of a longer message is left out."""

TRACEBACK = "FSDP_BENCH_TRACEBACK"
"""Environment variable: 1 prints the traceback of an unexpected error instead of keeping it in a file."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a full or broken disk."""


class LazyGroup(click.Group):
    """A click group that imports a command's file only when the command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order in which --help lists them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command."""
        if cmd_name not in COMMANDS:
            raise click.UsageError(
                f"no command {shown(cmd_name)}; one of {', '.join(COMMANDS)}{nearest(cmd_name, COMMANDS)}"
            )
        command = importlib.import_module(f"fsdp_bench.cli.{cmd_name.replace('-', '_')}").command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; refuse an option that is given twice."""
        name, command, rest = super().resolve_command(ctx, args)
        if name in OF_SCRIPTS and "--" in rest:
            command = importlib.import_module(f"fsdp_bench.cli.{OF_SCRIPTS[name]}").script_command
        if command is not None:
            _refuse_repeated(command, rest, click.Context(command, ctx, name, **command.context_settings))
        return name, command, rest

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Print the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _refuse_repeated(command: click.Command, arguments: list[str], context: click.Context) -> None:
    """Refuse an option of one value that is given twice; click would silently keep the last value."""
    _, _, given = command.make_parser(context).parse_args(list(arguments))
    for option, times in Counter(given).items():
        if not isinstance(option, click.Option) or times == 1 or option.multiple:
            continue
        if option.is_flag and not option.secondary_opts:
            continue  # a flag given twice means the same as once
        is_list = getattr(option, "is_list", False) or "by comma" in (option.help or "")
        lists = "; several values go with commas between them" if is_list else ""
        raise click.UsageError(f"{option.opts[0]} is given {times} times; give it once{lists}")


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="fsdp-bench")
def cli() -> None:
    """Find the FSDP setting, the largest model and the speed: predicted, dry-run, rehearsed or measured.

    \b
    Does it fit?        fsdp-bench predict --model Llama-3.1-8B --server p5.48xlarge
    How large a model?  fsdp-bench max-size --server p5.48xlarge --chart size.png
    Measure it:         fsdp-bench sweep sweeps/quick.toml

    \b
    Exit codes: 0 done or it fits, 3 it does not fit, 2 bad input, 1 a trial crashed or timed out,
    130 interrupted (for a sweep: the same command resumes).
    """


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit; ``argv`` is its arguments without the program's name, by default sys.argv."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    for stream in (sys.stdout, sys.stderr):
        # Characters that the terminal's encoding lacks are printed as escapes.
        if callable(reconfigure := getattr(stream, "reconfigure", None)):
            reconfigure(errors="backslashreplace")
    with forgiving_streams(BrokenPipeError):
        code, message = _run(arguments)
        if message is not None:
            _print_error(shortened(f"fsdp-bench: {message}", MOST_CHARACTERS), arguments)
        if (reason := _flush(sys.stdout)) is not None and message is None:
            code = ExitCode.BAD_INPUT
            _print_error(f"fsdp-bench: the output cannot be written: {reason}", [])
        _flush(sys.stderr)
    sys.exit(code)


def _run(arguments: Sequence[str]) -> tuple[int, str | None]:
    """Run the command line; return the exit code, and an error message or None."""
    try:
        with raised_once(), cli.make_context("fsdp-bench", list(arguments), obj=tuple(arguments)) as context:
            return cli.invoke(context) or ExitCode.DONE, None  # not cli.main, which hides broken pipes
    except click.exceptions.Exit as ended:  # of --help and --version
        return ended.exit_code, None
    except click.NoSuchOption as error:
        close = nearest(error.option_name, error.possibilities or ())
        return ExitCode.BAD_INPUT, f"No such option {shown(error.option_name)}{close}"
    except click.MissingParameter as error:
        return ExitCode.BAD_INPUT, _missing(error)
    except click.UsageError as error:
        if arguments:
            return ExitCode.BAD_INPUT, error.format_message()
        print(error.format_message())  # without arguments the message is the help
        return ExitCode.DONE, None
    except (KeyboardInterrupt, click.Abort):
        return ExitCode.INTERRUPTED, INTERRUPTED
    except FsdpBenchError as error:
        return error.exit_code, str(error)
    except Exception as error:
        if (message := _explain(error)) is not None:
            return ExitCode.BAD_INPUT, message
        return ExitCode.CRASHED, _unexpected(error)


def _missing(error: click.MissingParameter) -> str:
    option = error.param
    if not isinstance(option, click.Option) or not option.help:
        return error.format_message()
    form = f"{option.opts[0]} {option.metavar or ''}".rstrip()
    return f"{form} is missing: {option.help[0].lower()}{option.help[1:].rstrip('.')}"


def _explain(error: Exception) -> str | None:
    """Return one line about an error that a user can correct, or None for a bug of this program."""
    if isinstance(error, click.ClickException):
        return error.format_message()
    if isinstance(error, OSError):
        return _explain_os_error(error)
    if isinstance(error, UnicodeEncodeError):
        return f"{shown(error.object)} is not text: its characters cannot be written as {error.encoding}"
    if isinstance(error, UnicodeDecodeError):
        return f"what was read is not text: byte {error.start} is not {error.encoding}"
    if isinstance(error, MemoryError):
        return "this machine's memory ran out; ask for less at once, or for a smaller model"
    return None


def _explain_os_error(error: OSError) -> str:
    reason = error.strerror or str(error) or type(error).__name__
    try:
        os.getcwd()
    except FileNotFoundError:
        return f"the current folder no longer exists; change to one that does ({reason})"
    if error.filename is None:
        return f"the output cannot be written: {reason}" if error.errno in _FULL else reason
    return f"{os.fsdecode(error.filename)}: {reason}"


def _unexpected(error: Exception) -> str:
    """Keep the traceback of a bug; return one line with the error and the traceback's file."""
    text = "".join(traceback.format_exception(error))
    where = "above"
    if os.environ.get(TRACEBACK) == "1":
        click.echo(text, err=True)
    else:
        try:
            with tempfile.NamedTemporaryFile(
                "w", prefix="fsdp-bench-", suffix=".txt", delete=False, encoding="utf-8", errors="backslashreplace"
            ) as file:
                file.write(text)
            where = file.name
        except OSError:
            where = f"printed with {TRACEBACK}=1"
    what = f"{type(error).__name__}: {shortened(str(error), 160)}"
    return f"unexpected {what}; this is a bug of fsdp-bench: please report it with its traceback ({where})"


def _print_error(line: str, arguments: Sequence[str]) -> None:
    if "--json" in arguments:
        from fsdp_bench.spec.codec import to_json

        with suppress(OSError):
            print(to_json({"error": line.removeprefix("fsdp-bench: ")}).decode(), end="", flush=True)
            return
        _flush(sys.stdout)
    with suppress(OSError, ValueError):
        click.echo(line, err=True)


def _flush(stream: TextIO | Any) -> str | None:
    """Flush a stream; if that fails, drop the buffer and return the reason, or None if it was closed."""
    try:
        if stream is not None:
            stream.flush()
    except (OSError, ValueError) as error:
        drop(stream)
        return None if isinstance(error, ValueError) else getattr(error, "strerror", str(error))
    return None


if __name__ == "__main__":
    main()
