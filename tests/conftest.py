"""Fixtures and helpers of tests in several packages."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from fsdp_bench.cli.main import main
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.spec.subprocesses.dry_run import DryRunAnswer, DryRunSpec
from fsdp_bench.sweep import dry_run
from fsdp_bench.sweep.results.load import read_records
from tests.profiles import QUICK

pytest_plugins = ["tests.cpu_time", "pytester"]

TINY_MODEL = """
[models.tiny]
family = "llama"
num_hidden_layers = 2
hidden_size = 32
num_attention_heads = 2
intermediate_size = 64
vocab_size = 128
"""

TERMINAL = {"COLUMNS": "80", "LINES": "25", "FSDP_BENCH_TRACEBACK": "1"}
"""The environment of commands: their output does not depend on the terminal that runs the tests, and unexpected errors
show their tracebacks."""

settings.load_profile(QUICK)  # without --hypothesis-profile

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)

RUN_ON_CPU = {
    "device": '"cpu"',
    "steps": "1",
    "communication_steps": "0",
    "steps_without_communication": "0",
    "threads_per_rank": "1",  # threads that wait for each other at tiny operators use up a second core
}


def write_tiny_sweep(folder: Path, grid: str, run: str = "", name: str = "tiny") -> Path:
    """Write a sweep file for the tiny model on a CPU."""
    path = folder / f"{name}.toml"
    defaults = "\n".join(
        f"{key} = {value}" for key, value in RUN_ON_CPU.items() if not re.search(rf"^{key} *=", run, re.MULTILINE)
    )
    path.write_text(f"[run]\n{defaults}\n{run}\n[grid]\nmodel = 'tiny'\nsequence_length = 16\n{grid}\n{TINY_MODEL}")
    return path


@pytest.fixture
def write_sweep(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a sweep file for the tiny model on a CPU."""
    return partial(write_tiny_sweep, tmp_path)


class OneThread(dry_run._Worker):
    """Its process has one thread: several, which wait at tiny operators, take ten times the CPU time."""

    def _started(self) -> subprocess.Popen[bytes]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OMP_NUM_THREADS", "1")
            return super()._started()


class SharedDryRuns(dry_run._Worker):
    """Replaces ``fsdp_bench.sweep.dry_run._Worker``.

    A user's code runs in its own process, as it does outside of tests: it may change global state, and two tests may
    use the same name for their modules. Modules of tests/ share the process.
    """

    _shared = OneThread()
    _thread = ThreadPoolExecutor(max_workers=1)
    """The thread that starts the process, which ends with it (PR_SET_PDEATHSIG): a command's threads end too early."""

    def answer(self, spec: DryRunSpec) -> DryRunAnswer:
        if spec.model is None and not (spec.module and spec.module.function.startswith("tests.")):
            return super().answer(spec)
        return self._thread.submit(self._shared.answer, spec).result()


@pytest.fixture(scope="session", autouse=True)
def one_dry_run_process() -> Iterator[None]:
    """Let one process answer the dry runs of all tests, because importing torch takes longer than most of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dry_run, "_Worker", SharedDryRuns)
        yield
    SharedDryRuns._shared.close()


def records_of_sweep(file: Path, *words: object, code: int = 0) -> list[TrialRecord]:
    """Run a sweep in the tests' process, with results beside its file; return its records in the order of trials."""
    results = file.parent / "results"
    done = run_command("sweep", file, "--results", results, "--no-charts", *words)
    assert done.returncode == code, done.stderr
    return sorted(read_records(results), key=lambda record: record.started_at)


def command(*words: object) -> list[str]:
    """Return the command line of fsdp-bench as a real process."""
    return [sys.executable, "-m", "fsdp_bench.cli.main", *map(str, words)]


def run_process(*words: object, timeout: float = 240, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run fsdp-bench to its end in its own process, for tests whose subject is the process."""
    return subprocess.run(
        command(*words), capture_output=True, text=True, timeout=timeout, cwd=cwd, env={**os.environ, **TERMINAL}
    )


def run_command(
    *words: object, cwd: Path | None = None, program: Callable[[list[str]], int] = main
) -> subprocess.CompletedProcess[str]:
    """Run fsdp-bench, or another program, in the tests' process; return what ``subprocess.run`` would.

    An unexpected error gives exit code 1 and its traceback on standard error.
    """
    arguments = [str(word) for word in words]
    output, errors = io.StringIO(), io.StringIO()
    code: object = None
    with unchanged_process(cwd or Path.cwd()), redirect_stdout(output), redirect_stderr(errors):
        try:
            code = program(arguments)
        except SystemExit as ended:
            code = ended.code
    assert isinstance(code, int)
    return subprocess.CompletedProcess(arguments, code, output.getvalue(), errors.getvalue())


def stdout_of(*words: object, code: int = 0, cwd: Path | None = None) -> str:
    """Run fsdp-bench, which must end with an exit code; return what it printed."""
    done = run_command(*words, cwd=cwd)
    assert done.returncode == code, (done.stdout, done.stderr)
    return done.stdout


def json_of(*words: object, code: int = 0, cwd: Path | None = None, tells_progress: bool = False) -> Any:
    """Run fsdp-bench with --json; return its output, which must be one JSON document and nothing else."""
    done = run_command(*words, "--json", cwd=cwd)
    assert done.returncode == code, (done.stdout, done.stderr)
    assert tells_progress or done.stderr == ""
    return json.loads(done.stdout)


def refused(*words: object, cwd: Path | None = None) -> str:
    """Run fsdp-bench, which must refuse the command; return its message of one line."""
    done = run_command(*words, cwd=cwd)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    message = done.stderr.removesuffix("\n")
    assert message.startswith("fsdp-bench: ")
    assert message.isprintable(), message
    assert len(message) <= 480
    return message


def message_of(call: Callable[[], object], error: type[Exception] = SpecError) -> str:
    """Return the message of the error that a call must raise: one line."""
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    return message


@contextmanager
def unchanged_process(cwd: Path) -> Iterator[None]:
    """Set the working directory and TERMINAL; restore them and the signal handlers, which commands change."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    with pytest.MonkeyPatch.context() as patch, chdir(cwd):
        for name, value in TERMINAL.items():
            patch.setenv(name, value)
        before = dict(os.environ)
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            assert dict(os.environ) == before, "a command changed the environment"
