"""``fsdp-bench``: parses, calls, prints. The user's mistakes are caught here, once, as one line and exit code 2."""

from __future__ import annotations

import importlib
import sys
from typing import NoReturn

import click

from fsdp_bench import __version__
from fsdp_bench.cli.interrupts import raised_once
from fsdp_bench.spec.errors import FsdpBenchError, nearest

VERBS = {
    "sweep": "Run a sweep; the same command resumes it.",
    "dry-run": "Run one setup through real FSDP without GPUs.",
    "chart": "Draw the charts of results.",
    "report": "Print the table of results.",
    "predict": "Predict memory, time and fit of a setup, with the breakdown at the peak.",
    "max-size": "Find the largest model that fits a server, for each strategy and setting.",
    "calibrate": "Measure this machine, so that predictions know its rates.",
    "validate": "Hold predictions against dry runs, published or measured numbers.",
    "servers": "Print the catalogue's servers and GPUs, with sources.",
    "models": "Print the catalogue's models, with sources.",
    "doctor": "Tell what this machine has and what a sweep will use.",
}
"""One file a verb in cli/; loaded only when it is called, so that --help stays fast."""


class LazyGroup(click.Group):
    """A group that imports a verb's file when the verb is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the verbs in the order of their use."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one verb."""
        if cmd_name not in VERBS:
            raise click.UsageError(f"no verb {cmd_name!r}; one of {', '.join(VERBS)}{nearest(cmd_name, VERBS)}")
        command = importlib.import_module(f"fsdp_bench.cli.{cmd_name.replace('-', '_')}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Print the verbs without importing them."""
        with formatter.section("Verbs"):
            formatter.write_dl(list(VERBS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="fsdp-bench")
def cli() -> None:
    """Which FSDP setting, how large a model, how fast: predicted, dry-run or measured on this machine.

    \b
    Exit codes: 0 done or it fits, 3 it does not fit, 2 bad input, 1 a trial crashed or timed out,
    130 interrupted (the same command resumes).
    """


def _misused(error: click.UsageError) -> int:
    """Say what is wrong with the words; nothing is where there are none, and the message is the help."""
    if len(sys.argv) == 1:
        print(error.format_message())
        return 0
    print(f"fsdp-bench: {error.format_message()}", file=sys.stderr)
    return 2


def main() -> NoReturn:
    """Run the command line and exit."""
    try:
        with raised_once():
            code = cli.main(standalone_mode=False)
    except click.UsageError as error:
        code = _misused(error)
    except (FsdpBenchError, click.ClickException) as error:
        message = error.format_message() if isinstance(error, click.ClickException) else str(error)
        print(f"fsdp-bench: {message}", file=sys.stderr)
        code = 2
    except (KeyboardInterrupt, click.Abort):
        print("fsdp-bench: interrupted; the same command resumes", file=sys.stderr)
        code = 130
    except BrokenPipeError:
        sys.stderr.close()
        code = 0
    sys.exit(code or 0)


if __name__ == "__main__":
    main()
