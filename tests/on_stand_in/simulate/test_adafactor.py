"""Workspaces of Adafactor's norms: predicted sizes against PyTorch's CUDA allocator on the stand-in."""

from __future__ import annotations

import json

from fsdp_bench.catalog.loader import gpu_by_product_name
from fsdp_bench.simulate.operators.kernel_workspaces import reduce_all_workspace, sum_over_rows_workspace
from fsdp_bench.simulate.operators.kernels import CUDA, kernels_on
from fsdp_bench.sweep.run.rehearsed import rehearsed_gpu
from tests.on_stand_in.interpreters import run_on_gpu

NORMS = """
import json, sys
import torch

torch.cuda.memory._record_memory_history(max_entries=10_000, stacks="python")
for rows, columns in json.load(sys.stdin):
    matrix = torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda")
    for norm in (lambda: matrix.norm(2), lambda: torch.norm(matrix, dim=-2, keepdim=True)):
        before = len(torch.cuda.memory._snapshot()["device_traces"][0])
        norm()
        trace = torch.cuda.memory._snapshot()["device_traces"][0][before:]
        print(json.dumps([entry["size"] for entry in trace if entry["action"] == "alloc"]))
"""


def test_norms_allocate_partial_results_of_the_predicted_sizes() -> None:
    gpu = rehearsed_gpu("H200")
    kernels = kernels_on(CUDA, gpu_by_product_name(gpu.product_name))
    shapes = [(1, 1), (3, 77), (1000, 64), (8192, 384), (32000, 66), (4096, 4096), (100, 10000), (128256, 512)]
    printed = run_on_gpu("H200", NORMS, json.dumps(shapes))
    found = [json.loads(line)[1:] for line in printed.splitlines()]
    wanted = [
        sizes
        for rows, columns in shapes
        for sizes in (
            reduce_all_workspace(rows * columns, kernels),
            sum_over_rows_workspace(rows, columns, kernels),
        )
    ]
    assert found == wanted
