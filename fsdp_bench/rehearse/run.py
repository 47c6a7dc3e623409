"""Rehearses a command: runs the user's script as one rank in a subprocess, on the stand-in for NVIDIA's libraries."""

from __future__ import annotations

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

from fsdp_bench.rehearse.build import StandInGpu, build_stand_in, stand_in_environment
from fsdp_bench.rehearse.command import Command
from fsdp_bench.rehearse.find_torch import find_torch
from fsdp_bench.spec.codec import from_json, to_json
from fsdp_bench.spec.errors import FsdpBenchError, SpecError
from fsdp_bench.spec.exit_codes import ExitCode
from fsdp_bench.spec.subprocesses.rehearsal import RehearsalOptions, RehearsalPlan, RehearsalReport

INSIDE = Path(__file__).parent / "inside" / "main.py"
"""What runs in the user's Python."""

ENTER = Path(__file__).parent / "enter.py"
"""The program that runs before that, in our own Python."""

REFUSED = 2
"""The exit code of inside/main.py if the launcher's arguments cannot be rehearsed."""

OF_THIS_MACHINE = "CUDA_VISIBLE_DEVICES"
"""A variable by which a cluster gives a job some of this machine's GPUs: not of those that are rehearsed. One that the
command itself sets is kept."""


class RehearsalError(FsdpBenchError):
    """The user's process ended without a report. The message is one line."""

    exit_code = ExitCode.CRASHED


def rehearse(
    command: Command, gpu: StandInGpu, rank: int, options: RehearsalOptions, timeout_seconds: float | None = None
) -> RehearsalReport:
    """Run a command as one rank; what it prints goes to standard error.

    Its process, and all that it started, are ended after ``timeout_seconds``.

    Raises:
        MachineError: if its Python has no CUDA build of torch, or the stand-in cannot be compiled.
        SpecError: if the launcher refuses its arguments, or starts what cannot be rehearsed.
        RehearsalError: if its process ends without a report, or is ended.
    """
    with tempfile.TemporaryDirectory(prefix="fsdp-bench-") as scratch:
        folder = build_stand_in(find_torch(str(command.python)), Path(scratch))
        report = Path(scratch) / "report.json"
        plan = RehearsalPlan(
            **{**msgspec.structs.asdict(options), "snapshot": options.snapshot and str(Path(scratch) / "snapshot")},
            launcher=command.launcher.value,
            words=command.launcher_words,
            rank=rank,
            report=str(report),
        )
        (Path(scratch) / "plan.json").write_bytes(to_json(plan))
        policy = {"STAND_IN_UNSUPPORTED": "stop" if options.stops_at_unsupported else "warn"}
        path = str(Path(scratch) / "plan.json")
        words = [sys.executable, "-I", "-S", str(ENTER), path]
        words += [str(command.python), *command.interpreter_options, str(INSIDE), path]
        inherited = {name: value for name, value in os.environ.items() if name != OF_THIS_MACHINE}
        own = {**inherited, **command.environment}
        on_stand_in = {**own, **stand_in_environment(folder, gpu, own), **policy}
        for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):  # of ours, which no overlay hides
            Path(on_stand_in[name]).mkdir(parents=True, exist_ok=True)
        code = _run(words, on_stand_in, timeout_seconds)
        if not report.exists():
            raise RehearsalError(_ended_without_report(code))
        if code == REFUSED:
            raise SpecError(str(json.loads(report.read_bytes())["refused"]))
        if options.snapshot is not None and (written := Path(scratch) / "snapshot").exists():
            shutil.move(written, options.snapshot)
        return from_json(report.read_bytes(), RehearsalReport)


def _run(words: list[str], environment: dict[str, str], timeout_seconds: float | None) -> int:
    """Run the user's Python; its standard output goes to our standard error, which is free for the answer.

    Processes that it leaves running, such as a tracker's, end with it.
    """
    sys.stdout.flush()
    process = subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL, stdout=2, process_group=0)
    end = os.pidfd_open(process.pid)
    try:
        if not select.select([end], [], [], timeout_seconds)[0]:
            raise RehearsalError(f"the script was ended after {timeout_seconds:g} s (--timeout); its output is above")
    finally:
        os.close(end)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # before wait(), after which another process may have its number
        code = process.wait()
    return code


def _ended_without_report(code: int) -> str:
    how = f"by signal {-code}" if code < 0 else f"with code {code}"
    why = "; Linux sends this signal if host memory runs out" if code == -signal.SIGKILL else ""
    return f"the script's process ended {how} and left no report; its output is above{why}"
