"""NCCL's device memory against figures worked out by hand from the constants of NCCL 2.29's source.

One connection (src/init.cc, src/include/device.h, src/include/comm.h; MiB are 2**20):
    LL      8 lines x 512 threads x 8 steps x 16 bytes      =    524,288
    LL128   120 elements x 640 threads x 8 steps x 8 bytes  =  4,915,200
    Simple  1 << 22                                         =  4,194,304; 8,388,608 where AWS's plugin says so
    control one page                                        =      4,096
in allocations of whole 2 MiB: written to over NVLink (H100) the receiver has 9,637,888, so 10 MiB, the sender 2 MiB
(the sizes of NCCL's issue 1685 on H100); read (A100) 6 MiB each; over the network 9,109,504 and 9,633,792, 10 MiB each.
"""

from dataclasses import astuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fsdp_bench.catalog.loader import BUILT_IN
from fsdp_bench.catalog.lookup import server as cluster
from fsdp_bench.rates.collectives import _bandwidth, _latency, collective_seconds, groups_of
from fsdp_bench.rates.communicators import Communicators, Purpose, communicators_of
from fsdp_bench.rates.nccl_buffers import Bounds, at_start, channels_across, channels_within
from fsdp_bench.spec.setup import Api, ShardingStrategy, TrainSetup

MIB = 2**20
S = ShardingStrategy
SERVERS = [server.name for server in BUILT_IN.servers()]


def found_on(
    server: str, nodes: int = 1, strategy: S = S.FULL_SHARD, shard_size: int | None = None, each: int = 8
) -> Communicators:
    setup = TrainSetup(strategy=strategy, world_size=each * nodes, shard_size=shard_size)
    return communicators_of(setup, cluster(server, nodes, each))


def mib(size: Bounds | None) -> tuple[int, int]:
    assert size.low % MIB == size.high % MIB == 0
    return size.low // MIB, size.high // MIB


@pytest.mark.parametrize(
    ("link", "major", "expected"),
    [
        (12 * 20.0e9, 8, 24),  # 6 rings of 40 GB/s, halved to 12, doubled
        (18 * 20.6e9, 9, 24),  # 6 of 60, as much as 9 of 40 or 12 of 30
        (18 * 40.1e9, 10, 32),  # 8 of 90
        (4 * 20.0e9, 8, 8),  # 2 of 40
        (6 * 20.0e9, 7, None),
    ],
)
def test_channels_in_a_node_follow_from_its_links(link: float, major: int, expected: int | None) -> None:
    """By hand through ncclTopoCompute, ncclTopoDupChannels and ncclTopoPostset."""
    assert channels_within(link, major) == expected


@pytest.mark.parametrize(
    ("interfaces", "each", "ranks", "link", "expected"),
    [
        (4, 12.5e9, 8, 240e9, (8, 8)),  # p4d
        (8, 25e9, 8, 240e9, (16, 16)),  # DGX A100
        (8, 50e9, 8, 370.8e9, (16, 16)),  # DGX H100
        (8, 50e9, 1, 370.8e9, (2, 4)),
        (8, 25e9, 1, 240e9, (2, 2)),
        (16, 25e9, 8, 370.8e9, None),  # more interfaces than GPUs
        (8, 100e9, 8, 240e9, None),  # more than the NVLinks carry
    ],
)
def test_channels_between_nodes_are_two_for_each_interface(
    interfaces: int, each: float, ranks: int, link: float, expected: tuple[int, int] | None
) -> None:
    found = channels_across(interfaces, each, ranks, link)
    assert (found and astuple(found)) == expected


def test_peers_of_a_large_world_fill_more_than_one_granule() -> None:
    """608 bytes a rank (four ncclConnInfo of 152): 3,449 ranks fill 2 MiB. 4,096 take two granules a channel."""
    assert at_start(4096, 8, 16) - at_start(3448, 8, 16) == 16 * 2 * MIB


