"""Adafactor: what it keeps and allocates, against PyTorch's own code, and what it cannot update."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from fsdp_bench.catalog.loader import gpu_by_product_name
from fsdp_bench.rehearse.environment import environment_of
from fsdp_bench.simulate.operators.kernels import CUDA, kernels_on
from fsdp_bench.simulate.operators.reduction_workspaces import reduce_all_workspace, sum_over_rows_workspace
from fsdp_bench.spec.setup import TrainSetup, impossible
from fsdp_bench.spec.subprocesses.dry_run import KernelSet
from fsdp_bench.sweep.run.rehearsed import rehearsed_gpu
from tests.on_stand_in.rehearsing import on_stand_in
from tests.simulate.optimizers.comparing import (
    DRY_RUNS,
    against_dry_runs,
    against_rehearsals,
    assert_equal,
    assert_near,
    cells_with,
)


@pytest.mark.parametrize("kernels", ["cpu", "cuda"])
def test_it_holds_what_a_dry_run_holds(kernels: KernelSet) -> None:
    assert_equal(against_dry_runs(cells_with(DRY_RUNS, 51, kernels, small=True, optimizer="adafactor"), kernels))


def test_fully_shard_refuses_it_and_says_what_to_use() -> None:
    reason = impossible(TrainSetup(api="fsdp2", world_size=2, optimizer="adafactor"), "cuda")
    assert reason is not None
    assert "use fsdp1, or NO_SHARD" in reason
    assert impossible(TrainSetup(api="fsdp2", strategy="ddp", world_size=2, optimizer="adafactor"), "cuda") is None


NORMS = """
import json, sys
import torch

torch.cuda.memory._record_memory_history(max_entries=10_000)
for rows, columns in json.load(sys.stdin):
    matrix = torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda")
    for norm in (lambda: matrix.norm(2), lambda: torch.norm(matrix, dim=-2, keepdim=True)):
        before = len(torch.cuda.memory._snapshot()["device_traces"][0])
        norm()
        trace = torch.cuda.memory._snapshot()["device_traces"][0][before:]
        print(json.dumps([entry["size"] for entry in trace if entry["action"] == "alloc"]))
"""


class TestOnTheStandIn:
    pytestmark = on_stand_in

    def test_it_holds_what_pytorchs_allocator_holds(self) -> None:
        assert_near(against_rehearsals(cells_with(12, 52, "cuda", optimizer="adafactor")))

    def test_norms_allocate_partial_results_of_the_predicted_sizes(self) -> None:
        gpu = rehearsed_gpu("H200")
        kernels = kernels_on(CUDA, gpu_by_product_name(gpu.product_name))
        shapes = [(1, 1), (3, 77), (1000, 64), (8192, 384), (32000, 66), (4096, 4096), (100, 10000), (128256, 512)]
        done = subprocess.run(
            [sys.executable, "-c", NORMS],
            input=json.dumps(shapes),
            env={**os.environ, **environment_of(gpu)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found = [json.loads(line)[1:] for line in done.stdout.splitlines()]
        wanted = [
            sizes
            for rows, columns in shapes
            for sizes in (
                reduce_all_workspace(rows * columns, kernels),
                sum_over_rows_workspace(rows, columns, kernels),
            )
        ]
        assert found == wanted
