"""Adafactor: what it keeps and allocates, against PyTorch's own code, and what it cannot update."""

from __future__ import annotations

from fsdp_bench.spec.setup import TrainSetup, impossible


def test_fully_shard_refuses_it_and_says_what_to_use() -> None:
    reason = impossible(TrainSetup(api="fsdp2", world_size=2, optimizer="adafactor"), "cuda")
    assert reason is not None
    assert "use fsdp1, or NO_SHARD" in reason
    assert impossible(TrainSetup(api="fsdp2", strategy="ddp", world_size=2, optimizer="adafactor"), "cuda") is None
