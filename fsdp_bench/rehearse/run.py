"""Rehearses a command: runs the user's script as one rank in a subprocess, on the stand-in for NVIDIA's libraries."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from fsdp_bench.rehearse.build import StandInGpu, build_stand_in, stand_in_environment
from fsdp_bench.rehearse.command import Command
from fsdp_bench.rehearse.find_torch import find_torch
from fsdp_bench.spec.codec import from_json, to_json
from fsdp_bench.spec.errors import FsdpBenchError, SpecError
from fsdp_bench.spec.exit_codes import ExitCode
from fsdp_bench.spec.subprocesses.rehearsal import RehearsalOptions, RehearsalPlan, RehearsalReport

INSIDE = Path(__file__).parent / "inside" / "main.py"
"""What runs in the user's Python."""

REFUSED = 2
"""The exit code of inside/main.py if the launcher's arguments cannot be rehearsed."""

OF_THIS_MACHINE = "CUDA_VISIBLE_DEVICES"
"""A variable by which a cluster gives a job some of this machine's GPUs: not of those that are rehearsed. One that the
command itself sets is kept."""


class RehearsalError(FsdpBenchError):
    """The user's process ended without a report. The message is one line."""

    exit_code = ExitCode.CRASHED


def rehearse(command: Command, gpu: StandInGpu, rank: int, options: RehearsalOptions) -> RehearsalReport:
    """Run a command as one rank; what it prints goes to standard error.

    Raises:
        MachineError: if its Python has no CUDA build of torch, or the stand-in cannot be compiled.
        SpecError: if the launcher refuses its arguments, or starts what cannot be rehearsed.
        RehearsalError: if its process ends without a report.
    """
    folder = build_stand_in(find_torch(str(command.python)))
    with tempfile.TemporaryDirectory(prefix="fsdp-bench-") as scratch:
        report = Path(scratch) / "report.json"
        plan = RehearsalPlan(
            **msgspec.structs.asdict(options),
            launcher=command.launcher.value,
            words=command.launcher_words,
            rank=rank,
            report=str(report),
        )
        (Path(scratch) / "plan.json").write_bytes(to_json(plan))
        policy = {"STAND_IN_UNSUPPORTED": "stop" if options.stops_at_unsupported else "warn"}
        words = [str(command.python), *command.interpreter_options, str(INSIDE), str(Path(scratch) / "plan.json")]
        inherited = {name: value for name, value in os.environ.items() if name != OF_THIS_MACHINE}
        own = {**inherited, **command.environment}
        code = _run(words, {**own, **stand_in_environment(folder, gpu, own), **policy})
        if not report.exists():
            raise RehearsalError(_ended_without_report(code))
        if code == REFUSED:
            raise SpecError(str(json.loads(report.read_bytes())["refused"]))
        return from_json(report.read_bytes(), RehearsalReport)


def _run(words: list[str], environment: dict[str, str]) -> int:
    """Run the user's Python; its standard output goes to our standard error, which is free for the answer."""
    sys.stdout.flush()
    process = subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL, stdout=2)
    try:
        return process.wait()
    except BaseException:
        process.kill()
        process.wait()
        raise


def _ended_without_report(code: int) -> str:
    how = f"by signal {-code}" if code < 0 else f"with code {code}"
    why = "; Linux sends this signal if host memory runs out" if code == -signal.SIGKILL else ""
    return f"the script's process ended {how} and left no report; its output is above{why}"
