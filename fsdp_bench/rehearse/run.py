"""Rehearses a command: runs the user's script as one rank in a subprocess, on the stand-in for NVIDIA's libraries."""

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import msgspec

from fsdp_bench.rehearse.build import build_stand_in, stand_in_environment
from fsdp_bench.rehearse.command import Command
from fsdp_bench.rehearse.find_torch import find_torch
from fsdp_bench.rehearse.inside.main import END_SIGNAL
from fsdp_bench.rehearse.prepared import ENTER, IMPORTED, INSIDE, ForkServer, PreparedPython
from fsdp_bench.spec.codec import from_json, to_json
from fsdp_bench.spec.errors import ExitCode, FsdpBenchError, SpecError
from fsdp_bench.spec.subprocesses.rehearsal import (
    RehearsalOptions,
    RehearsalOutcome,
    RehearsalPlan,
    RehearsalReport,
    RehearsedGpu,
)

REFUSED = 2
"""The exit code of inside/main.py if the launcher's arguments cannot be rehearsed."""

REPORT, SNAPSHOT = "report.json", "snapshot"
"""Files in the scratch folder of a rehearsal."""

REPORT_SECONDS = 10.0
"""The time that a script that is ended may take to report what was seen."""

OF_THIS_MACHINE = "CUDA_VISIBLE_DEVICES"
"""A variable by which a cluster gives a job some of this machine's GPUs: not of those that are rehearsed. One that the
command itself sets is kept."""


class RehearsalError(FsdpBenchError):
    """The user's process ended without a report. The message is one line."""

    exit_code = ExitCode.CRASHED


def rehearse(
    command: Command,
    gpu: RehearsedGpu,
    rank: int,
    options: RehearsalOptions,
    timeout_seconds: float | None = None,
    prepared: PreparedPython | None = None,
) -> RehearsalReport:
    """Run a command as one rank; what it prints goes to standard error.

    With ``prepared``, imports are paid for once for all rehearsals of a script.

    Its process, and all that it started, are ended after ``timeout_seconds``, or by an interrupt. The report has
    what was seen until then, if the script's main thread can be interrupted: with outcome TIMED_OUT or INTERRUPTED.

    Raises:
        MachineError: if its Python has no CUDA build of torch, or the stand-in cannot be compiled.
        SpecError: if the launcher refuses its arguments, or starts what cannot be rehearsed.
        RehearsalError: if its process ends without a report, or is ended before it can make one.
        KeyboardInterrupt: if it is interrupted before it can make one.
    """
    with RunningRehearsal(command, gpu, rank, options, prepared=prepared) as running:
        try:
            if not select.select([running], [], [], timeout_seconds)[0]:
                running.cut(RehearsalOutcome.TIMED_OUT, f"was ended after {timeout_seconds:g} s (--timeout)")
        except KeyboardInterrupt:
            running.cut(RehearsalOutcome.INTERRUPTED)
        return running.report()


class RunningRehearsal:
    """One rank of a command while it runs; ``with`` ends it. ``select`` finds it readable once its process has ended.

    The constructor raises what ``rehearse`` raises before a script runs.
    """

    def __init__(
        self,
        command: Command,
        gpu: RehearsedGpu,
        rank: int,
        options: RehearsalOptions,
        output: int = 2,
        prepared: PreparedPython | None = None,
    ) -> None:
        """Start it, in a prepared fork if there are any; ``output`` is a descriptor, by default standard error."""
        self._options = options
        self._where_output = "; its output is above" if output == 2 else ""
        self._cut: RehearsalOutcome | None = None
        self._how = ""
        python = [str(command.python), *command.interpreter_options]
        environment = _environment(command, gpu, options)
        self._server = None if prepared is None else prepared.server(python, _script(command), environment)
        self._folder = tempfile.TemporaryDirectory(
            prefix="fsdp-bench-", dir=None if self._server is None else self._server.folder
        )
        try:
            self._scratch = Path(self._folder.name)
            program = [str(INSIDE), str(_write_plan(command, rank, options, self._scratch, self._server))]
            self._process = _started(self._server, python, program, environment, self._scratch, output)
        except BaseException:
            self._folder.cleanup()
            raise

    def fileno(self) -> int:
        """Return a descriptor that is readable once the process has ended."""
        return self._process.fileno()

    def cut(self, outcome: RehearsalOutcome, how: str = "") -> None:
        """Ask the script for its report, and wait for its end: at most REPORT_SECONDS.

        ``outcome`` is TIMED_OUT or INTERRUPTED; ``how`` says for an error how it was ended.
        """
        self._cut, self._how = outcome, how
        self._process.send_signal(END_SIGNAL)
        select.select([self], [], [], REPORT_SECONDS)

    def report(self) -> RehearsalReport:
        """End the processes; return the report. Raises what ``rehearse`` raises after a script has run."""
        code, path = self._process.end(), self._scratch / REPORT
        if not path.exists():
            if self._cut is RehearsalOutcome.INTERRUPTED:
                raise KeyboardInterrupt
            how = self._how or _how_ended(code)
            raise RehearsalError(f"the script's process {how} and left no report{self._where_output}")
        if code == REFUSED:
            raise SpecError(str(json.loads(path.read_bytes())["refused"]))
        if self._options.snapshot is not None and (written := self._scratch / SNAPSHOT).exists():
            shutil.move(written, self._options.snapshot)
        if self._server is not None:
            self._server.learn(self._scratch / IMPORTED)
        found = from_json(path.read_bytes(), RehearsalReport)
        is_cut = RehearsalOutcome.INTERRUPTED in (self._cut, found.outcome)
        return msgspec.structs.replace(found, outcome=self._cut) if self._cut is not None and is_cut else found

    def __enter__(self) -> "RunningRehearsal":
        return self

    def __exit__(self, *_error: object) -> None:
        self._process.end()
        self._folder.cleanup()


