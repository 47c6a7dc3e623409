"""The text about what a prediction rests on: NCCL's memory with its source or a reason, rates lost in the noise."""

from __future__ import annotations

from fsdp_bench.catalog.lookup import server
from fsdp_bench.rates.communicators import communicators_of
from fsdp_bench.report.text.common import communicators_fact
from fsdp_bench.report.text.speed import measured_rates
from fsdp_bench.spec.calibration_profile import Profile, RankProfile
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


LOST = RankProfile(num_ranks=2, threads_per_rank=1, launch_seconds=0.0, hook_seconds={"fsdp1": 1e-4, "fsdp2": 0.0})
FOUND = RankProfile(num_ranks=4, threads_per_rank=1, launch_seconds=1e-6, hook_seconds={"fsdp1": 1e-4})


def test_a_time_of_the_host_that_came_out_as_nothing_is_told() -> None:
    """Host times are small differences of large sums; a zero is not a measurement."""
    assert LOST.lost_in_noise == ("the host's time for an operator", "the host's time for a hook of fsdp2")
    assert FOUND.lost_in_noise == ()


def test_predictions_that_rest_on_it_say_so() -> None:
    about = {"machine": "two cores", "device": "cpu", "device_name": "", "measured_on": "2026-11-21", "versions": {}}
    words = measured_rates(Profile(**about, ranks=(LOST, FOUND)))
    assert "without the host's time for an operator (2 ranks), lost in the noise" in words
    assert "(4 ranks)" not in words
    assert "lost" not in measured_rates(Profile(**about, ranks=(FOUND,)))
