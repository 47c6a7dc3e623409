"""The communicators of one FSDP rank, and the device memory that NCCL allocates for them outside torch's allocator.

Communicators (torch 2.13). FSDP and DDP use the default process group, and fully_shard's one-dimensional mesh reuses it
(DeviceMesh._init_one_process_group, device_mesh.py). All-gather and reduce-scatter share a group, unless the user asks
for two (_reduce_scatter_process_group in _fully_shard/_fsdp_param_group.py). A hybrid strategy has a shard group and a
replicate group, split from the default group without sharing its resources (ncclCommSplit; NCCL's splitShare is 0). The
default group then serves barriers only. Its communicator is created by init_process_group if that gets a ``device_id``,
as in train/processes/worker.py, and otherwise by the first barrier.

With reshard_after_forward=N every call of fully_shard makes a mesh of its own (_get_post_forward_mesh_info in
_fully_shard/_fsdp_init.py; https://github.com/pytorch/pytorch/issues/153302). So each unit has a communicator for its
all-gathers in backward and, with a ``device_id``, one for the other dimension of its mesh, in which nothing is sent.

Connections. All-gather and reduce-scatter use ring algorithms. Within a node NCCL's cost model never chooses NVLink
SHARP for them; between nodes NVLink SHARP needs CollNet (updateCollCostTable, src/enqueue.cc). Broadcasts use rings as
well. All-reduces within a node use rings or NVLink SHARP, and trees for no size: ncclTopoTuneModel and
treeCorrectionFactor (src/graph/tuning.cc) give a ring of another protocol less time. Between nodes those of a few bytes
(barriers, norms) may use trees, and those of gradients trees and NVLink SHARP, depending on their sizes. Where both
ways are possible, the lower bound is without and the upper bound with it.

The number of network connections of a rank depends on its ring position; the bounds cover every position. The memory is
unknown for GPUs without NVSwitch or before the A100, for networks without RDMA, and for groups that span nodes with
only some of their GPUs. A process group of one rank has no connections and is counted as zero bytes, although one with
a ``device_id`` allocates what every communicator allocates when it is created.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from fsdp_bench.rates import nccl_buffers as nccl
from fsdp_bench.rates.collectives import Topology, groups_of, topology_of_ranks
from fsdp_bench.rates.nccl_buffers import Bounds
from fsdp_bench.spec.hardware import Hardware, LinkKind, Network
from fsdp_bench.spec.setup import ShardingStrategy, TrainSetup


def interfaces(network: Network, hardware: Hardware) -> int | None:
    """Return the number of network devices that NCCL sees on a node.

    AWS's plugin presents all interfaces of one GPU as one device.
    """
    count, gpus = network.num_nics, hardware.server.gpus_per_node
    if count is None or network.bandwidth_bytes_per_second is None or count <= gpus:
        return count if network.bandwidth_bytes_per_second is not None else None
    return gpus if network.kind is LinkKind.EFA and count % gpus == 0 else None


def channels_of(group: Topology, hardware: Hardware) -> Bounds | None:
    """Return the number of NCCL channels of a group, or None if it cannot be derived."""
    if group.num_nodes == 1:
        found = nccl.channels_within(group.link_bandwidth, group.capability)
        return None if found is None else Bounds(found, found)
    network = hardware.server.inter_node
    devices = interfaces(network, hardware) if network else None
    if network is None or devices is None:
        return None
    each = (network.bandwidth_bytes_per_second or 0.0) / devices
    return nccl.channels_across(devices, each, group.ranks_per_node, group.link_bandwidth)


_RDMA = (LinkKind.INFINIBAND, LinkKind.ROCE, LinkKind.EFA)


class Purpose(StrEnum):
    """The purpose of a communicator."""

    SHARD = "shard"
    """All-gather of parameters and reduce-scatter of gradients."""
    REPLICATE = "replicate"
    """All-reduce of gradients."""
    BARRIERS = "barriers"
    """All ranks, in addition to the groups of a hybrid strategy."""
    POST_FORWARD = "post_forward"
    """All-gather in backward among the ranks of reshard_after_forward; each unit has its own."""
    ACROSS_POST_FORWARD = "across_post_forward"
    """The other dimension of that mesh, in which nothing is sent."""


@dataclass(frozen=True)
class Communicator:
    """One NCCL communicator, and its device memory on one rank."""

    purpose: Purpose
    num_ranks: int
    num_channels: Bounds | None = None
    num_bytes: Bounds | None = None
    unknown: str | None = None
    """The reason if the number of channels and of bytes is None."""


@dataclass(frozen=True)
class Communicators:
    """All communicators of one rank."""

    each: tuple[Communicator, ...]

    @property
    def num_bytes(self) -> Bounds | None:
        """Sum over all communicators, or None if any is unknown."""
        total = Bounds(0, 0)
        for one in self.each:
            if one.num_bytes is None:
                return None
            total += one.num_bytes
        return total

    @property
    def unknown(self) -> str | None:
        """The first reason why the sum is unknown, or None."""
        return next((one.unknown for one in self.each if one.unknown), None)


def communicators_of(setup: TrainSetup, hardware: Hardware | None, num_resharded_units: int = 0) -> Communicators:
    """Return the communicators of one rank, with their bytes if the hardware's topology is known.

    ``num_resharded_units`` is the number of units that ``reshard_after_forward = N`` reshards to fewer ranks.
    """
    if setup.world_size == 1:
        return Communicators(())
    purposes = {Purpose.SHARD: setup.world_size}
    if setup.effective_strategy is ShardingStrategy.NO_SHARD:
        purposes = {Purpose.REPLICATE: setup.world_size}
    elif setup.shard_group_size < setup.world_size:
        shard = setup.shard_group_size
        purposes = {Purpose.SHARD: shard, Purpose.REPLICATE: setup.world_size // shard}
        purposes[Purpose.BARRIERS] = setup.world_size
    found = [_communicator(*one, setup, hardware) for one in purposes.items()]
    ranks = setup.reshard_after_forward
    if ranks is not None:
        across = setup.world_size // ranks
        gathers = _communicator(Purpose.POST_FORWARD, ranks, setup, hardware)
        found += num_resharded_units * [gathers, _communicator(Purpose.ACROSS_POST_FORWARD, across, setup, hardware)]
    return Communicators(tuple(found))


def communicators_of_groups(groups: Sequence[tuple[Purpose, Sequence[int]]], hardware: Hardware) -> Communicators:
    """Return the communicators of process groups, by what they do and their ranks."""
    found = [
        _with_memory(purpose, len(ranks), topology_of_ranks(hardware, ranks), hardware) for purpose, ranks in groups
    ]
    return Communicators(tuple(found))


def _communicator(purpose: Purpose, num_ranks: int, setup: TrainSetup, hardware: Hardware | None) -> Communicator:
    if hardware is None or hardware.world_size != setup.world_size:
        return Communicator(purpose, num_ranks, unknown="--server is missing or has another world size")
    groups = groups_of(hardware, setup)
    group = groups.world
    if purpose is Purpose.POST_FORWARD:
        group = groups.post_forward
    elif purpose is Purpose.ACROSS_POST_FORWARD:
        group = groups.across_post_forward
    elif num_ranks < setup.world_size:
        group = groups.shard if purpose is Purpose.SHARD else groups.replicate
    return _with_memory(purpose, num_ranks, group, hardware)


def _with_memory(purpose: Purpose, num_ranks: int, group: Topology | None, hardware: Hardware) -> Communicator:
    unknown = _why_unknown(purpose, group, hardware)
    if group is None or unknown:
        return Communicator(purpose, num_ranks, unknown=unknown)
    channels = channels_of(group, hardware)
    if channels is None:
        unknown = "the number of NCCL channels cannot be derived for this topology"
        return Communicator(purpose, num_ranks, unknown=unknown)
    return Communicator(purpose, num_ranks, channels, _bytes(purpose, group, channels, hardware))


def _why_unknown(purpose: Purpose, group: Topology | None, hardware: Hardware) -> str | None:
    """Return why a group's memory cannot be derived from NCCL's source, or None if it can."""
    link, network = hardware.server.intra_node, hardware.server.inter_node
    if group is None or link is None or link.kind is not LinkKind.NVSWITCH:
        return "only GPUs that NVSwitch joins are covered, from the A100 on, in groups that fill nodes evenly"
    if group.num_nodes == 1:
        return None
    if network is None or network.kind not in _RDMA or interfaces(network, hardware) is None:
        return "between nodes only InfiniBand, RoCE and EFA are covered"
    if group.ranks_per_node not in (1, hardware.server.gpus_per_node):
        return "the group spans nodes with only some of their GPUs"
    if group.ranks_per_node == 1 and purpose not in (Purpose.REPLICATE, Purpose.ACROSS_POST_FORWARD):
        return "with one GPU a node, gathers and scatters may go by NCCL's PAT, which is not covered"
    return None


def _bytes(purpose: Purpose, group: Topology, channels: Bounds, hardware: Hardware) -> Bounds:
    """Return the bytes of a communicator: those allocated when it is created, and those of its connections."""
    start, rings, trees = _start(group, channels), _rings(group, channels, hardware), _trees(group, channels, hardware)
    if purpose is Purpose.ACROSS_POST_FORWARD:  # made without a device_id only where something is sent
        return Bounds(0, start.high)
    if purpose is Purpose.REPLICATE:
        return start + rings + trees + _multicast(group, hardware)
    return start + (Bounds(0, rings.high) if purpose is Purpose.BARRIERS else rings) + trees


def _start(group: Topology, channels: Bounds) -> Bounds:
    """Return the bytes allocated when the communicator is created; across nodes the lower bound omits NVLS.

    Across nodes NCCL sets NVLink SHARP up only if a separate search finds network interfaces for it.
    """
    multicast = nccl.multicast_channels(group.capability, group.ranks_per_node, group.num_nodes)
    at_least = multicast if group.num_nodes == 1 else 0
    return Bounds(
        nccl.at_start(group.size, group.ranks_per_node, channels.low, at_least),
        nccl.at_start(group.size, group.ranks_per_node, channels.high, multicast),
    )


def _connections(hardware: Hardware) -> tuple[nccl.Connections, nccl.Connections]:
    """Return the lower and the upper bound of the bytes of connections."""
    capability = hardware.gpu.compute_capability or 0.0
    simple = nccl.SIMPLE_OF_AWS if _is_efa(hardware) else nccl.SIMPLE
    return nccl.connections(capability), nccl.connections(capability, simple)


def _is_efa(hardware: Hardware) -> bool:
    """Whether AWS's plugin may have set NCCL's variables, also for groups within a node."""
    network = hardware.server.inter_node
    return network is not None and network.kind is LinkKind.EFA


def _rings(group: Topology, channels: Bounds, hardware: Hardware) -> Bounds:
    """Return the bytes of ring connections: previous and next rank on each channel.

    In a group of whole nodes, a GPU is the first of its node in at most one ring that the search finds, and the last in
    at most one; each of these rings has two channels. If the last GPU sends through another GPU's network interface,
    the buffer is on that GPU (PXN).
    """
    least, most = _connections(hardware)
    if group.ranks_per_node == 1:
        return Bounds(channels.low * least.net_pair, channels.high * most.net_pair)
    if group.num_nodes == 1:
        return Bounds(channels.low * least.pair, channels.high * most.pair)
    return Bounds(
        channels.low * least.pair - 2 * least.send, channels.high * most.pair + 2 * (most.net_pair - most.pair)
    )


def _trees(group: Topology, channels: Bounds, hardware: Hardware) -> Bounds:
    """Return the extra bytes of tree connections, from zero to the maximum; within a node there are none.

    A tree is a chain within a node, and NCCL builds two trees between nodes. With two ranks the tree's connections are
    the ring's. In a group of whole nodes, a GPU is the head of at most one chain, with three neighbours on other nodes,
    and the second of at most two chains, with one such neighbour each (connectTrees in src/graph/connect.cc). Each of
    these has two channels.
    """
    _, most = _connections(hardware)
    if group.size == 2 or group.num_nodes == 1:
        return Bounds(0, 0)
    if group.ranks_per_node == 1:
        return Bounds(0, channels.high * 3 * most.net_pair)
    return Bounds(0, channels.high * 2 * most.pair + 2 * (3 + 2) * most.net_pair)


def _multicast(group: Topology, hardware: Hardware) -> Bounds:
    """Return the extra bytes of NVLink SHARP, from zero to the maximum.

    The maximum is its buffers and, between nodes, connections of a tree to three neighbours (ncclNvlsTreeConnect).
    """
    channels = nccl.multicast_channels(group.capability, group.ranks_per_node, group.num_nodes)
    if not channels:
        return Bounds(0, 0)
    slice_bytes = nccl.MULTICAST_SLICE_OF_AWS if _is_efa(hardware) else nccl.MULTICAST_SLICE
    buffers = nccl.multicast_buffers(channels, group.ranks_per_node, slice_bytes)
    trees = channels * 3 * _connections(hardware)[1].net_pair if group.num_nodes > 1 else 0
    return Bounds(0, buffers + trees)