def _environment(command: Command, gpu: RehearsedGpu, options: RehearsalOptions) -> dict[str, str]:
    folder = build_stand_in(find_torch(str(command.python)))
    inherited = {name: value for name, value in os.environ.items() if name != OF_THIS_MACHINE}
    own = {**inherited, **command.environment}
    policy = {"STAND_IN_UNSUPPORTED": "stop" if options.stops_at_unsupported else "warn"}
    on_stand_in = {**own, **stand_in_environment(folder, gpu, options.gpus_per_node, own), **policy}
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):  # of ours, which no overlay hides
        Path(on_stand_in[name]).mkdir(parents=True, exist_ok=True)
    return on_stand_in


def _write_plan(
    command: Command, rank: int, options: RehearsalOptions, scratch: Path, server: ForkServer | None
) -> Path:
    plan = RehearsalPlan(
        **{**msgspec.structs.asdict(options), "snapshot": options.snapshot and str(scratch / SNAPSHOT)},
        launcher=command.launcher.value,
        words=command.launcher_words,
        rank=rank,
        report=str(scratch / REPORT),
        imported=str(scratch / IMPORTED) if server is not None and server.learns else None,
    )
    path = scratch / "plan.json"
    path.write_bytes(to_json(plan))
    return path


def _script(command: Command) -> object:
    """Return what tells a command's script from others: its file, module or code, or else all of its words."""
    words = command.launcher_words
    for word, following in zip(words, (*words[1:], ""), strict=True):
        if word in ("-m", "-c"):
            return following
        if Path(word).suffix in ("", ".py") and os.path.isfile(word):
            return os.path.abspath(word)
    return words


def _started(
    server: ForkServer | None,
    python: list[str],
    program: list[str],
    environment: dict[str, str],
    scratch: Path,
    output: int,
) -> "_Process | _Fork":
    """Start a process for the user's Python: a fork, if its files can be protected there."""
    sys.stdout.flush()
    with open(os.devnull) as nothing:
        descriptors = (nothing.fileno(), output, output)
        if server is not None and (number := server.fork(program, environment, scratch, descriptors)) is not None:
            return _Fork(server, number)
        words = [sys.executable, "-I", "-S", str(ENTER), program[1], *python, *program]
        return _Process(words, environment, descriptors)


class _Process:
    """The user's Python, and the processes that it starts, such as a tracker's: they end with it."""

    def __init__(self, words: list[str], environment: dict[str, str], descriptors: tuple[int, int, int]) -> None:
        """Start it, with its standard input, output and errors."""
        given, output, errors = descriptors
        self._popen = subprocess.Popen(
            words, env=environment, stdin=given, stdout=output, stderr=errors, process_group=0
        )
        self._watch(self._popen.pid)

    def _watch(self, number: int) -> None:
        self._number, self._ended = number, os.pidfd_open(number)
        self._code: int | None = None

    def fileno(self) -> int:
        return self._ended

    def send_signal(self, number: int) -> None:
        signal.pidfd_send_signal(self._ended, number)

    def end(self) -> int:
        """Kill all that still runs; return the exit code."""
        if self._code is None:
            os.close(self._ended)
            with suppress(ProcessLookupError):
                os.killpg(self._number, signal.SIGKILL)  # before _wait(), after which another may have its number
            self._code = self._wait()
        return self._code

    def _wait(self) -> int:
        return self._popen.wait()


class _Fork(_Process):
    """The same in a fork of a prepared process."""

    def __init__(self, server: ForkServer, number: int) -> None:
        self._server = server
        self._watch(number)

    def _wait(self) -> int:
        return self._server.wait(self._number)


def _how_ended(code: int) -> str:
    if code == -signal.SIGKILL:
        return "ended by signal 9, which Linux sends if host memory runs out,"
    return f"ended by signal {-code}" if code < 0 else f"ended with code {code}"
