"""Replaced collectives return what torch's return, or the result of a world without peers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from fsdp_bench.train.measuring.fake_group import reduce_on_host, replace_collectives
from tests.train.ranks import run_ranks

GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


def gather(*arguments: Any, **words: Any) -> Any:
    """Look it up in torch.distributed, as FSDP does."""
    return getattr(dist, GATHER)(*arguments, **words)


def scatter(*arguments: Any, **words: Any) -> Any:
    return getattr(dist, SCATTER)(*arguments, **words)


def reduced(device_type: str | None) -> list[torch.Tensor]:
    """The rank's parts: a flat message as FSDP1's, and one of two dimensions by words, averaged, as FSDP2's."""
    if device_type is not None:
        reduce_on_host(device_type)
    rank = dist.get_rank()
    flat, rows = torch.arange(6.0) + 10 * rank, torch.arange(8.0).view(4, 2) * (rank + 1)
    parts = [torch.empty(3), torch.empty(2, 2)]
    scatter(parts[0], flat)
    scatter(output=parts[1], input=rows, op=dist.ReduceOp.AVG)
    return parts


def test_a_message_is_reduced_on_the_host_as_on_the_device(tmp_path: Path) -> None:
    """Two ranks, by hand: sums of 0..5 and 10..15; averages of 0..7 and its double."""
    expected = [
        [torch.tensor([10.0, 12.0, 14.0]), torch.tensor([[0.0, 1.5], [3.0, 4.5]])],
        [torch.tensor([16.0, 18.0, 20.0]), torch.tensor([[6.0, 7.5], [9.0, 10.5]])],
    ]
    for device_type in (None, "cpu", "cuda"):
        found = run_ranks(2, tmp_path, reduced, device_type)
        for parts, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(parts, wanted, rtol=0, atol=0)


def alone(device_type: str) -> dict[str, list[torch.Tensor]]:
    """Replaced through the host first, as for a trial over gloo; then as rank 1 of 3 with nobody at the other end."""
    original = getattr(dist, SCATTER)
    reduce_on_host(device_type)
    replace_collectives()
    assert getattr(dist, SCATTER).__wrapped__ is original
    dist.destroy_process_group()
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=1, world_size=3, store=FakeStore())
    part, whole, in_place = torch.empty(2), torch.empty(6), torch.arange(6.0)
    scatter(part, torch.arange(6.0))
    gather(whole, torch.tensor([5.0, 7.0]))
    work = gather(output_tensor=in_place, input_tensor=in_place[2:4], async_op=True)
    assert work.wait()
    gather(torch.empty(0), torch.empty(0))
    output, shard = torch.empty(6), torch.tensor([5.0, 7.0])
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiled:
        gather(output, shard)
    copies = sum(event.name == "aten::copy_" for event in profiled.events() or ())
    return {"scattered": [part], "gathered": [whole, in_place], "copies": [torch.tensor(copies)]}


def test_alone_every_place_is_the_own_shard_in_one_copy_and_the_own_part_is_kept(tmp_path: Path) -> None:
    """Rank 1 of 3 keeps the third and fourth element of its own message; FSDP2 gathers in place."""
    (found,) = run_ranks(1, tmp_path, alone, "cpu")
    assert found["scattered"][0].tolist() == [2.0, 3.0]
    assert [whole.tolist() for whole in found["gathered"]] == [[5.0, 7.0] * 3, [2.0, 3.0] * 3]
    assert found["copies"][0].item() == 1
