"""The state of one rank of a trial: its device, its stage, its report and its files."""

from __future__ import annotations

import traceback
from pathlib import Path

import msgspec
import torch

from fsdp_bench.spec.codec import to_json, write_atomically
from fsdp_bench.spec.rank_report import MemoryReading, Outcome, RankReport
from fsdp_bench.spec.record import TrialSpec
from fsdp_bench.train.measuring.meters import MemoryMeter
from fsdp_bench.train.processes.rendezvous import is_on_several_nodes, node_name


def report_path(scratch: Path, rank: int) -> Path:
    """Return the path of a rank's report."""
    return scratch / f"rank-{rank}.json"


def phase_path(scratch: Path, rank: int) -> Path:
    """Return the path of the file with a rank's current stage, for the outcome of a rank that cannot report."""
    return scratch / f"rank-{rank}.phase"


def node_path(scratch: Path, rank: int) -> Path:
    """Return the path of the file with the name of a rank's node, for the outcome of a rank that cannot report."""
    return scratch / f"rank-{rank}.node"


def trace_path(scratch: Path, rank: int) -> Path:
    """Return the path of the trace of a rank's last profiled step."""
    return scratch / f"rank-{rank}.trace.json.gz"


def snapshot_path(scratch: Path, rank: int) -> Path:
    """Return the path of a rank's memory snapshot."""
    return scratch / f"rank-{rank}.snapshot.pickle"


class Rank:
    """One rank of a trial: device, current stage and report."""

    def __init__(self, spec: TrialSpec, rank: int, local_rank: int, scratch: Path) -> None:
        self.spec = spec
        self.rank = rank
        self.scratch = scratch
        self.device = _device(spec, local_rank)
        self.meter: MemoryMeter | None = None
        self.stage = "start"
        self.report = RankReport(rank=rank, outcome=Outcome.CRASHED)
        if is_on_several_nodes():
            node_path(scratch, rank).write_text(node_name())

    def enter(self, stage: str) -> None:
        """Enter a stage, and write it to disk."""
        self.stage = stage
        phase_path(self.scratch, self.rank).write_text(stage)

    def update(self, **fields: object) -> None:
        """Set fields of the report."""
        self.report = msgspec.structs.replace(self.report, **fields)

    def write(self) -> None:
        """Write the report."""
        write_atomically(report_path(self.scratch, self.rank), to_json(self.report))


def _device(spec: TrialSpec, local_rank: int) -> torch.device:
    """Return a rank's device. With gloo, several ranks can share a GPU."""
    if spec.device != "cuda":
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count() if spec.run.backend == "gloo" else local_rank)


def dump_snapshot(this: Rank) -> None:
    """Write the memory snapshot, if allocations are recorded. An earlier snapshot is replaced."""
    if this.spec.keep_snapshot and torch.cuda.is_initialized():
        try:
            torch.cuda.memory._dump_snapshot(str(snapshot_path(this.scratch, this.rank)))
        except Exception:  # a broken context, a full disk: the trial's own outcome is what counts
            traceback.print_exc()


def partial_memory(this: Rank) -> MemoryReading | None:
    """Return the meter's readings of a rank that fails. None without a meter, or if the CUDA context is broken."""
    try:
        return this.meter.reading() if this.meter is not None else None
    except RuntimeError:
        return None
