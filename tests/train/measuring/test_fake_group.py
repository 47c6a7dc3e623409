"""Collectives that are replaced, or end at once without peers: what is the same as with real peers, and what is not."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_bench.spec.model import Family
from fsdp_bench.spec.setup import Checkpointing, TrainSetup
from fsdp_bench.train.measuring.communication import CollectiveCounter
from fsdp_bench.train.measuring.fake_group import (
    add_finished_hook,
    reduce_on_host,
    replace_collectives,
    replace_group_by_fake,
)
from fsdp_bench.train.models.transformer import batches
from fsdp_bench.train.step import train_step
from tests.profiles import validating
from tests.train.ranks import call_standing_ranks, run_ranks
from tests.train.training import LLAMA, S, every_case, setup_of, training_of

CASES = every_case(
    {
        "fp32": {"checkpointing": Checkpointing.FULL, "max_grad_norm": 1.0},
        "bf16": {"precision": "bf16-mixed", "gradient_accumulation_steps": 2, "sync_every_micro_batch": False},
        "fp16": {"precision": "fp16-mixed"},
    },
    picks=3,
)


def setups_of(world_size: int) -> list[TrainSetup]:
    """Return the cases on so many ranks, in ``make test`` the quick ones."""
    setups = [case.setup for case in CASES.values() if case.is_quick or validating()]
    return [setup for setup in setups if setup.world_size == world_size]


class OperatorCounter(TorchDispatchMode):
    """Counts the operators that compute."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not torch.utils._python_dispatch.is_traceable_wrapper_subclass(next(iter(args), None)):
            self.calls[str(func)] = self.calls.get(str(func), 0) + 1
        return func(*args, **(kwargs or {}))


def counts(
    setup: TrainSetup, rank: int, has_peers: bool = True
) -> tuple[dict[str, tuple[int, int, tuple[int, ...]]], int]:
    """Return the collectives of the third step, with the sizes of groups, and its number of matrix products."""
    training = training_of(Family.LLAMA, setup)
    if not has_peers:
        add_finished_hook(training.model, setup)
    *first, fourth, fifth = batches(setup, LLAMA.vocab_size, 4, rank, setup.world_size)
    for micro_batches in first:
        train_step(training, micro_batches)
    with CollectiveCounter() as sent:
        train_step(training, fourth)
    with OperatorCounter() as operators:
        train_step(training, fifth)
    products = sum(count for name, count in operators.calls.items() if name.startswith(("aten.mm", "aten.addmm")))
    kinds = {
        kind: (sent.calls[kind], sent.message_bytes[kind], tuple(sorted(sent.group_sizes[kind]))) for kind in sent.calls
    }
    return kinds, products


def count_with_peers(setups: list[TrainSetup]) -> list[tuple[Any, int]]:
    return [counts(setup, dist.get_rank()) for setup in setups]


def count_in_both_worlds(setups: list[TrainSetup]) -> list[tuple[Any, Any]]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    real = count_with_peers(setups)
    replace_group_by_fake(rank, world_size)
    silent = [counts(setup, rank, has_peers=False) for setup in setups]
    return list(zip(real, silent, strict=True))


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_same_is_issued_and_computed_as_with_peers(world_size: int, tmp_path: Path) -> None:
    setups = setups_of(world_size)
    for pairs in run_ranks(world_size, tmp_path, count_in_both_worlds, setups):
        for setup, ((sent, products), (silent, silent_products)) in zip(setups, pairs, strict=True):
            assert sent == silent, setup
            assert sent, setup
            assert products == silent_products > 0, setup


def test_hybrid_groups_are_told_apart_by_their_sizes() -> None:
    """Four ranks as two groups of two: parameters within a group, gradients also between them."""
    ((kinds, _),) = call_standing_ranks(4, count_with_peers, [setup_of(4, strategy=S.HYBRID_SHARD)])[0]
    assert {kind: sizes for kind, (_, _, sizes) in kinds.items()} == {
        "all_gather": (2,),
        "reduce_scatter": (2,),
        "all_reduce": (2,),
    }


def exchange() -> tuple[list[float], list[float], float]:
    rank = dist.get_rank()
    replace_group_by_fake(rank, dist.get_world_size())
    gathered, own = torch.full((6,), -1.0), torch.tensor([rank + 0.5, rank + 0.25])
    dist.group.WORLD._allgather_base(gathered, torch.cat([own, own])[:3]).wait()
    reduced = own.clone()
    dist.all_reduce(reduced)
    return gathered.tolist(), reduced.tolist(), float(rank)


def test_nothing_is_sent_and_gathered_buffers_hold_copies_of_the_own_shard(tmp_path: Path) -> None:
    for gathered, reduced, rank in run_ranks(2, tmp_path, exchange):
        assert gathered == 2 * [rank + 0.5, rank + 0.25, rank + 0.5]
        assert reduced == [rank + 0.5, rank + 0.25]


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
