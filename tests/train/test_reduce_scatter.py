"""What stands in the place of torch's reduce-scatter gives what torch's gives."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from fsdp_bench.train.reduce_scatter import go_through_the_host, keep_the_own_part
from tests.train.ranks import run_ranks


def reduced(device_type: str | None) -> list[torch.Tensor]:
    """The rank's parts: a flat message as FSDP1's, and one of two dimensions by words, averaged, as FSDP2's."""
    if device_type is not None:
        go_through_the_host(device_type)
    rank = dist.get_rank()
    flat, rows = torch.arange(6.0) + 10 * rank, torch.arange(8.0).view(4, 2) * (rank + 1)
    parts = [torch.empty(3), torch.empty(2, 2)]
    dist.reduce_scatter_single(parts[0], flat)
    dist.reduce_scatter_single(output=parts[1], input=rows, op=dist.ReduceOp.AVG)
    return parts


def test_a_message_through_the_host_is_reduced_as_one_on_the_device(tmp_path: Path) -> None:
    """Two ranks, by hand: sums of 0..5 and 10..15; averages of 0..7 and its double."""
    expected = [
        [torch.tensor([10.0, 12.0, 14.0]), torch.tensor([[0.0, 1.5], [3.0, 4.5]])],
        [torch.tensor([16.0, 18.0, 20.0]), torch.tensor([[6.0, 7.5], [9.0, 10.5]])],
    ]
    for device_type in (None, "cpu", "cuda"):
        found = run_ranks(2, tmp_path, reduced, device_type)
        for parts, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(parts, wanted, rtol=0, atol=0)


def replaced_twice() -> list[torch.Tensor]:
    """Through the host first, as a trial over gloo; then as it is where nobody is at the other end."""
    original = dist.reduce_scatter_single
    go_through_the_host("cpu")
    keep_the_own_part()
    assert dist.reduce_scatter_single.__wrapped__ is original
    part = torch.empty(2)
    dist.destroy_process_group()
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=1, world_size=3, store=FakeStore())
    dist.reduce_scatter_single(part, torch.arange(6.0))
    return [part]


def test_a_replacement_replaces_torchs_own_function(tmp_path: Path) -> None:
    """Rank 1 of 3 keeps the third and fourth element of its own message."""
    found = run_ranks(1, tmp_path, replaced_twice)
    torch.testing.assert_close(found[0][0], torch.tensor([2.0, 3.0]), rtol=0, atol=0)
