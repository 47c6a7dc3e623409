"""Adafactor: what it keeps and allocates, against PyTorch's own code, and what it cannot update."""

from __future__ import annotations

import pytest

from fsdp_bench.spec.setup import TrainSetup, impossible
from fsdp_bench.spec.subprocesses.dry_run import KernelSet
from tests.simulate.optimizers.comparing import (
    DRY_RUNS,
    against_dry_runs,
    assert_equal,
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
