"""One rank of a trial: where it runs, how far it has come, what it reports, and why it failed."""

from __future__ import annotations

import itertools
import traceback
from pathlib import Path

import msgspec
import torch

from fsdp_bench.spec.codec import to_json, write_atomically
from fsdp_bench.spec.rank_report import MemoryReading, Outcome, RankReport
from fsdp_bench.spec.record import TrialSpec
from fsdp_bench.train.measuring.meters import MemoryMeter

_trials_in_process = itertools.count(1)
"""How many trials this process has begun: one, unless they share it."""


def report_path(scratch: Path, rank: int) -> Path:
    """Return where a rank writes its report."""
    return scratch / f"rank-{rank}.json"


def phase_path(scratch: Path, rank: int) -> Path:
    """Return where a rank notes how far it has come, for the outcome of one that cannot report."""
    return scratch / f"rank-{rank}.phase"


def trace_path(scratch: Path, rank: int) -> Path:
    """Return where a rank keeps its last profiled step's trace."""
    return scratch / f"rank-{rank}.trace.json.gz"


def snapshot_path(scratch: Path, rank: int) -> Path:
    """Return where a rank keeps its allocations."""
    return scratch / f"rank-{rank}.snapshot.pickle"


class Rank:
    """One rank of a trial: its place in the world, and how far it has come."""

    def __init__(self, spec: TrialSpec, rank: int, local_rank: int, scratch: Path) -> None:
        self.spec = spec
        self.rank = rank
        self.scratch = scratch
        self.device = _device(spec, local_rank)
        self.meter: MemoryMeter | None = None
        self.stage = "start"
        self.trials_in_process = next(_trials_in_process)
        self.report = RankReport(rank=rank, outcome=Outcome.CRASHED)

    def enter(self, stage: str) -> None:
        """Note the stage on disk."""
        self.stage = stage
        phase_path(self.scratch, self.rank).write_text(stage)

    def update(self, **fields: object) -> None:
        """Add what is known now to the report."""
        self.report = msgspec.structs.replace(self.report, **fields)

    def write(self) -> None:
        """Write the report."""
        write_atomically(report_path(self.scratch, self.rank), to_json(self.report))


def _device(spec: TrialSpec, local_rank: int) -> torch.device:
    """Return a rank's device; over gloo ranks take turns on the GPUs that there are."""
    if spec.device != "cuda":
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count() if spec.run.backend == "gloo" else local_rank)


def dump_snapshot(this: Rank) -> None:
    """Write the allocations up to now, where they are recorded; an earlier snapshot is replaced."""
    if this.spec.keep_snapshot and torch.cuda.is_initialized():
        try:
            torch.cuda.memory._dump_snapshot(str(snapshot_path(this.scratch, this.rank)))
        except Exception:  # a broken context, a full disk: the trial's own outcome is what counts
            traceback.print_exc()


def partial_memory(this: Rank) -> MemoryReading | None:
    """Return what the meter has read of a rank that fails; None without one, or where the CUDA context is broken."""
    try:
        return own_memory(this, this.meter.reading()) if this.meter is not None else None
    except RuntimeError:
        return None


def own_memory(this: Rank, reading: MemoryReading) -> MemoryReading:
    """Leave out the resident set of a process that ran other trials before."""
    return reading if this.trials_in_process == 1 else msgspec.structs.replace(reading, peak_host_bytes=None)
