"""Allocations of aten::sum over the rows of a matrix, on the stand-in."""

from __future__ import annotations

import json
import random

from fsdp_bench.catalog.loader import gpu_by_product_name
from fsdp_bench.simulate.operators.kernels import CUDA, kernels_on
from fsdp_bench.simulate.operators.reduction_workspaces import sum_over_rows_workspace
from fsdp_bench.sweep.run.rehearsed import rehearsed_gpu
from tests.on_stand_in.interpreters import run_on_gpu

SUMS = """
import json, sys
import torch

torch.cuda.memory._record_memory_history(max_entries=10_000, stacks="python")
for rows, columns in json.load(sys.stdin):
    matrix = torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda")
    before = len(torch.cuda.memory._snapshot()["device_traces"][0])
    matrix.sum(0)
    trace = torch.cuda.memory._snapshot()["device_traces"][0][before:]
    print(json.dumps([entry["size"] for entry in trace if entry["action"] == "alloc"]))
"""


def test_partial_sums_are_of_the_predicted_sizes() -> None:
    gpu = rehearsed_gpu("H200")
    kernels = kernels_on(CUDA, gpu_by_product_name(gpu.product_name))
    source = random.Random(5)
    shapes = [(source.randint(1, 40_000), source.randint(1, 12_000)) for _ in range(150)]
    shapes += [(rows, columns) for rows in (128, 1024, 8192) for columns in (1024, 4096, 6400)]
    printed = run_on_gpu("H200", SUMS, json.dumps(shapes))
    for (rows, columns), line in zip(shapes, printed.splitlines(), strict=True):
        _result, *inside = json.loads(line)
        assert inside == sum_over_rows_workspace(rows, columns, kernels), (rows, columns)
