"""Values that scripts read from the GPU: small integers are computed, results of floating-point numbers are unknown."""

from pathlib import Path

import pytest

from tests.on_stand_in.rehearsing import rehearse, rehearse_script

SCRIPTS = {
    "small integers are those of training": """
positions = torch.arange(10, device="cuda")[None]
steps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)
assert ((steps != 1).cumsum(-1)[:, -1] == 0).all().item()
mask = torch.ones(2, 5, device="cuda", dtype=torch.bool)
mask[0, 3:] = False
assert mask.sum(1).tolist() == [3, 5] and mask.nonzero().shape == (8, 2) and not mask.all()
x = torch.tensor([3, 1, 2]).cuda()
assert x.sort()[0].tolist() == [1, 2, 3] and (x * 2 + 1).tolist() == [7, 3, 5] and x.max().item() == 3
assert x.repeat_interleave(x).tolist() == [3, 3, 3, 1, 2, 2] and torch.where(x > 1, x, 0).tolist() == [3, 0, 2]
assert torch.full((3,), 7, device="cuda").tolist() == [7] * 3 and torch.equal(x.int(), x.clone().int())
assert torch.div(x, 2, rounding_mode="floor").tolist() == [1, 0, 1] and (x << 2).tolist() == [12, 4, 8]
whole = torch.empty(4, dtype=torch.int64, device="cuda")
whole[:3], whole[3:] = x, 7
assert whole.tolist() == [3, 1, 2, 7]
dist.all_reduce(whole)
dist.all_reduce(x, op=dist.ReduceOp.MAX)
assert whole.tolist() == [24, 8, 16, 56] and x.tolist() == [3, 1, 2]
""",
    "a small gather allocates nothing and holds the values of every rank": """
given = torch.tensor([3, 1, 2]).cuda()
whole, floats = torch.empty(24, dtype=torch.int64, device="cuda"), torch.empty(1000, device="cuda")
parts = [torch.empty_like(floats) for _ in range(8)]
sharded = torch.empty(8000, device="cuda")
before = torch.cuda.memory_allocated()
torch.cuda.reset_peak_memory_stats()
dist.all_gather_into_tensor(whole, given)
dist.all_gather_into_tensor(sharded, floats)
dist.all_gather(parts, floats)
assert torch.cuda.max_memory_allocated() == before, torch.cuda.max_memory_allocated() - before
assert whole.tolist() == [3, 1, 2] * 8
""",
    # as images' tokens take the places of others, in the forward and in autograd's thread
    "a known mask that is expanded to a large one has a known number of ones": """
tokens, hidden = torch.tensor([[9, 9, 1, 2], [9, 1, 1, 1]]).cuda(), 1 << 20
embedded, image = (torch.zeros(*shape, hidden, device="cuda", requires_grad=True) for shape in ((2, 4), (3,)))
mask = (tokens == 9)[..., None].expand_as(embedded)
assert embedded[mask].shape == (3 * hidden,)
before = torch.cuda.memory_allocated()
torch.cuda.reset_peak_memory_stats()
where = mask.nonzero()
assert where.shape == (3 * hidden, 3) and torch.cuda.memory_allocated() - before == 3 * 3 * hidden * 8
assert torch.cuda.max_memory_allocated() - before == 3 * 3 * hidden * 8 + 2 * 4 * hidden  # and a contiguous mask
embedded.masked_scatter(mask, image).sum().backward()
assert image.grad.shape == image.shape
""",
    # operators are run by this package, too, where a number takes the place of a tensor
    "float operators and numbers keep their dtypes": """
for dtype in (torch.bfloat16, torch.float16, torch.float32):
    whole, scalar = torch.ones(3, device="cuda", dtype=dtype), torch.ones((), device="cuda", dtype=dtype)
    for x in (whole, scalar):
        assert {(x + 1).dtype, (x * 2.5).dtype, (x - 1.5).dtype, (2 - x).dtype, (x * True).dtype} == {dtype}
counts = torch.arange(3, device="cuda")
assert (counts * 2).dtype == torch.int64 and (counts * 2.5).dtype == torch.float32
assert (counts.sum() * 2).dtype == torch.int64 and (counts > 1.5).tolist() == [False, False, True]
""",
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_integers_and_dtypes_are_those_of_training(script: str, tmp_path: Path) -> None:
    start = "import torch, torch.distributed as dist\ndist.init_process_group('nccl')\n"
    found = rehearse_script(tmp_path, start + script)
    assert found.document["reads"] == []
    assert found.document["num_known_reads"] > 8 or "positions" not in script


def test_unknown_values_that_the_script_reads_are_named_with_their_line(tmp_path: Path) -> None:
    found = rehearse_script(
        tmp_path,
        """
        import torch
        x = torch.randn(100, device="cuda")
        x.sum().item()
        rows = x[x > 0]
        torch.empty(7, dtype=torch.int64, device="cuda").gcd_(torch.arange(7, device="cuda")).tolist()
        best = x.topk(3)[1].tolist()  # outside of a module: logged, most often
        print(x.sum(), x)
        """,
    )
    named = {(one["operator"], one["user_line"]["line"], one["decides_sizes"]) for one in found.document["reads"]}
    read = {("item", 4, False), ("nonzero", 5, True), ("copy", 6, False), ("copy", 7, False)}
    assert named == {*read, ("print", 8, False)}


def test_unknown_booleans_are_false_and_all_of_them_true_whatever_was_in_their_memory(tmp_path: Path) -> None:
    """DeepSpeed would see overflows of gradients. The text of a large tensor does not depend on unknown values."""
    script = """
    import torch
    before = torch.ones(1 << 18, dtype=torch.bool, device="cuda")
    address = before.data_ptr()
    x = torch.empty(1 << 18, device="cuda")
    del before
    is_negative = x < 0
    assert is_negative.data_ptr() == address and not is_negative[0].item()
    assert torch.equal(x, torch.ones_like(x))  # as Liger asks whether a loss's gradient is one
    repr(x)
    """
    found = rehearse_script(tmp_path, script)
    assert {one["operator"] for one in found.document["reads"]} == {"item", "print"}
    assert sum(one["count"] for one in found.document["reads"]) < 100


def test_what_another_rank_broadcasts_is_unknown(tmp_path: Path) -> None:
    script = """
        import torch, torch.distributed as dist
        dist.init_process_group("nccl")
        torch.cuda.set_device(dist.get_rank())
        count = torch.zeros(1, dtype=torch.int64, device="cuda")
        dist.broadcast(count, src=0)
        count.item()
        """
    root, other = rehearse_script(tmp_path, script), rehearse_script(tmp_path, script, "--rank", "3")
    assert (root.document["reads"], root.document["num_known_reads"]) == ([], 1)
    assert [one["user_line"]["line"] for one in other.document["reads"]] == [7]


MIXTURE_OF_EXPERTS = """
import sys, torch

class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.router = torch.nn.Linear(256, 4)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(256, 1024) for _ in range(4))

    def forward(self, x):
        chosen = self.router(x).topk(2)[1].flatten()
        counts = torch.bincount(chosen, minlength=4) if sys.argv[1] == "bincount" else chosen.float().histc(4, 0, 3)
        start, sums = 0, []
        for expert, count in zip(self.experts, counts.int().tolist()):
            sums.append(expert(x.repeat(2, 1)[start : start + count]).sum())
            start += count
        assert start in (0, 128 * 2), start
        return sum(sums)

model = Experts().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    loss = model(torch.randn(128, 256, device="cuda"))
    loss.backward()
    optimizer.step()
    right = (torch.randn(8, 4, device="cuda").argmax(-1) == 1).sum().item()
"""


@pytest.mark.parametrize("way", ["bincount", "histc"])
def test_the_split_sizes_of_a_mixture_of_experts_are_unknown_or_balanced(way: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(MIXTURE_OF_EXPERTS)
    given = ("--gpu", "H100-SXM", "--steps", "2")
    unknown = rehearse(*given, "--", "script.py", way, folder=tmp_path)
    assert unknown.document["fits"] is None
    assert 14 in {one["user_line"]["line"] for one in unknown.document["reads"] if one["decides_sizes"]}
    if way == "bincount":
        balanced = rehearse(*given, "--balanced-routing", "--", "script.py", way, folder=tmp_path)
        assert balanced.document["fits"] is True, balanced.output
        assert balanced.peak_bytes > unknown.peak_bytes
