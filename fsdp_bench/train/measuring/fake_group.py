"""Steps without communication: torch's fake process group with real tensors.

Collectives end at once and send nothing. An all-gather's output is filled with copies of the rank's own
shard, a reduced shard with the rank's own part of the gradient (replace_collectives), so that operators work on real
numbers. Everything else is as in training: FSDP's own code on all ranks of this machine at the same time. A step
takes less time than with the real group: the difference is exposed communication, and the time that communication and
compute cost each other by sharing cores, memory or multiprocessors.

An emulated trial is one process with such a group, as rank 0 of many: its memory and compute are those of a real rank.
"""

import functools
import gc
import inspect
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_bench.spec.setup import TrainSetup

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


def finished_hook(
    group: dist.ProcessGroup | None,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """All-reduce a bucket; return a finished future with its tensor. A fake group's own future is empty.

    DDP compares the annotations with the types themselves (_check_comm_hook in distributed.py).
    """
    dist.all_reduce(bucket.buffer(), group=group)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


_GATHERS = ("all_gather_into_tensor", "all_gather_single")
_SCATTERS = ("reduce_scatter_tensor", "reduce_scatter_single")
"""Names of reduce-scatter. torch 2.13 has both, 2.11 only the first."""

_REDUCES = ("all_reduce",)

_ORIGINAL = "replaced_original"
"""The attribute of a replacement that holds torch's own function."""

Call = Callable[[inspect.BoundArguments], Any]
"""Calls torch's own collective with these arguments; returns its work."""


def replace_collectives() -> None:
    """Complete the fake process group: all-gather repeats the own shard, reduce-scatter keeps the own part.

    torch's fake group gathers with one copy for each rank (FakeProcessGroup.hpp), hundreds of kernel launches with
    hundreds of ranks. Here it is one copy, except for FSDP1's all-gathers on a CPU, which take lists (_flat_param.py,
    all_gather). torch's fake group does nothing in a reduce-scatter, and its work's future is empty, but DDP's
    compression hooks take the reduced tensor from it.
    """
    _replace(_GATHERS, _gather_own_shard)
    _replace(_SCATTERS, _keep_own_part)
    _replace(_REDUCES, _with_a_future)


@contextmanager
def futures_of_all_reduces() -> Iterator[None]:
    """Replace only all-reduces inside a ``with`` block, so that their futures hold the tensor."""
    with collectives_restored():
        _replace(_REDUCES, _with_a_future)
        yield


def collectives_restored() -> AbstractContextManager[object]:
    """Put torch's own collectives back at the end of a ``with`` block."""
    names = (name for name in (*_GATHERS, *_SCATTERS, *_REDUCES) if hasattr(dist, name))
    return mock.patch.multiple(dist, **{name: getattr(dist, name) for name in names})


def reduce_on_host(device_type: str = "cuda") -> None:
    """Make reduce-scatters of a device's tensors go through host memory.

    Gloo also accepts device tensors, but clones the whole input on the device
    (ProcessGroupGloo::reduce_scatter_tensor_coalesced), which takes memory that a job with NCCL does not need.
    """
    _replace(_SCATTERS, functools.partial(_reduce_on_host, device_type))


def _replace(names: Iterable[str], instead: Callable[[Call, inspect.BoundArguments], Any]) -> None:
    for name in names:
        if hasattr(dist, name):
            found = getattr(dist, name)
            setattr(dist, name, _replacement(getattr(found, _ORIGINAL, found), instead))


def _replacement(
    original: Callable[..., Any], instead: Callable[[Call, inspect.BoundArguments], Any]
) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def collective(*arguments: Any, **keywords: Any) -> Any:
        bound = signature.bind(*arguments, **keywords)
        return instead(lambda found: original(*found.args, **found.kwargs), bound)

    setattr(collective, _ORIGINAL, original)
    return collective


def _gather_own_shard(gather: Call, bound: inspect.BoundArguments) -> Any:
    """Gather copies of the rank's own shard. The output is passed as one row, so that the group copies once."""
    (output_name, output), (input_name, shard) = list(bound.arguments.items())[:2]
    if not shard.numel():
        return gather(bound)
    row = output.view(1, output.numel() // shard.numel(), -1)
    bound.arguments.update({output_name: row, input_name: shard.reshape(1, 1, -1).expand(row.shape)})
    return gather(bound)


def _keep_own_part(reduce: Call, bound: inspect.BoundArguments) -> Any:
    work = reduce(bound)
    output, whole = list(bound.arguments.values())[:2]
    group = bound.arguments.get("group") or dist.distributed_c10d._get_default_group()
    rank = dist.get_group_rank(group, dist.get_rank())
    output.copy_(whole.view(-1)[rank * output.numel() : (rank + 1) * output.numel()].view_as(output))
    return work


def _reduce_on_host(device_type: str, reduce: Call, bound: inspect.BoundArguments) -> Any:
    (output_name, output), (input_name, whole) = list(bound.arguments.items())[:2]
    if output.device.type != device_type:
        return reduce(bound)
    assert not bound.arguments.get("async_op"), "FSDP waits on streams, not on works"
    part = torch.empty_like(output, device="cpu")
    bound.arguments.update({output_name: part, input_name: whole.cpu()})
    reduce(bound)
    output.copy_(part)
    return None


def _with_a_future(reduce: Call, bound: inspect.BoundArguments) -> Any:
    """Reduce at once; the work of an asynchronous collective has a future that holds its tensor."""
    is_asynchronous = bound.arguments.get("async_op")
    bound.arguments["async_op"] = False
    work = reduce(bound)
    if not is_asynchronous:
        return work
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.set_result([bound.arguments["tensor"]])
    return _create_work_from_future(future)
