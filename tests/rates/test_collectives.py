"""The cost of collectives against figures worked out by hand from NCCL's model, and what must hold of any cost."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace as struct_replace

from fsdp_bench.catalog.loader import BUILT_IN
from fsdp_bench.catalog.lookup import server
from fsdp_bench.rates.collectives import KINDS, Topology, collective_seconds, groups_of, topology_of_pair
from fsdp_bench.spec.hardware import Hardware
from fsdp_bench.spec.setup import ShardingStrategy, TrainSetup

US = 1e-6
S = ShardingStrategy
A100_BUS = 12 * 20e9  # twelve links of 25 GB/s, which NCCL assumes to carry 20 GB/s each
A100_NETWORK = 8 * 24e9  # eight NICs of 200 Gb/s


def cluster(name: str = "DGX-A100", nodes: int = 1, each: int = 8) -> Hardware:
    return server(name, nodes, each)


def shard_group(where: Hardware) -> Topology:
    return groups_of(where, TrainSetup(world_size=where.world_size)).shard


@pytest.mark.parametrize(
    ("kind", "size", "where", "expected"),
    [
        # a ring of large slices
        ("all_gather", 1e9, {}, (8.4 + 7 * 3.4) * US + 1e9 * 7 / 8 / A100_BUS),
        ("reduce_scatter", 1e9, {}, (8.4 + 7 * 3.4) * US + 1e9 * 7 / 8 / A100_BUS),
        # a small one is latency
        ("all_gather", 1000, {}, (6.6 + 7 * 0.6) * US + 1000 * 7 / 8 / 87.7e9),
        # 16 ranks on two nodes: 15 steps, one of them between the nodes, whose network is the bus
        ("all_gather", 1e9, {"nodes": 2}, (8.4 + 14 * 3.4 + 14.0) * US + 1e9 * 15 / 16 / A100_NETWORK),
        # two passes
        ("all_reduce", 1e9, {}, (8.4 + 14 * 3.4) * US + 1e9 * 2 * 7 / 8 / A100_BUS),
        # LL on 16 nodes of 8: up and down the tree, 7 links and 4 crossings each way; 64 KiB is the tenth power
        (
            *("all_reduce", 65536, {"nodes": 16}),
            (6.8 + 2 * (7 * 0.6 + 4 * 5.0)) * US + 65536 / (min(A100_NETWORK * 0.92 / 3.8, 19e9) / 2 * 0.6),
        ),
        # every rank sends 1 / 8 of it to each other one; nccl-tests, doc/PERFORMANCE.md: (n - 1) / n of the bus
        ("all_to_all", 1e9, {}, (8.4 + 3.4) * US + 1e9 * 7 / 8 / A100_BUS),
        # on two nodes half of it leaves the node, over an eighth of its network
        ("all_to_all", 1e9, {"nodes": 2}, (8.4 + 14.0) * US + 1e9 * 8 / 16 / (A100_NETWORK / 8)),
        # PCIe has no LL128 and its own steps
        ("all_gather", 1e9, {"name": "g5.48xlarge"}, (8.4 + 7 * 5.7) * US + 1e9 * 7 / 8 / 16e9),
    ],
)
def test_seconds_of_collectives_by_hand(kind: str, size: float, where: dict[str, Any], expected: float) -> None:
    assert collective_seconds(kind, size, shard_group(cluster(**where))) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("other", "num_bytes", "expected"),
    [
        # a message of a few bytes by LL, a large one by Simple; nccl-tests: the bus bandwidth of a message is its own
        (1, 1000, (6.6 + 0.6) * US + 1000 / 87.7e9),
        (3, 1e9, (8.4 + 3.4) * US + 1e9 / A100_BUS),
        # to another node over an eighth of the network, wherever the rank is there
        (8, 1e9, (8.4 + 14.0) * US + 1e9 / (A100_NETWORK / 8)),
        (13, 1e9, (8.4 + 14.0) * US + 1e9 / (A100_NETWORK / 8)),
    ],
)
def test_seconds_of_messages_by_hand(other: int, num_bytes: float, expected: float) -> None:
    links = topology_of_pair(cluster(nodes=2), 0, other)
    assert collective_seconds("send_recv", num_bytes, links) == pytest.approx(expected)


def hybrid(shard_size: int, nodes: int = 2) -> TrainSetup:
    return TrainSetup(strategy=S.HYBRID_SHARD, world_size=8 * nodes, shard_size=shard_size)


def test_a_hybrids_replicas_share_the_network_of_their_nodes() -> None:
    """Eight groups of two ranks on two nodes; each has an eighth of the network."""
    groups = groups_of(cluster(nodes=2), hybrid(8))
    assert groups.shard == shard_group(cluster())
    pair = groups.replicate
    assert (pair.size, pair.num_nodes, pair.bus_bandwidth) == (2, 2, A100_NETWORK / 8)
    expected = 1.4 * (8.4 + 2 * 14.0) * US + 1e8 / (A100_NETWORK / 8)
    assert collective_seconds("all_reduce", 1e8, pair) == pytest.approx(expected)


def test_a_smaller_shard_group_leaves_replicas_within_a_node() -> None:
    groups = groups_of(cluster(nodes=2), hybrid(4))
    assert (groups.shard.size, groups.shard.num_nodes) == (4, 1)
    assert (groups.replicate.ranks_per_node, groups.replicate.num_nodes) == (2, 2)
    assert groups.replicate.network_bandwidth == pytest.approx(A100_NETWORK / 4)


def test_a_shard_group_of_two_nodes_has_its_replicas_one_on_a_node() -> None:
    groups = groups_of(cluster(nodes=4), hybrid(16, nodes=4))
    assert (groups.shard.ranks_per_node, groups.shard.num_nodes) == (8, 2)
    assert (groups.replicate.ranks_per_node, groups.replicate.num_nodes) == (1, 2)


@pytest.mark.parametrize(("server", "share"), [("DGX-A100", 0.5), ("g5.48xlarge", 1.0), ("p5.48xlarge", 0.5)])
def test_half_of_a_nodes_gpus_reach_the_interfaces_beside_them(server: str, share: float) -> None:
    """Servers with 8, 1 and 32 NICs for eight GPUs."""

    def of_a_node(each: int) -> float:
        setup = TrainSetup(strategy=S.HYBRID_SHARD, world_size=2 * each, shard_size=each)
        pair = groups_of(cluster(server, nodes=2, each=each), setup).replicate
        return each * pair.network_bandwidth

    assert of_a_node(4) == pytest.approx(share * of_a_node(8))


def test_over_pcie_groups_share_what_joins_the_sockets() -> None:
    """g5: lanes of PCIe 4.0, 24 of 32 GB/s; 16 GB/s between two CPU sockets with four GPUs each."""
    whole, half = shard_group(cluster("g5.48xlarge")), shard_group(cluster("g5.48xlarge", each=4))
    assert (whole.link, whole.link_bandwidth, half.link_bandwidth) == ("pcie", 16e9, 24e9)
    four = groups_of(cluster("g5.48xlarge"), TrainSetup(strategy=S.HYBRID_SHARD, world_size=8, shard_size=4))
    assert four.shard.link_bandwidth == 24e9
    assert four.replicate.link_bandwidth == 16e9 / 4  # ranks 0 and 4, 1 and 5, 2 and 6, 3 and 7 at once
    two = groups_of(cluster("g5.48xlarge"), TrainSetup(strategy=S.HYBRID_SHARD, world_size=8, shard_size=2))
    assert two.replicate.link_bandwidth == 16e9 / 2


@pytest.mark.parametrize("unknown", ["socket_bandwidth_bytes_per_second", "gpus_per_socket"])
def test_what_joins_processors_is_no_slower_than_pcie_where_nobody_documents_it(unknown: str) -> None:
    g5 = BUILT_IN.server("g5.48xlarge")
    bare = struct_replace(g5, intra_node=struct_replace(g5.intra_node, **{unknown: None}))
    where = Hardware(server=bare, gpu=BUILT_IN.gpu(bare.gpu), num_nodes=1, gpus_per_node=8)
    assert shard_group(where).link_bandwidth == 24e9


def test_what_nobody_documents_is_unknown() -> None:
    assert groups_of(cluster("ND-MI300X-v5"), TrainSetup(world_size=8)).shard is None
    g6e = BUILT_IN.server("g6e.48xlarge")
    without = Hardware(server=struct_replace(g6e, intra_node=None), gpu=BUILT_IN.gpu(g6e.gpu), gpus_per_node=8)
    assert groups_of(without, TrainSetup(world_size=8)).shard is None
    assert groups_of(cluster("p3dn.24xlarge"), TrainSetup(world_size=8)).shard is not None
    assert groups_of(cluster("p3dn.24xlarge", each=4), TrainSetup(world_size=4)).shard is None  # a part of the mesh
    alone = struct_replace(BUILT_IN.server("DGX-A100"), inter_node=None)
    two = Hardware(server=alone, gpu=BUILT_IN.gpu(alone.gpu), num_nodes=2, gpus_per_node=8)
    assert groups_of(two, TrainSetup(world_size=16)).shard is None
    groups = groups_of(two, hybrid(8))
    assert (groups.shard is None, groups.replicate is None) == (False, True)


@pytest.mark.parametrize("shard_size", [3, 12])
def test_groups_that_lie_across_nodes_unevenly_are_unknown(shard_size: int) -> None:
    """Groups of three ranks may span two nodes; a group of twelve has eight ranks on one node and four on the other."""
    groups = groups_of(cluster(nodes=3), hybrid(shard_size, nodes=3))
    assert (groups.shard, groups.replicate) == (None, None)
    assert groups.world.size == 24


def test_one_rank_has_no_group() -> None:
    groups = groups_of(cluster(each=1), TrainSetup(world_size=1))
    assert (groups.shard, groups.replicate, groups.world) == (None, None, None)


WIRINGS = st.builds(
    Topology,
    ranks_per_node=st.integers(1, 8),
    num_nodes=st.integers(1, 64),
    link=st.sampled_from(["nvlink", "pcie"]),
    link_bandwidth=st.floats(1e9, 1e12),
    network_bandwidth=st.floats(1e9, 1e12),
    capability=st.sampled_from([7, 8, 9, 10]),
).filter(lambda topology: topology.size > 1)
BYTES = st.floats(1, 1e11)


@given(st.sampled_from(KINDS), BYTES, WIRINGS, st.floats(1, 8), st.floats(1, 8))
def test_more_bandwidth_never_slows(kind: str, size: float, topology: Topology, link: float, network: float) -> None:
    faster = replace(
        topology, link_bandwidth=topology.link_bandwidth * link, network_bandwidth=topology.network_bandwidth * network
    )
    assert collective_seconds(kind, size, faster) <= collective_seconds(kind, size, topology)


@given(st.sampled_from(KINDS), BYTES, st.floats(1, 8), WIRINGS)
def test_a_larger_message_is_never_faster(kind: str, size: float, times: float, topology: Topology) -> None:
    assert collective_seconds(kind, size * times, topology) >= collective_seconds(kind, size, topology) * (1 - 1e-9)


@given(BYTES, WIRINGS)
def test_no_collective_beats_its_bus(size: float, topology: Topology) -> None:
    """The lower bound is the bytes that every rank sends or receives, at the bandwidth of the slowest link."""
    least = size * (topology.size - 1) / topology.size / topology.bus_bandwidth
    for kind, passes in (("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)):
        assert collective_seconds(kind, size, topology) > passes * least * (1 - 1e-9)


@given(st.sampled_from(KINDS), WIRINGS)
def test_with_endless_bandwidth_only_latency_is_left(kind: str, topology: Topology) -> None:
    endless = replace(topology, link_bandwidth=math.inf, network_bandwidth=math.inf)
    assert 0 < collective_seconds(kind, 1, endless) < 1e-2
