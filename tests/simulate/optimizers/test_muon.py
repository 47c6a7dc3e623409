"""Muon: setups that are not predicted, and refusals. test_against_dry_run.py compares its memory."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_bench.simulate.operators.kernels import CUDA
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.impossible import impossible
from fsdp_bench.spec.setup import TrainSetup
from fsdp_bench.spec.subprocesses.dry_run import DryRunSpec
from fsdp_bench.sweep.dry_run import dry_runs
from tests.predicted import memory_of
from tests.simulate.test_step import shape

UNSHARDED: dict[str, Any] = {
    "strategy": "NO_SHARD",
    "shard_size": None,
    "optimizer": "muon",
    "optimizer_in_backward": False,
    "use_orig_params": True,
    "limit_all_gathers": True,
    "backward_prefetch": "BACKWARD_PRE",
    "forward_prefetch": False,
}


def test_muon_under_fully_shard_is_not_predicted_and_the_dry_run_that_is_recommended_works() -> None:
    setup = TrainSetup(api="fsdp2", world_size=4, optimizer="muon", sequence_length=8)
    with pytest.raises(SpecError, match="dry-run or rehearse it"):
        memory_of(shape(), setup, CUDA)
    ((_, answer),) = dry_runs([DryRunSpec(model=shape(num_hidden_layers=1), setup=setup, kernels="cuda")])
    assert answer.result is not None, answer.error
    assert answer.result.phases["optimizer"] > 0


def test_muon_of_flat_shards_is_refused_with_alternatives() -> None:
    reason = impossible(TrainSetup(world_size=2, optimizer="muon"), "cuda")
    assert reason is not None
    assert "use fsdp2, or NO_SHARD" in reason
