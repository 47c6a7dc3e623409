"""Runs one rank of a trial, for the fork server or torchrun: joins the group, measures, reports, leaves."""

import os
import platform
import sys
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from fsdp_bench.spec.codec import from_json
from fsdp_bench.spec.rank_report import Outcome
from fsdp_bench.spec.record import TrialSpec
from fsdp_bench.spec.setup import Offload
from fsdp_bench.train.measuring.fake_group import join_fake_group, reduce_on_host
from fsdp_bench.train.processes.backends import versions
from fsdp_bench.train.processes.measurement import measure
from fsdp_bench.train.processes.rank import (
    Rank,
    classify,
    dump_snapshot,
    is_on_several_nodes,
    meet,
    node_name,
    partial_memory,
)
from fsdp_bench.train.wrapping.wrap import ShardsNothingWarning

SNAPSHOT_ENTRIES = 100_000
"""The most allocations and frees in a snapshot. If there are more, it has the last ones."""


def run_rank(
    trial: Path, rank: int, local_rank: int, scratch: Path, launcher: str, num_local: int | None = None
) -> int:
    """Run one rank of the TrialSpec in a file; return the exit code of the process, which has nothing left to write.

    ``num_local`` is the number of ranks on this node, by default all.
    """
    code = _run(Rank(from_json(trial.read_bytes(), TrialSpec), rank, local_rank, scratch), launcher, num_local)
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _run(this: Rank, launcher: str, num_local: int | None) -> int:
    try:
        this.enter("start")
        _start(this, launcher, num_local or this.spec.num_processes)
        measure(this)
        this.update(outcome=Outcome.OK)
        this.write()
    except BaseException as error:
        # Written before any further collective: the peers are still inside theirs.
        traceback.print_exc()
        dump_snapshot(this)
        outcome, failure = classify(error, this.meter.current_phase if this.meter else this.stage)
        this.update(outcome=outcome, failure=failure, memory=partial_memory(this))
        this.write()
        return 1
    _leave_group()
    return 0


def _start(this: Rank, launcher: str, num_local: int) -> None:
    spec = this.spec
    warnings.filterwarnings("ignore", category=ShardsNothingWarning)  # a sweep compares with it on purpose
    threads = spec.run.threads_per_rank or max(_num_cores() // num_local, 1)
    torch.set_num_threads(threads)
    torch.manual_seed(spec.setup.seed)
    if this.device.type == "cuda":
        torch.cuda.set_device(this.device)
        torch.backends.cuda.enable_cudnn_sdp(spec.run.attention != "flash")
    if spec.keep_snapshot:
        # Python's stacks alone: naming C++ frames takes seconds, or fails where there is no addr2line.
        torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_ENTRIES, stacks="python")
    if spec.run.emulate:
        join_fake_group(this.rank, spec.setup.world_size)
    else:
        backend = _backend(this)
        dist.init_process_group(
            backend,
            store=meet(this.scratch, spec.id, spec.setup.world_size),
            rank=this.rank,
            world_size=spec.setup.world_size,
            device_id=this.device if "nccl" in backend else None,
        )
        if this.device.type == "cuda" and backend == "gloo":
            reduce_on_host()
    started = {"launcher": launcher}
    if is_on_several_nodes():
        started |= {"node": node_name(), "ranks_per_node": str(num_local)}
    is_cuda, machine = this.device.type == "cuda", platform.processor() or platform.machine()
    device_name = torch.cuda.get_device_name(this.device) if is_cuda else machine
    this.update(environment=_environment(this, threads) | started, device_name=device_name)


def _num_cores() -> int:
    """Return the cores that this process may use, which in a job of Slurm can be fewer than the node has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _backend(this: Rank) -> str:
    """Return the backend of the process group. With offload it also has gloo, for gradient norms in host memory."""
    if this.device.type != "cuda" or this.spec.run.backend == "gloo":
        return "gloo"
    return "cpu:gloo,cuda:nccl" if this.spec.setup.offload is Offload.PARAMS else "nccl"


def _environment(this: Rank, threads: int) -> dict[str, str]:
    environment = versions(this.device.type) | {"threads_per_rank": str(threads)}
    if this.device.type == "cuda":
        environment["allocator"] = os.environ.get(
            "PYTORCH_CUDA_ALLOC_CONF", os.environ.get("PYTORCH_ALLOC_CONF", "default")
        )
    return environment


def _leave_group() -> None:
    """Leave the process group together with all ranks: if one left early, the last collective would fail."""
    try:
        dist.barrier()
        dist.destroy_process_group()
    except RuntimeError:
        traceback.print_exc()  # the report is written; a peer that left first changes nothing
