"""What a rehearsal replaces in torch, as scripts see it: peers of one rank, and host memory of models.

Nothing hangs, and small values are those of ranks that are alike; real data stays what it is.
"""

from pathlib import Path

import pytest

from tests.rehearse.inside.rehearsing import run_inside

MIB = 1 << 20
START = """
import torch, torch.distributed as dist, torch.distributed.fsdp
dist.init_process_group("gloo")
"""
SCRIPTS = {
    "objects are exchanged with ranks that are alike": """
parts = [None] * 8
dist.all_gather_object(parts, {"loss": 1.5})
assert parts == [{"loss": 1.5}] * 8
sent = [["config", 7]]
dist.broadcast_object_list(sent, src=0)
assert sent == [["config", 7]]
gathered = [None] * 8
dist.gather_object("mine", gathered, dst=0)
assert gathered == ["mine"] * 8
""",
    "collectives return tensors of the right size": """
x = torch.arange(4.0)
whole = torch.empty(32)
dist.all_gather_into_tensor(whole, x)
assert torch.equal(whole, x.repeat(8))
own = torch.empty(4)
dist.reduce_scatter_tensor(own, whole)
assert torch.equal(own, 8 * x)
total = torch.arange(4.0)
work = dist.all_reduce(total, async_op=True)
work.wait()
assert torch.equal(work.get_future().value()[0], 8 * x)
highest = torch.arange(4.0)
dist.all_reduce(highest, op=dist.ReduceOp.MAX)
assert torch.equal(highest, x)
parts = [torch.empty(4) for _ in range(8)]
dist.all_gather(parts, x)
assert all(torch.equal(part, x) for part in parts)
swapped = torch.empty(8)
dist.all_to_all_single(swapped, torch.ones(8))
assert swapped.sum().item() == 8
dist.send(x, 1); dist.recv(x, 1)
dist.barrier()
""",
    "a group without a backend for the CPU takes no tensor of it": """
group = dist.new_group(backend="cuda:gloo")
try:
    dist.all_reduce(torch.ones(1), group=group)
except RuntimeError as error:
    assert "No backend type associated with device type cpu" in str(error)
else:
    raise AssertionError("torch would have raised")
""",
    "subgroups and meshes have their sizes": """
group = dist.new_group([0, 1, 2])
assert (dist.get_world_size(group), dist.get_world_size(dist.new_group([3, 4]))) == (3, -1)
mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
assert (mesh["shard"].size(), mesh["replicate"].size()) == (4, 2)
dist.destroy_process_group()
""",
    "real data keeps its values": """
data = torch.arange(4 * 2**20, dtype=torch.float32)
assert torch.equal(data.to(torch.float64).long(), torch.arange(4 * 2**20))
other = torch.empty(4 * 2**20)
other.copy_(data)
assert torch.equal(other, data) and torch.equal(data.clone(), data)
assert torch.ones(8 * 2**20, dtype=torch.int64).sum().item() == 8 * 2**20
assert torch.zeros(100).fill_(3).sum().item() == 300
data.add_(1)
assert data[5].item() == 6
""",
    "factories obey the device of a context": """
with torch.device("meta"):
    made = torch.ones(4), torch.zeros(4 * 2**20), torch.randn(4, device="cpu")
assert [tensor.device.type for tensor in made] == ["meta", "meta", "cpu"]
torch.set_default_device("meta")
assert torch.ones(4).device.type == "meta"
""",
    "what was never written reads as zeros, in a copy, too": """
model = torch.nn.Linear(4096, 4096)
copy = model.weight.detach().clone().float()
assert (copy == 0).all() and (model.weight == 0).all()
gradient = torch.autograd.grad(model(torch.ones(1, 4096)).sum(), model.weight)[0]
assert gradient.shape == model.weight.shape
""",
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_a_script_sees_what_it_would_see(script: str, tmp_path: Path) -> None:
    ran = run_inside(tmp_path, START + script)
    assert ran.report["outcome"] == "ended", ran.output


def test_the_world_and_the_backend_are_those_that_the_script_asks_for(tmp_path: Path) -> None:
    script = START + "print(dist.get_world_size(), dist.get_rank(), dist.get_backend())"
    assert "4096 5 gloo" in run_inside(tmp_path, script, rank=5, world_size=4096).output


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


def test_collectives_are_counted_by_process_group(tmp_path: Path) -> None:
    ran = run_inside(tmp_path, START + "[dist.all_reduce(torch.ones(1)) for _ in range(3)]")
    assert ran.report["process_groups"] == {"0": 8}
    assert ran.report["collectives"] == [["0", "allreduce", 3]]


def test_a_model_of_four_gigabytes_is_initialized_and_cast_without_them(tmp_path: Path) -> None:
    small = run_inside(tmp_path, START).report["peak_host_bytes"]
    ran = run_inside(
        tmp_path,
        START
        + """
from torch import nn
model = nn.Sequential(*[nn.Linear(8192, 8192) for _ in range(16)])
for p in model.parameters():
    nn.init.trunc_normal_(p, std=0.02)
model = model.to(torch.bfloat16)
copy = {name: value.clone() for name, value in model.state_dict().items()}
model.load_state_dict(copy)
""",
    )
    assert ran.report["outcome"] == "ended", ran.output
    assert ran.report["peak_host_bytes"] - small < 300 * MIB
    assert ran.report["peak_unwritten_host_bytes"] > 4 * 16 * 8192 * 8192


STAGES = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
if os.environ["RANK"] == "0":
    dist.send_object_list([{"shape": (2, 3)}], dst=1)
    dist.send(torch.ones(4), 1)  # values are not those of training, and not sent
    answer = [None]
    dist.recv_object_list(answer, src=1)
    print("rank 0 has", answer)
else:
    asked = [None]
    dist.recv_object_list(asked, src=0)
    dist.recv(torch.empty(4), 0)
    dist.send_object_list([("got", *asked)], dst=0)
"""


def test_ranks_tell_each_other_integers_and_end_where_they_do_not_know_them_yet(tmp_path: Path) -> None:
    first = run_inside(tmp_path, STAGES, world_size=2)
    assert (first.report["waits_for"], first.report["peers"], first.code) == (1, [1], 0)
    assert "Traceback" not in first.output
    other = run_inside(tmp_path, STAGES, rank=1, world_size=2, messages={"0": first.report["sent"]["1"]})
    assert other.report["waits_for"] is None
    again = run_inside(tmp_path, STAGES, world_size=2, messages={"1": other.report["sent"]["0"]})
    assert "rank 0 has [('got', {'shape': (2, 3)})]" in again.output
    assert again.report["waits_for"] is None


def test_a_group_that_is_split_has_this_ranks_part(tmp_path: Path) -> None:
    """As DeviceMesh does after ``init_process_group(device_id=...)``. Ranks count within the parent group."""
    script = """
    import torch.distributed as dist
    dist.init_process_group("gloo")
    half = dist.split_group(split_ranks=[[0, 1, 2, 3], [4, 5, 6, 7]])
    pair = dist.split_group(half, [[0, 1], [2, 3]], group_desc="pair")
    print("ranks", dist.get_process_group_ranks(half), dist.get_process_group_ranks(pair))
    """
    assert "ranks [4, 5, 6, 7] [6, 7]" in run_inside(tmp_path, script, rank=6).output
