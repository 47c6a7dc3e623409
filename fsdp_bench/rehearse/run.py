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

from fsdp_bench.rehearse.build import build_stand_in, stand_in_environment
from fsdp_bench.rehearse.command import Command
from fsdp_bench.rehearse.find_torch import find_torch
from fsdp_bench.rehearse.inside.main import END_SIGNAL
from fsdp_bench.spec.codec import from_json, to_json
from fsdp_bench.spec.errors import ExitCode, FsdpBenchError, SpecError
from fsdp_bench.spec.subprocesses.rehearsal import (
    RehearsalOptions,
    RehearsalOutcome,
    RehearsalPlan,
    RehearsalReport,
    RehearsedGpu,
)

INSIDE = Path(__file__).parent / "inside" / "main.py"
"""The script that runs in the user's Python."""

ENTER = Path(__file__).parent / "enter.py"
"""The program that runs before that, in our own Python."""

REFUSED = 2
"""The exit code of inside/main.py if the launcher's arguments cannot be rehearsed."""

REPORT_SECONDS = 10.0
"""The time that a script that is ended may take to report what was seen."""

OF_THIS_MACHINE = "CUDA_VISIBLE_DEVICES"
"""A variable by which a cluster gives a job some of this machine's GPUs: not of those that are rehearsed. One that the
command itself sets is kept."""


class RehearsalError(FsdpBenchError):
    """The user's process ended without a report. The message is one line."""

    exit_code = ExitCode.CRASHED


def rehearse(
    command: Command, gpu: RehearsedGpu, rank: int, options: RehearsalOptions, timeout_seconds: float | None = None
) -> RehearsalReport:
    """Run a command as one rank; what it prints goes to standard error.

    Its process, and all that it started, are ended after ``timeout_seconds``, or by an interrupt. The report has
    what was seen until then, if the script's main thread can be interrupted: with outcome TIMED_OUT or INTERRUPTED.

    Raises:
        MachineError: if its Python has no CUDA build of torch, or the stand-in cannot be compiled.
        SpecError: if the launcher refuses its arguments, or starts what cannot be rehearsed.
        RehearsalError: if its process ends without a report, or is ended before it can make one.
        KeyboardInterrupt: if it is interrupted before it can make one.
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
        on_stand_in = {**own, **stand_in_environment(folder, gpu, options.gpus_per_node, own), **policy}
        for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):  # of ours, which no overlay hides
            Path(on_stand_in[name]).mkdir(parents=True, exist_ok=True)
        code, cut = _run(words, on_stand_in, timeout_seconds)
        if not report.exists():
            if cut is RehearsalOutcome.INTERRUPTED:
                raise KeyboardInterrupt
            how = f"was ended after {timeout_seconds:g} s (--timeout)" if timeout_seconds and cut else _how_ended(code)
            raise RehearsalError(f"the script's process {how} and left no report; its output is above")
        if code == REFUSED:
            raise SpecError(str(json.loads(report.read_bytes())["refused"]))
        if options.snapshot is not None and (written := Path(scratch) / "snapshot").exists():
            shutil.move(written, options.snapshot)
        found = from_json(report.read_bytes(), RehearsalReport)
        is_cut = cut is RehearsalOutcome.INTERRUPTED or found.outcome is RehearsalOutcome.INTERRUPTED
        return msgspec.structs.replace(found, outcome=cut) if cut is not None and is_cut else found


def _run(
    words: list[str], environment: dict[str, str], timeout_seconds: float | None
) -> tuple[int, RehearsalOutcome | None]:
    """Run the user's Python; its standard output goes to our standard error, which is free for the answer.

    Processes that it leaves running, such as a tracker's, end with it.

    Returns:
        Its exit code, and TIMED_OUT or INTERRUPTED if it was ended; None if it ended by itself.
    """
    cut = None
    sys.stdout.flush()
    process = subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL, stdout=2, process_group=0)
    end = os.pidfd_open(process.pid)
    try:
        try:
            if not select.select([end], [], [], timeout_seconds)[0]:
                cut = RehearsalOutcome.TIMED_OUT
        except KeyboardInterrupt:
            cut = RehearsalOutcome.INTERRUPTED
        if cut is not None:
            process.send_signal(END_SIGNAL)
            select.select([end], [], [], REPORT_SECONDS)
    finally:
        os.close(end)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # before wait(), after which another process may have its number
        code = process.wait()
    return code, cut


def _how_ended(code: int) -> str:
    if code == -signal.SIGKILL:
        return "ended by signal 9, which Linux sends if host memory runs out,"
    return f"ended by signal {-code}" if code < 0 else f"ended with code {code}"
