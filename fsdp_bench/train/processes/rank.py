"""The state of one rank of a trial: its device, its stage, its report and its files; the outcome of its exception."""

import os
import platform
import sys
import time
import traceback
from pathlib import Path

import msgspec
import torch
from torch._C._distributed_c10d import FileStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from fsdp_bench.spec.codec import to_json
from fsdp_bench.spec.files import write_atomically
from fsdp_bench.spec.rank_report import Failure, MemoryReading, Outcome, RankReport
from fsdp_bench.spec.record import TrialSpec
from fsdp_bench.train.measuring.meters import MemoryMeter
from fsdp_bench.train.measuring.storage_tracker import BudgetExceeded


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
            self.file("node").write_text(node_name())  # for the outcome of a rank that cannot report

    def file(self, ending: str) -> Path:
        """Return the path of one of the rank's files in the scratch folder."""
        return self.scratch / f"rank-{self.rank}.{ending}"

    def enter(self, stage: str) -> None:
        """Enter a stage, and write it to disk, for the outcome of a rank that cannot report."""
        self.stage = stage
        self.file("phase").write_text(stage)

    def update(self, **fields: object) -> None:
        """Set fields of the report."""
        self.report = msgspec.structs.replace(self.report, **fields)

    def write(self) -> None:
        """Write the report."""
        write_atomically(self.file("json"), to_json(self.report))


def _device(spec: TrialSpec, local_rank: int) -> torch.device:
    """Return a rank's device. With gloo, several ranks can share a GPU."""
    if spec.device != "cuda":
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count() if spec.run.backend == "gloo" else local_rank)


def dump_snapshot(this: Rank) -> None:
    """Write the memory snapshot, if allocations are recorded. An earlier snapshot is replaced."""
    if this.spec.keep_snapshot and torch.cuda.is_initialized():
        try:
            torch.cuda.memory._dump_snapshot(str(this.file("snapshot.pickle")))
        except Exception:  # a broken context, a full disk: the trial's own outcome is what counts
            traceback.print_exc()


def partial_memory(this: Rank) -> MemoryReading | None:
    """Return the meter's readings of a rank that fails. None without a meter, or if the CUDA context is broken."""
    try:
        return this.meter.reading() if this.meter is not None else None
    except RuntimeError:
        return None


_OUT_OF_DEVICE_MEMORY = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "Cuda failure 2",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
"""Error messages of torch's allocator, the CUDA driver (which loads kernels lazily), NCCL, cuBLAS, cuDNN."""


def classify(error: BaseException, phase: str) -> tuple[Outcome, Failure]:
    """Return the outcome and failure of a rank that ended with an exception, in a ``phase`` of the step or stage.

    ``oom_gpu`` where the device's memory ran out, ``oom_host`` where the host's or a CPU's memory_limit did, else
    ``crashed``. sweep/run/outcome.py decides a trial's outcome from those of all its ranks.
    """
    text = " ".join(str(error).split()) or type(error).__name__
    message, summary = f"{type(error).__name__}: {text[:400]}", None
    if isinstance(error, torch.OutOfMemoryError) or any(known in text for known in _OUT_OF_DEVICE_MEMORY):
        if torch.cuda.is_initialized():
            summary = torch.cuda.memory_summary(abbreviated=True)
        outcome, limit = Outcome.OOM_GPU, "device"
    elif isinstance(error, BudgetExceeded):
        outcome, limit = Outcome.OOM_HOST, "budget"
    elif isinstance(error, MemoryError) or "DefaultCPUAllocator" in text or "std::bad_alloc" in text:
        outcome, limit = Outcome.OOM_HOST, "host"
    else:
        outcome, limit = Outcome.CRASHED, None
    return outcome, Failure(message=message, phase=phase, at=time.time(), limit=limit, allocator_summary=summary)


# -- How the ranks of a trial find each other, and which node they are on ----------------------------------------------
#
# On one machine a file in the trial's scratch folder is the rendezvous, and nothing listens on a network. On several
# nodes it is the store of torchrun's rendezvous (torchrun.py): a TCPStore on the first node.

STORE = "FSDP_BENCH_STORE"
"""The environment variable that says where the ranks' store is: ``env://``, torchrun's; without it, in a file."""

NODE = "FSDP_BENCH_NODE"
"""The environment variable with the node's name, where several nodes may have the same host name."""


def plain_path(folder: Path) -> str:
    """Return a path of a folder that torch accepts, whatever characters the folder's name has. Keeps a descriptor open.

    torch reads paths as UTF-8, and some as URLs. Paths in /proc/self/fd are plain ASCII.
    """
    if sys.platform != "linux":
        return str(folder)
    return f"/proc/self/fd/{os.open(folder, os.O_RDONLY | os.O_DIRECTORY)}"


def meet(scratch: Path, trial_id: str, world_size: int) -> Store:
    """Return the store by which a trial's ranks find each other."""
    if is_on_several_nodes():
        store, _, _ = next(iter(rendezvous(os.environ[STORE])))
        return PrefixStore(trial_id, store)
    return FileStore(f"{plain_path(scratch)}/ranks-{trial_id}", world_size)


def is_on_several_nodes() -> bool:
    """Whether this rank has peers on other nodes."""
    return STORE in os.environ


def node_name() -> str:
    """Return the name of the node that this process is on: the launcher's, Slurm's, or the host's."""
    return os.environ.get(NODE) or os.environ.get("SLURMD_NODENAME") or platform.node()
