"""The text about NCCL's memory: bounds with their source, or a reason instead of a number."""

from __future__ import annotations

from fsdp_bench.catalog.lookup import server
from fsdp_bench.rates.communicators import communicators_of
from fsdp_bench.report.text.common import communicators_fact
from fsdp_bench.spec.setup import ShardingStrategy, TrainSetup


def printed(name: str, nodes: int = 1, strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD) -> str:
    where = server(name, nodes)
    setup = TrainSetup(strategy=strategy, world_size=8 * nodes, shard_size=8 if strategy.is_hybrid else None)
    return " ".join(" ".join(communicators_fact(communicators_of(setup, where))).split())


def test_a_known_size_is_told_once_and_bounds_as_two() -> None:
    source = "in 1 communicator (predicted from NCCL's source; not measured): to shard, 8 ranks, 24 channels,"
    assert printed("DGX-A100") == f"NCCL 484.0 MiB {source} 484.0 MiB"
    assert printed("p4d.24xlarge") == f"NCCL 484.0 to 580.0 MiB {source} 484.0 to 580.0 MiB"


def test_unknown_buffers_have_a_reason_beside_the_known_ones() -> None:
    hybrid = printed("a3-megagpu-8g", 2, ShardingStrategy.HYBRID_SHARD)
    assert hybrid.startswith("NCCL unknown: to shard, 8 ranks, 24 channels, 518.0 MiB; to add gradients up, 2 ranks,")
    assert "unknown: between nodes only InfiniBand, RoCE and EFA are covered" in hybrid
    assert printed("g5.48xlarge").startswith("NCCL unknown: only GPUs that NVSwitch joins")


def test_one_rank_has_no_line() -> None:
    assert communicators_fact(communicators_of(TrainSetup(world_size=1), None)) == []
    assert communicators_fact(None) == []