@pytest.mark.parametrize(
    ("server", "expected"),
    [
        ("DGX-A100", (196 + 24 * 12, 196 + 24 * 12)),
        ("DGX-H100", (230 + 24 * 12, 230 + 24 * 12)),
        ("DGX-B200", (246 + 32 * 12, 246 + 32 * 12)),  # 32 channels, 24 of NVLS: (96 + 2 + 24 + 1) x 2 MiB
        ("p4d.24xlarge", (196 + 24 * 12, 196 + 24 * 16)),
        ("p5.48xlarge", (230 + 24 * 12, 230 + 24 * 16)),
    ],
)
def test_one_node_that_shards_has_one_communicator_of_rings(server: str, expected: tuple[int, int]) -> None:
    """Before it is connected it has 98 allocations of 2 MiB, 115 with NVLS.

    24 channels become 32 for send and receive: 32 x 3, and two more; NVLS: one on each of 16, and the credits. NCCL
    2.29.7's own host code, run on the topology of an HGX H100 with NVLS and without, makes 115 and 98.
    """
    found = found_on(server)
    assert [one.purpose for one in found.each] == [Purpose.SHARD]
    assert mib(found.num_bytes) == expected


def test_between_nodes_there_are_fewer_channels_and_perhaps_trees() -> None:
    """DGX A100, 16 channels: the start 16 x 6 + 4; rings of 12 each, less two senders or more by two network pairs.

    Trees: two neighbours in the node on every channel, and five more on other nodes on two channels, at 20 each.
    """
    start, rings, trees = 100, 16 * 12, 16 * 2 * 12 + 2 * 5 * 20
    for nodes in (2, 8):
        found = found_on("DGX-A100", nodes).num_bytes
        assert mib(found) == (start + rings - 2 * 6, start + rings + 2 * (20 - 12) + trees)


