"""torch.distributed as one rank without peers: nothing hangs, and small values are those of ranks that are alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rehearse.inside.rehearsing import run_inside

START = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
"""


Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a script to its end; returns its output."""

    def run_script(script: str, **changes: int) -> str:
        ran = run_inside(tmp_path, START + script, **changes)
        assert ran.report["outcome"] == "ended", ran.output
        return ran.output

    return run_script


def test_the_world_and_the_backend_are_those_that_the_script_asks_for(run: Run) -> None:
    found = run("print(dist.get_world_size(), dist.get_rank(), dist.get_backend())", rank=5, world_size=4096)
    assert "4096 5 gloo" in found


def test_objects_are_exchanged_with_ranks_that_are_alike(run: Run) -> None:
    found = run("""
parts = [None] * 8
dist.all_gather_object(parts, {"loss": 1.5})
print(parts == [{"loss": 1.5}] * 8)
sent = [["config", 7]]
dist.broadcast_object_list(sent, src=0)
print(sent)
gathered = [None] * 8
dist.gather_object("mine", gathered, dst=0)
print(gathered == ["mine"] * 8)
""")
    assert found.split() == ["True", "[['config',", "7]]", "True"]


def test_collectives_return_tensors_of_the_right_size(run: Run) -> None:
    found = run("""
x = torch.arange(4.0)
whole = torch.empty(32)
dist.all_gather_into_tensor(whole, x)
print(torch.equal(whole, x.repeat(8)))
own = torch.empty(4)
dist.reduce_scatter_tensor(own, whole)
print(torch.equal(own, 8 * x))
total = torch.arange(4.0)
work = dist.all_reduce(total, async_op=True)
work.wait()
print(torch.equal(work.get_future().value()[0], 8 * x))
highest = torch.arange(4.0)
dist.all_reduce(highest, op=dist.ReduceOp.MAX)
print(torch.equal(highest, x))
parts = [torch.empty(4) for _ in range(8)]
dist.all_gather(parts, x)
print(all(torch.equal(part, x) for part in parts))
swapped = torch.empty(8)
dist.all_to_all_single(swapped, torch.ones(8))
print(swapped.sum().item() == 8)
dist.send(x, 1); dist.recv(x, 1)
dist.barrier()
""")
    assert found.count("True") == 6
    assert "False" not in found


def test_subgroups_and_meshes_have_their_sizes(run: Run) -> None:
    found = run("""
group = dist.new_group([0, 1, 2])
print(dist.get_world_size(group), dist.get_world_size(dist.new_group([3, 4])))
mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
print(mesh["shard"].size(), mesh["replicate"].size())
dist.destroy_process_group()
""")
    assert found.split() == ["3", "-1", "4", "2"]


def test_waiting_for_a_key_of_another_rank_is_one_clear_error(tmp_path: Path) -> None:
    ran = run_inside(
        tmp_path,
        START
        + """
store = dist.distributed_c10d._get_default_store()
print(store.add("arrived", 1))
store.set("mine", "1"); store.wait(["mine"]); print(store.get("mine"))
store.get("address of rank 1")
""",
    )
    assert "8\nb'1'" in ran.output
    assert ran.report["failure"]["message"].startswith("rank 0 waits for the key ")
    assert "address of rank 1" in ran.report["failure"]["message"]
    assert "one rank of 8" in ran.report["failure"]["message"]


def test_wrappers_train(run: Run) -> None:
    found = run(
        """
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
fsdp1 = lambda module: FullyShardedDataParallel(module, device_id=torch.device("cpu"))
for wrap in (DistributedDataParallel, fsdp1, fully_shard):
    model = wrap(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.randn(2, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    print("trained", sum(p.numel() for p in model.parameters()))
""",
        steps=100,
    )
    assert found.count("trained") == 3


def test_collectives_are_counted_by_process_group(tmp_path: Path) -> None:
    ran = run_inside(tmp_path, START + "[dist.all_reduce(torch.ones(1)) for _ in range(3)]")
    assert ran.report["process_groups"] == {"0": 8}
    assert ran.report["collectives"] == [["0", "allreduce", 3]]
