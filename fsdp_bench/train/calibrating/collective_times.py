"""Times collectives by kind, group and message size."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist

from fsdp_bench.spec.profile import CollectiveTime
from fsdp_bench.train.measuring.stopwatch import Stopwatch

MESSAGES = {"cpu": (2**10, 2**16, 2**20, 2**23, 2**25), "cuda": (2**10, 2**16, 2**20, 2**23, 2**26, 2**29)}
"""Message sizes in bytes."""
SIDE = {"cpu": 512, "cuda": 2048}
"""The side of a matrix product that runs between two collectives: some milliseconds on a CPU."""
ROUNDS, ROUNDS_LONGER = 10, 4
"""The number of rounds, and how many times longer each is than for an operator. More are needed because the time is a
difference. The median counts, as for the steps of a trial."""


_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""torch 2.13 has a new name for it; 2.11 has only the old one."""


def collective_times(watch: Stopwatch) -> Iterator[CollectiveTime]:
    """Time each kind in groups of every size that divides the world, with consecutive and with distant ranks."""
    world, device = dist.get_world_size(), watch.device
    longer = Stopwatch(device, ROUNDS_LONGER * watch.round_seconds, ROUNDS, statistics.median)
    side = torch.ones(SIDE[device.type], SIDE[device.type], device=device)
    for size in (size for size in range(2, world + 1) if world % size == 0):
        for neighbours in (True, False) if size < world else (True,):
            group = _own_group(size, neighbours)
            alone = longer.seconds(partial(torch.mm, side, side))
            for num_bytes in MESSAGES[device.type]:
                for kind, call in _collectives(num_bytes, size, group, device):
                    added = longer.seconds(partial(_behind_an_operator, side, call), together=True) - alone
                    seconds = added if added > 0 else longer.seconds(call, together=True)
                    yield CollectiveTime(
                        kind=kind, group_size=size, neighbours=neighbours, message_bytes=num_bytes, seconds=seconds
                    )


def _behind_an_operator(side: torch.Tensor, collective: Callable[[], object]) -> None:
    """Run a collective after an operator, as in training: ranks start it at different times."""
    torch.mm(side, side)
    collective()


def _own_group(size: int, neighbours: bool) -> dist.ProcessGroup:
    """Make all groups of a size; return the group of this rank."""
    world, rank = dist.get_world_size(), dist.get_rank()
    count = world // size
    rows = [
        [index * size + place if neighbours else place * count + index for place in range(size)]
        for index in range(count)
    ]
    groups = [dist.new_group(row) for row in rows]
    return next(group for group, row in zip(groups, rows, strict=True) if rank in row)


def _collectives(
    num_bytes: int, size: int, group: dist.ProcessGroup, device: torch.device
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield each kind and a call of it. Calls allocate their output, as FSDP does: new pages cost time on a CPU."""
    whole = torch.ones(max(num_bytes // 4 // size, 1) * size, device=device)
    part = torch.ones(whole.numel() // size, device=device)
    yield "all_gather", lambda: _ALL_GATHER(torch.empty_like(whole), part, group=group)
    yield "reduce_scatter", lambda: _REDUCE_SCATTER(torch.empty_like(part), whole, group=group)
    yield "all_reduce", lambda: dist.all_reduce(whole, group=group)
