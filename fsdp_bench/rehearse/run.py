"""Rehearses a command: the user's script as one rank, beside the stand-in for NVIDIA's libraries, in a subprocess."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from fsdp_bench.rehearse.build import StandInGpu, build_stand_in, stand_in_environment
from fsdp_bench.rehearse.command import Command
from fsdp_bench.rehearse.find_torch import find_torch
from fsdp_bench.spec.codec import from_json, to_json
from fsdp_bench.spec.errors import FsdpBenchError, SpecError
from fsdp_bench.spec.exit_codes import ExitCode
from fsdp_bench.spec.rehearsal import RehearsalPlan, RehearsalReport

INSIDE = Path(__file__).parent / "inside" / "main.py"
"""What runs in the user's Python."""

REFUSED = 2
"""The exit code of that program if the launcher's arguments cannot be rehearsed."""

OF_THIS_MACHINE = "CUDA_VISIBLE_DEVICES"
"""A variable by which a cluster gives a job some of this machine's GPUs: not of those that are rehearsed. One that the
command itself sets is kept."""


class RehearsalError(FsdpBenchError):
    """The user's process ended without a report. The message is one line."""

    exit_code = ExitCode.CRASHED


@dataclass(frozen=True)
class RankToRun:
    """One rank of a world, and how long it runs."""

    rank: int
    world_size: int | None
    """None: as the launcher's own arguments say."""
    gpus_per_node: int
    steps: int | None = None
    snapshot: Path | None = None
    random_weights: bool = False
    balanced_routing: bool = False
    stops_at_unsupported: bool = True
    """Whether a function that the stand-in has not fails; otherwise it is counted, and the script goes on."""


def rehearse(command: Command, gpu: StandInGpu, one: RankToRun) -> RehearsalReport:
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
            launcher=command.launcher.value,
            words=tuple(command.launcher_words),
            rank=one.rank,
            world_size=one.world_size,
            gpus_per_node=one.gpus_per_node,
            steps=one.steps,
            report=str(report),
            snapshot=str(one.snapshot.resolve()) if one.snapshot is not None else None,
            random_weights=one.random_weights,
            balanced_routing=one.balanced_routing,
            stops_at_unsupported=one.stops_at_unsupported,
        )
        (Path(scratch) / "plan.json").write_bytes(to_json(plan))
        policy = {"STAND_IN_UNSUPPORTED": "stop" if one.stops_at_unsupported else "warn"}
        words = [str(command.python), *command.interpreter_options, str(INSIDE), str(Path(scratch) / "plan.json")]
        inherited = {name: value for name, value in os.environ.items() if name != OF_THIS_MACHINE}
        code = _run(words, {**inherited, **command.environment, **stand_in_environment(folder, gpu), **policy})
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
    return f"the script's process ended {how} and left no report; its output is above"
