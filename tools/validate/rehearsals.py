"""Rehearses trials without a sweep file: rank 0 of each, on a stand-in for NVIDIA's libraries."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from fsdp_bench.spec.codec import from_json, to_json
from fsdp_bench.spec.rank_report import Failure, Outcome, RankReport
from fsdp_bench.spec.record import TrialSpec
from fsdp_bench.spec.subprocesses.rehearsal import RehearsedGpu
from fsdp_bench.sweep.launchers.one_node import ForkServer
from fsdp_bench.sweep.run.rehearsed import stand_in_environment
from fsdp_bench.sweep.run.runner import TimeLimit

POLL_SECONDS = 0.5
"""Time between two checks of the time limit."""


def rehearsals(specs: Iterable[TrialSpec], gpu: RehearsedGpu) -> Iterator[RankReport]:
    """Yield what rank 0 of each trial reports, in order.

    A trial without a report is yielded as ``timeout`` after its time limit, else as ``crashed``, with the reason.

    Raises:
        MachineError: if this machine cannot rehearse.
    """
    environment = stand_in_environment(gpu)
    with tempfile.TemporaryDirectory(prefix="fsdp-bench-") as folder:
        server = ForkServer(Path(folder) / "server.log", folder, environment)
        try:
            for number, spec in enumerate(specs):
                scratch = Path(folder) / str(number)
                scratch.mkdir()
                yield _rehearse(spec, scratch, server)
        finally:
            server.close()


def _rehearse(spec: TrialSpec, scratch: Path, server: ForkServer) -> RankReport:
    (scratch / "trial.json").write_bytes(to_json(spec))
    launched = server.start(scratch / "trial.json", scratch, spec.num_processes)
    limit = TimeLimit(spec.run.timeout_seconds)
    try:
        while not launched.finished and not limit.has_run_out():
            launched.wait(POLL_SECONDS)
    finally:
        killed = not launched.finished
        if killed:
            launched.kill()
    try:
        return from_json((scratch / "rank-0.json").read_bytes(), RankReport).without_times()
    except (OSError, msgspec.DecodeError):
        if killed:
            return _without_report(Outcome.TIMEOUT, f"not done after {spec.run.timeout_seconds:g} s")
        return _without_report(Outcome.CRASHED, "it left no report, or one that cannot be read")


def _without_report(outcome: Outcome, message: str) -> RankReport:
    failure = Failure(message=message, phase="unknown", at=time.time())
    return RankReport(rank=0, outcome=outcome, failure=failure)
