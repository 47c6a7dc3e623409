"""Adafactor: refusals. test_against_dry_run.py compares its memory."""

from __future__ import annotations

from fsdp_bench.spec.impossible import impossible
from fsdp_bench.spec.setup import TrainSetup


def test_adafactor_under_fully_shard_is_refused_with_alternatives() -> None:
    reason = impossible(TrainSetup(api="fsdp2", world_size=2, optimizer="adafactor"), "cuda")
    assert reason is not None
    assert "use fsdp1, or NO_SHARD" in reason
    assert impossible(TrainSetup(api="fsdp2", strategy="ddp", world_size=2, optimizer="adafactor"), "cuda") is None
