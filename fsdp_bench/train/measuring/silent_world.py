"""The same ranks in a world in which collectives end at once: what a step takes without communication.

The process group is torch's ``fake`` one: a collective returns finished, and nothing is sent. An all-gather's output is
filled with copies of the rank's own shard, a reduced shard with the rank's own part of the gradient
(replaced_collectives.py), so that operators work on real numbers; what that copying takes stays in the step. All else
is as before: FSDP's own code, with real tensors, on all ranks of this machine at the same time. What a step takes less
than with the real group is communication that compute did not hide, and what the two cost each other where they share
cores, memory or streaming multiprocessors.

The same world holds one process alone, as rank 0 of many: its memory and its compute are the job's.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_bench.spec.setup import TrainSetup
from fsdp_bench.train.measuring.finished_hook import finished_hook
from fsdp_bench.train.measuring.replaced_collectives import be_alone

WARMUP_STEPS = 2
"""Adam's states appear in the first step, and DDP rebuilds its buckets before the second."""


def enter_silent_world(rank: int, world_size: int) -> None:
    """Leave the process group, together, for one of the same size and place in which nothing is sent.

    There is no way back: the peers are gone when this returns. What was trained before must be out of use.
    """
    dist.barrier()
    try:
        dist.destroy_process_group()
    except RuntimeError:
        traceback.print_exc()  # a peer that left first
    gc.collect()  # wrapped models are cycles, and hold the group that is gone
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    join_silent_world(rank, world_size)


def join_silent_world(rank: int, world_size: int) -> None:
    """Become a rank of a world in which nothing is sent, with or without peers."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    be_alone()


def silence(model: nn.Module, setup: TrainSetup) -> nn.Module:
    """Give DDP a hook that is finished at once: its reducer's own all-reduce waits for work that fake groups lack."""
    if isinstance(model, DistributedDataParallel) and setup.precision.reduce == setup.precision.store:
        model.register_comm_hook(None, finished_hook)
    return model


def time_steps(timed_step: Callable[[], float], num_steps: int) -> tuple[float, ...]:
    """Warm up; return the seconds of each step after that."""
    for _ in range(WARMUP_STEPS):
        timed_step()
    return tuple(timed_step() for _ in range(num_steps))