def test_a_hybrid_strategy_has_a_group_to_shard_one_to_replicate_and_the_default_one() -> None:
    """Two nodes of DGX A100; pairs across nodes have two channels of one neighbour on the network."""
    found = found_on("DGX-A100", 2, S.HYBRID_SHARD, shard_size=8)
    shard, replicate, barriers = found.each
    assert [(one.purpose, one.num_ranks) for one in found.each] == [("shard", 8), ("replicate", 2), ("barriers", 16)]
    assert mib(shard.num_bytes) == (484, 484)
    assert mib(replicate.num_bytes) == (2 * 6 + 4 + 2 * 20, 2 * 6 + 4 + 2 * 20)
    whole = found_on("DGX-A100", 2).num_bytes
    assert mib(barriers.num_bytes) == (100, whole.high // MIB)  # perhaps connected to nobody


@pytest.mark.parametrize(
    ("server", "expected"),
    [
        ("DGX-A100", (484, 484)),
        ("DGX-H100", (518, 518 + 256)),
        ("p5.48xlarge", (518, 230 + 24 * 16 + 1024)),  # slices of 512 KiB, where AWS's plugin says so
    ],
)
def test_replicas_in_a_node_may_use_nvlink_sharp(server: str, expected: tuple[int, int]) -> None:
    """NCCL 2.29.7's own host code takes 518 MiB for rings on eight H100, and 774 after an all-reduce of 4 MiB."""
    (only,) = found_on(server, strategy=S.NO_SHARD).each
    assert only.purpose is Purpose.REPLICATE
    assert mib(only.num_bytes) == expected


@pytest.mark.parametrize("server", ["DGX-A100", "DGX-H100", "DGX-B200"])
@pytest.mark.parametrize("ranks", [3, 4, 6, 8])
def test_all_reduces_within_a_node_are_never_trees(server: str, ranks: int) -> None:
    """By NCCL's model (collectives.py), from 8 bytes to 32 GiB: a ring of some protocol takes less."""
    group = groups_of(cluster(server, gpus_per_node=ranks), TrainSetup(world_size=ranks)).shard
    for eighth in range(3 * 8, 35 * 8):
        size = 2 ** (eighth / 8)
        ring, tree = (
            min(
                _latency("all_reduce", way, protocol, group)
                + size / _bandwidth("all_reduce", way, protocol, size, group)
                for protocol in range(3)
            )
            for way in ("ring", "tree")
        )
        assert ring < tree


@pytest.mark.parametrize(
    ("server", "nodes", "each", "part"),
    [
        ("g5.48xlarge", 1, 8, "NVSwitch"),
        ("p3dn.24xlarge", 1, 8, "NVSwitch"),
        ("ND-MI300X-v5", 1, 8, "NVSwitch"),
        ("a3-megagpu-8g", 2, 8, "InfiniBand"),
        ("DGX-H100", 2, 4, "some of their GPUs"),
        ("DGX-H100", 2, 1, "PAT"),
    ],
)
def test_what_the_source_does_not_tell_is_unknown_with_a_reason(server: str, nodes: int, each: int, part: str) -> None:
    found = found_on(server, nodes, each=each)
    assert found.num_bytes is None
    assert part in (found.unknown or "")


def test_without_a_server_the_communicators_are_known_and_their_size_is_not() -> None:
    found = communicators_of(TrainSetup(world_size=8), None)
    assert [one.num_ranks for one in found.each] == [8]
    assert "--server is missing" in (found.unknown or "")


@pytest.mark.parametrize("server", ["DGX-H100", "DGX-B200"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_gathers_in_a_node_are_never_multicast(server: str, ranks: int) -> None:
    """By NCCL's model (src/graph/tuning.cc): 25 us, and n heads at 0.85 or 0.74 of a speed, (n - 1) / n twice.

    A head's speed is at most the link's over n + 1, as every GPU receives from all and twice as the head.
    """
    where = cluster(server, gpus_per_node=ranks)
    group = groups_of(where, TrainSetup(world_size=ranks)).shard
    efficiency = 0.85 if group.capability == 9 else 0.74
    bandwidth = ranks * group.link_bandwidth / (ranks + 1) * efficiency * ((ranks - 1) / ranks) ** 2
    for power in range(6, 37):
        multicast = 25e-6 + 2**power / bandwidth
        assert collective_seconds("all_gather", 2**power, group) < multicast


def setups(world: int) -> st.SearchStrategy[TrainSetup]:
    halves = [size for size in range(2, world) if world % size == 0]
    plain = st.builds(
        TrainSetup,
        strategy=st.sampled_from([S.FULL_SHARD, S.SHARD_GRAD_OP, S.NO_SHARD]),
        api=st.sampled_from(Api),
        world_size=st.just(world),
    )
    if not halves:
        return plain
    hybrid = st.builds(
        TrainSetup, strategy=st.just(S.HYBRID_SHARD), world_size=st.just(world), shard_size=st.sampled_from(halves)
    )
    return plain | hybrid


@given(st.data(), st.sampled_from(SERVERS), st.integers(1, 16))
def test_bounds_are_in_order_and_unknown_comes_with_a_reason(data: st.DataObject, server: str, nodes: int) -> None:
    each = data.draw(st.integers(1, BUILT_IN.server(server).gpus_per_node))
    setup = data.draw(setups(each * nodes))
    found = communicators_of(setup, cluster(server, nodes, each))
    for one in found.each:
        assert (one.num_bytes is None) == (one.num_channels is None) == (one.unknown is not None)
        assert one.num_bytes is None or 0 < one.num_bytes.low <= one.num_bytes.high
    assert (found.num_bytes is None) == (found.unknown is not None)
    if setup.world_size == 1:
        assert found == Communicators(())
        assert found.num_bytes == Bounds(0, 0)


def test_each_unit_that_is_resharded_to_fewer_ranks_has_communicators_of_its_own() -> None:
    """https://github.com/pytorch/pytorch/issues/153302: one mesh, and so one pair of groups, for every fully_shard."""
    setup = TrainSetup(api=Api.FSDP2, world_size=16, reshard_after_forward=8)
    where = cluster("DGX-A100", 2)
    found, without = (
        communicators_of(setup, where, 3),
        communicators_of(replace(setup, reshard_after_forward=None), where),
    )
    gathers = [one for one in found.each if one.purpose is Purpose.POST_FORWARD]
    across = [one for one in found.each if one.purpose is Purpose.ACROSS_POST_FORWARD]
    assert [one.num_ranks for one in gathers] == [8] * 3
    assert [one.num_ranks for one in across] == [2] * 3
    assert len(found.each) == 6 + len(without.each)
    (alone,) = found_on("DGX-A100").each  # the eight GPUs of a node, whatever gathers
    assert {one.num_bytes for one in gathers} == {alone.num_bytes}
