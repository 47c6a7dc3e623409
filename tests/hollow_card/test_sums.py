"""What aten::sum over the rows of a matrix asks PyTorch's allocator for. Skipped but under card.py: ``make hollow``."""

from __future__ import annotations

import os
import random

import pytest

from fsdp_bench.catalog.loader import gpu_by_product_name
from fsdp_bench.simulate.operators.kernels import CUDA, kernels_on
from fsdp_bench.simulate.operators.reduction_workspaces import sum_over_rows_workspace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("libhollow_card" not in os.environ.get("LD_PRELOAD", ""), reason="no hollow card: make hollow"),
]


def test_partial_sums_are_of_the_predicted_sizes() -> None:
    import torch

    kernels = kernels_on(CUDA, gpu_by_product_name(os.environ["HOLLOW_CARD_NAME"]))
    source = random.Random(5)
    shapes = [(source.randint(1, 40_000), source.randint(1, 12_000)) for _ in range(150)]
    shapes += [(rows, columns) for rows in (128, 1024, 8192) for columns in (1024, 4096, 6400)]
    torch.cuda.memory._record_memory_history(max_entries=10_000)
    for rows, columns in shapes:
        matrix = torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda")
        before = len(torch.cuda.memory._snapshot()["device_traces"][0])
        matrix.sum(0)
        trace = torch.cuda.memory._snapshot()["device_traces"][0][before:]
        _result, *inside = [entry["size"] for entry in trace if entry["action"] == "alloc"]
        assert inside == sum_over_rows_workspace(rows, columns, kernels), (rows, columns)
