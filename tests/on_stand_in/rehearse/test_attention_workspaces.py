"""Allocations of the backward of memory-efficient attention, on the stand-in for several GPUs."""

from __future__ import annotations

import json

import pytest

from fsdp_bench.catalog.loader import gpu_by_product_name
from fsdp_bench.simulate.operators.attention_workspaces import efficient_forward_workspace
from fsdp_bench.simulate.operators.kernels import CUDA, kernels_on
from fsdp_bench.simulate.recorded.workspaces import workspace_of
from fsdp_bench.sweep.run.rehearsed import rehearsed_gpu
from tests.on_stand_in.interpreters import run_on_gpu

NAME = "aten::_scaled_dot_product_efficient_attention_backward"
BACKWARD = """
import json, sys
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

torch.cuda.memory._record_memory_history(max_entries=10_000, stacks="python")
for dtype, batch, heads, length, head, value in json.load(sys.stdin):
    given = {"dtype": getattr(torch, dtype), "device": "cuda", "requires_grad": True}
    q, k, v = (torch.empty(batch, length, heads, size, **given) for size in (head, head, value))
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
    gradient = torch.empty_like(out)
    before = len(torch.cuda.memory._snapshot()["device_traces"][0])
    torch.autograd.grad(out, (q, k, v), gradient)
    trace = torch.cuda.memory._snapshot()["device_traces"][0][before:]
    print([entry["size"] for entry in trace if entry["action"] == "alloc"])
"""
SHAPES = [
    *((dtype, 1, 2, length, head, head) for dtype in ("bfloat16", "float32") for length in (64, 200, 320)
      for head in (16, 64, 80, 96, 104, 128, 192, 256)),
    *(("bfloat16", *shape) for shape in ((2, 4, 256, 192, 128), (4, 16, 512, 192, 192), (8, 32, 512, 192, 192))),
    *(("bfloat16", *shape) for shape in ((8, 32, 1088, 192, 192), (1, 8, 4096, 192, 192), (16, 16, 1024, 128, 128))),
]  # fmt: skip


FORWARD = """
import json, sys
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

torch.cuda.memory._record_memory_history(max_entries=10_000, stacks="python")
for dtype, width in json.load(sys.stdin):
    q = torch.empty(2, 4, 64, width, dtype=getattr(torch, dtype), device="cuda", requires_grad=True)
    before = len(torch.cuda.memory._snapshot()["device_traces"][0])
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
    trace = torch.cuda.memory._snapshot()["device_traces"][0][before:]
    print(json.dumps([entry["size"] for entry in trace if entry["action"] == "alloc"][2:]))
"""


def test_outputs_of_wide_heads_are_added_up_in_fp32() -> None:
    """What is allocated after the output and the sums of its rows."""
    cases = [(dtype, width) for dtype in ("float16", "float32") for width in (64, 128, 136, 256)]
    printed = run_on_gpu("H200", FORWARD, json.dumps(cases)).splitlines()
    for (dtype, width), line in zip(cases, printed, strict=True):
        itemsize = 4 if dtype == "float32" else 2
        expected = efficient_forward_workspace(2 * 4 * 64 * width, (width, width), itemsize)
        assert json.loads(line) == expected, (dtype, width)


@pytest.mark.parametrize(
    "name", ["H200", *(pytest.param(name, marks=pytest.mark.slow) for name in ("A100-SXM-80GB", "L4")), "A10G", "T4"]
)
def test_what_the_backward_allocates_for_itself_is_predicted(name: str) -> None:
    """The sums of grad_out * out, in fp32 with their product, and what gradients are added up in."""
    gpu = rehearsed_gpu(name)
    kernels = kernels_on(CUDA, gpu_by_product_name(gpu.product_name))
    half = "float16" if kernels.compute_capability < 8 else "bfloat16"
    shapes = [(dtype if dtype == "float32" else half, *shape) for dtype, *shape in SHAPES]
    printed = run_on_gpu(name, BACKWARD, json.dumps(shapes))
    for (dtype, batch, heads, length, head, value), line in zip(shapes, printed.splitlines(), strict=True):
        itemsize = 4 if dtype == "float32" else 2
        results = tuple(batch * heads * length * dim * itemsize for dim in (head, head, value))
        dims = batch, heads, heads, length, length, head, 0
        space = workspace_of(NAME, dims, itemsize, kernels, results=results)
        predicted = [size if isinstance(size, int) else size.num_bytes for size in space.after]
        assert json.loads(line)[-len(predicted) :] == predicted, (dtype, dims)
        assert len(predicted) == (4 if itemsize == 4 else 2)
