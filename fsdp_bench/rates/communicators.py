"""The communicators of one FSDP rank, and the device memory that NCCL takes for them outside of torch's allocator.

Which there are (torch 2.13): FSDP and DDP use the default process group, and fully_shard's one-dimensional mesh reuses
it (DeviceMesh._init_one_process_group, device_mesh.py); all-gather and reduce-scatter share a group, unless a user asks
for two (_reduce_scatter_process_group in _fully_shard/_fsdp_param_group.py). A hybrid strategy has a group that shards
and one that replicates, split off the default group without sharing its resources (ncclCommSplit; NCCL's splitShare is
0); the default group remains for barriers, and has a communicator from the start where init_process_group got a
``device_id``, as in train/processes/worker.py, or from the first barrier on.

Which connections: gathers and scatters ride rings. Within a node NCCL's model of itself never prefers NVLink SHARP for
them; between nodes it has that only with CollNet (updateCollCostTable, src/enqueue.cc). So do broadcasts and, within a
node, sums of a few bytes: barriers and norms; between nodes those may go by trees. All-reduces of gradients may use
trees and NVLink SHARP, which depends on sizes: the bounds are without and with them.

What a rank has of network connections depends on where it is in the rings; the bounds hold for every rank. Unknown:
GPUs without NVSwitch or before the A100, networks without RDMA, groups that span nodes with only some of their GPUs.
A process group of one rank has no connections and counts as nothing; one that was made with a ``device_id`` has what a
communicator is given at its start.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from fsdp_bench.rates import nccl_buffers as nccl
from fsdp_bench.rates.collectives import Wiring, groups_of
from fsdp_bench.rates.nccl_buffers import Bounds
from fsdp_bench.spec.hardware import Cluster, LinkKind, Network
from fsdp_bench.spec.setup import ShardingStrategy, TrainSetup

_RDMA = (LinkKind.INFINIBAND, LinkKind.ROCE, LinkKind.EFA)


class Purpose(StrEnum):
    """What a communicator is for."""

    SHARD = "shard"
    """Gathers parameters, scatters gradients."""
    REPLICATE = "replicate"
    """Adds gradients up."""
    BARRIERS = "barriers"
    """All ranks, beside the groups of a hybrid strategy."""


@dataclass(frozen=True)
class Communicator:
    """One NCCL communicator, and the device memory that it takes on one rank."""

    purpose: Purpose
    num_ranks: int
    num_channels: Bounds | None = None
    num_bytes: Bounds | None = None
    unknown: str | None = None
    """Why the others are None."""


@dataclass(frozen=True)
class Communicators:
    """All communicators of one rank."""

    each: tuple[Communicator, ...]

    @property
    def num_bytes(self) -> Bounds | None:
        """Together; None where one of them is unknown."""
        total = Bounds(0, 0)
        for one in self.each:
            if one.num_bytes is None:
                return None
            total += one.num_bytes
        return total

    @property
    def unknown(self) -> str | None:
        """The first reason why the sum is not known."""
        return next((one.unknown for one in self.each if one.unknown), None)


def communicators_of(setup: TrainSetup, cluster: Cluster | None) -> Communicators:
    """Return the communicators of one rank; their bytes where the cluster's wiring is known."""
    if setup.world_size == 1:
        return Communicators(())
    purposes = {Purpose.SHARD: setup.world_size}
    if setup.effective_strategy is ShardingStrategy.NO_SHARD:
        purposes = {Purpose.REPLICATE: setup.world_size}
    elif setup.shard_group_size < setup.world_size:
        shard = setup.shard_group_size
        purposes = {Purpose.SHARD: shard, Purpose.REPLICATE: setup.world_size // shard}
        purposes[Purpose.BARRIERS] = setup.world_size
    return Communicators(tuple(_communicator(*one, setup, cluster) for one in purposes.items()))


def _communicator(purpose: Purpose, num_ranks: int, setup: TrainSetup, cluster: Cluster | None) -> Communicator:
    if cluster is None or cluster.world_size != setup.world_size:
        return Communicator(purpose, num_ranks, unknown="no server with these ranks is named")
    groups = groups_of(cluster, setup)
    group = groups.world
    if num_ranks < setup.world_size:
        group = groups.shard if purpose is Purpose.SHARD else groups.replicate
    unknown = _why_unknown(purpose, group, cluster)
    if group is None or unknown:
        return Communicator(purpose, num_ranks, unknown=unknown)
    channels = _channels(group, cluster)
    if channels is None:
        return Communicator(purpose, num_ranks, unknown="NCCL's search for rings was not followed on this wiring")
    return Communicator(purpose, num_ranks, channels, _bytes(purpose, group, channels, cluster))


def _why_unknown(purpose: Purpose, group: Wiring | None, cluster: Cluster) -> str | None:
    """Return why NCCL's source does not tell what a group takes here, or None."""
    link, network = cluster.server.intra_node, cluster.server.inter_node
    if group is None or link is None or link.kind is not LinkKind.NVSWITCH:
        return "only GPUs that NVSwitch joins are covered, from the A100 on, in groups that fill nodes evenly"
    if group.num_nodes == 1:
        return None
    if network is None or network.kind not in _RDMA or _interfaces(network, cluster) is None:
        return "between nodes only InfiniBand, RoCE and EFA are covered"
    if group.ranks_per_node not in (1, cluster.server.gpus_per_node):
        return "the group spans nodes with only some of their GPUs"
    if group.ranks_per_node == 1 and purpose is not Purpose.REPLICATE:
        return "with one GPU a node, gathers and scatters may go by NCCL's PAT, which is not covered"
    return None


def _interfaces(network: Network, cluster: Cluster) -> int | None:
    """Return the network devices that NCCL sees on a node: AWS's plugin joins several of one GPU into one."""
    count, gpus = network.num_nics, cluster.server.gpus_per_node
    if count is None or network.bandwidth_bytes_per_second is None or count <= gpus:
        return count if network.bandwidth_bytes_per_second is not None else None
    return gpus if network.kind is LinkKind.EFA and count % gpus == 0 else None


def _channels(group: Wiring, cluster: Cluster) -> Bounds | None:
    if group.num_nodes == 1:
        found = nccl.channels_within(group.link_bandwidth, group.capability)
        return None if found is None else Bounds(found, found)
    network = cluster.server.inter_node
    interfaces = _interfaces(network, cluster) if network else None
    if network is None or interfaces is None:
        return None
    each = (network.bandwidth_bytes_per_second or 0.0) / interfaces
    return nccl.channels_across(interfaces, each, group.ranks_per_node, group.link_bandwidth)


def _bytes(purpose: Purpose, group: Wiring, channels: Bounds, cluster: Cluster) -> Bounds:
    """Return what a communicator takes: what is made at its start, and the connections of what it carries."""
    start, rings, trees = _start(group, channels), _rings(group, channels, cluster), _trees(group, channels, cluster)
    across = group.num_nodes > 1
    if purpose is Purpose.REPLICATE:
        return start + rings + trees + _multicast(group, cluster)
    small = trees if across else Bounds(0, 0)
    return start + (Bounds(0, rings.high) if purpose is Purpose.BARRIERS else rings) + small


def _start(group: Wiring, channels: Bounds) -> Bounds:
    """Between nodes, NVLink SHARP is set up only if its own search finds interfaces for it."""
    multicast = nccl.multicast_channels(group.capability, group.ranks_per_node, group.num_nodes)
    at_least = multicast if group.num_nodes == 1 else 0
    return Bounds(
        nccl.at_start(group.size, group.ranks_per_node, channels.low, at_least),
        nccl.at_start(group.size, group.ranks_per_node, channels.high, multicast),
    )


def _connections(cluster: Cluster) -> tuple[nccl.Connections, nccl.Connections]:
    """Return the least and the most that connections take."""
    capability = cluster.gpu.compute_capability or 0.0
    simple = nccl.SIMPLE_OF_AWS if _is_efa(cluster) else nccl.SIMPLE
    return nccl.connections(capability), nccl.connections(capability, simple)


def _is_efa(cluster: Cluster) -> bool:
    """Whether AWS's plugin may have set NCCL's variables, also for groups within a node."""
    network = cluster.server.inter_node
    return network is not None and network.kind is LinkKind.EFA


def _rings(group: Wiring, channels: Bounds, cluster: Cluster) -> Bounds:
    """A neighbour before and one behind on every channel.

    Between whole nodes a GPU begins at most one of the rings that the search finds, and ends at most one, each on two
    channels; where it ends one through another GPU's interface, the buffer is on that GPU (PXN).
    """
    least, most = _connections(cluster)
    if group.ranks_per_node == 1:
        return Bounds(channels.low * least.net_pair, channels.high * most.net_pair)
    if group.num_nodes == 1:
        return Bounds(channels.low * least.pair, channels.high * most.pair)
    return Bounds(
        channels.low * least.pair - 2 * least.send,
        channels.high * most.pair + 2 * (most.net_pair - most.pair),
    )


def _trees(group: Wiring, channels: Bounds, cluster: Cluster) -> Bounds:
    """None at all, or those beside the rings': up and down a chain in a node, up and down twice between nodes.

    Two ranks have the same neighbour in both. Of whole nodes a GPU has at most the head of one chain, with three
    neighbours on other nodes, and the second place of two, with one (connectTrees in src/graph/connect.cc): each on
    two channels.
    """
    _, most = _connections(cluster)
    if group.size == 2:
        return Bounds(0, 0)
    if group.ranks_per_node == 1:
        return Bounds(0, channels.high * 3 * most.net_pair)
    across = 2 * (3 + 2) * most.net_pair if group.num_nodes > 1 else 0
    return Bounds(0, channels.high * 2 * most.pair + across)


def _multicast(group: Wiring, cluster: Cluster) -> Bounds:
    """None, or NVLink SHARP's buffers, between nodes with trees of three neighbours (ncclNvlsTreeConnect)."""
    channels = nccl.multicast_channels(group.capability, group.ranks_per_node, group.num_nodes)
    if not channels:
        return Bounds(0, 0)
    slice_bytes = nccl.MULTICAST_SLICE_OF_AWS if _is_efa(cluster) else nccl.MULTICAST_SLICE
    buffers = nccl.multicast_buffers(channels, group.ranks_per_node, slice_bytes)
    trees = channels * 3 * _connections(cluster)[1].net_pair if group.num_nodes > 1 else 0
    return Bounds(0, buffers + trees)
