"""The topologies of a script's process groups, against those that predict has for the same ranks."""

from __future__ import annotations

import pytest

from fsdp_bench.catalog.loader import BUILT_IN
from fsdp_bench.catalog.lookup import server
from fsdp_bench.plan.rehearsed_time.events import process_groups
from fsdp_bench.rates.collectives import Groups, groups_of, topology_of_ranks
from fsdp_bench.spec.hardware import Hardware
from fsdp_bench.spec.setup import ShardingStrategy, TrainSetup
from tests.plan.rehearsed_time.steps import StepWriter


def cluster(nodes: int) -> Hardware:
    return server("p5.48xlarge", nodes)


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_a_group_of_all_ranks_is_predicts(nodes: int) -> None:
    found = topology_of_ranks(cluster(nodes), range(8 * nodes))
    assert found is not None
    assert found == groups_of(cluster(nodes), TrainSetup(world_size=8 * nodes)).shard


@pytest.mark.parametrize(("nodes", "shard"), [(2, 8), (2, 4), (4, 16), (2, 2), (4, 8)])
def test_groups_of_hybrid_sharding_are_predicts(nodes: int, shard: int) -> None:
    world = 8 * nodes
    setup = TrainSetup(world_size=world, strategy=ShardingStrategy.HYBRID_SHARD, shard_size=shard)
    expected = groups_of(cluster(nodes), setup)
    assert topology_of_ranks(cluster(nodes), range(shard)) == expected.shard
    assert topology_of_ranks(cluster(nodes), range(0, world, shard)) == expected.replicate


def test_the_order_of_ranks_and_the_node_do_not_matter() -> None:
    assert topology_of_ranks(cluster(2), [3, 1, 2, 0]) == topology_of_ranks(cluster(2), [12, 13, 14, 15])


@pytest.mark.parametrize("ranks", [[0], [], [0, 1, 8], [0, 1, 3], [0, 9]])
def test_ranks_that_are_alone_or_spread_unevenly_have_no_topology(ranks: list[int]) -> None:
    assert topology_of_ranks(cluster(2), ranks) is None


def test_each_group_has_a_name_of_its_own_and_its_topology(step: StepWriter) -> None:
    step.collective("allreduce", 8, (0, 8), group="replicas")
    step.collective("reduce_scatter_base", 8, tuple(range(8)), group="mesh")
    found = process_groups(step.read(), cluster(2))
    assert found.names == {"mesh": "shard", "replicas": "replicate"}
    assert found.groups.shard == topology_of_ranks(cluster(2), range(8))
    assert found.groups.replicate == topology_of_ranks(cluster(2), [0, 8])
    assert found.groups.world is None


def test_groups_of_the_same_ranks_share_a_name(step: StepWriter) -> None:
    """reshard_after_forward=4 makes process groups for each unit: torch/distributed/fsdp/_fully_shard."""
    step.collective("allgather_base", 8, tuple(range(8)), group="0")
    for number in range(6):
        step.collective("allgather_base", 8, (0, 1, 2, 3), group=f"unit {number}")
    found = process_groups(step.read(), cluster(1))
    assert set(found.names.values()) == {"shard", "replicate"}
    assert len(found.names) == 7


def test_without_a_server_there_are_names_but_no_links(step: StepWriter) -> None:
    step.collective("allgather_base", 8, tuple(range(8)))
    found = process_groups(step.read(), Hardware.of_gpu(BUILT_IN.gpu("H100-SXM")))
    assert (found.names, found.groups) == ({"0": "shard"}, Groups())
