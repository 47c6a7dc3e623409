"""Steps without communication: torch's fake process group with real tensors.

Collectives end at once and send nothing. An all-gather's output is filled with copies of the rank's own
shard, a reduced shard with the rank's own part of the gradient (replaced_collectives.py), so that operators work on
real numbers. Everything else is as in training: FSDP's own code on all ranks of this machine at the same time. A step
takes less time than with the real group: the difference is exposed communication, and the time that communication and
compute cost each other by sharing cores, memory or multiprocessors.

An emulated trial is one process with such a group, as rank 0 of many: its memory and compute are those of a real rank.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_bench.spec.setup import TrainSetup
from fsdp_bench.train.measuring.replaced_collectives import replace_collectives

WARMUP_STEPS = 2
"""Steps before the timed ones: the first creates Adam's states, and DDP rebuilds its buckets before the second."""


def replace_group_by_fake(rank: int, world_size: int) -> None:
    """Replace the process group, on all ranks together, by a fake one with the same rank and size.

    This cannot be undone: the other ranks are gone when this returns. Models wrapped before must not be used again.
    """
    dist.barrier()
    try:
        dist.destroy_process_group()
    except RuntimeError:
        traceback.print_exc()  # a peer that left first
    gc.collect()  # wrapped models are cycles, and hold the group that is gone
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    join_fake_group(rank, world_size)


def join_fake_group(rank: int, world_size: int) -> None:
    """Initialize torch.distributed with a fake process group, whether or not there are other ranks."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    replace_collectives()


def add_finished_hook(model: nn.Module, setup: TrainSetup) -> None:
    """Register a communication hook with DDP that works with a fake group, because DDP's Reducer waits for a future."""
    if isinstance(model, DistributedDataParallel) and setup.precision.reduce == setup.precision.store:
        model.register_comm_hook(None, finished_hook)


def finished_hook(group: dist.ProcessGroup | None, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """All-reduce a bucket; return a finished future with its tensor. A fake group's own future is empty."""
    dist.all_reduce(bucket.buffer(), group=group)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


# DDP refuses annotations that are strings (distributed.py, _check_comm_hook).
finished_hook.__annotations__ = {
    "bucket": torch._C._distributed_c10d.GradBucket,
    "return": torch.futures.Future[torch.Tensor],
}


def time_steps(timed_step: Callable[[], float], num_steps: int) -> tuple[float, ...]:
    """Run warm-up steps, then timed steps; return the seconds of each timed step."""
    for _ in range(WARMUP_STEPS):
        timed_step()
    return tuple(timed_step() for _ in range(num_steps))
