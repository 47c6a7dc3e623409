"""How long a collective takes: NCCL's own cost model, on the links of a server.

NCCL chooses an algorithm and a protocol for each collective by a model of latency and bandwidth (ncclTopoTuneModel and
ncclTopoGetAlgoTime in src/graph/tuning.cc, read in a copy of 2.28.3); the constants here are its defaults, the links'
bandwidths are those of src/graph/topo.h (NVIDIA/nccl, a copy of 2026). A ring's time is

    base latency + steps inside of nodes x their latency + steps between nodes x theirs + message x (n - 1) / n / bus

for an all-gather and a reduce-scatter, twice the steps and the bytes for an all-reduce, for which there is also a tree.
The bus is the slowest link that every byte crosses: a GPU's own links, or a node's network, shared by all groups that
use it at the same time.

GPUs that PCIe joins reach each other through their processors: a ring takes each GPU's lanes once in each direction,
and the link between two processors once, where its ranks are attached to both; all groups of a node that cross it at
the same time share it. Both figures are NCCL's own for the kind of lanes and processors.

Not covered: NVLink SHARP (NVLS), CollNet, PAT, tuner plugins, what a network reaches under load of others, what Intel's
processors take of the lanes (INTEL_P2P_OVERHEAD), and which of its whole-numbered ring speeds NCCL settles on. Unknown:
GPUs that are joined by PCIe and attached to undocumented processors; a part of a node whose pairs of GPUs have only
some of a GPU's links; groups that do not fill nodes evenly; architectures without figures here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fsdp_bench.spec.hardware import Cluster, Interconnect, LinkKind
from fsdp_bench.spec.setup import TrainSetup

PROTOCOLS = ("LL", "LL128", "Simple")
"""How NCCL moves data: 8 bytes at a time with a flag, 128 with one, or large slices with a fence."""

MICROSECOND = 1e-6
_BASE = {"ring": (6.6, 14.0, 8.4), "tree": (6.8, 14.0, 8.4)}
"""Microseconds to begin, by protocol (baseLatencies)."""
_STEP = {
    "nvlink": {"ring": (0.6, 1.9, 3.4), "tree": (0.6, 1.25, 4.0)},
    "pcie": {"ring": (1.0, 2.5, 5.7), "tree": (1.0, 1.9, 4.0)},
    "network": {"ring": (2.7, 4.0, 14.0), "tree": (5.0, 8.5, 14.0)},
}
"""Microseconds of a step over a link (hwLatencies)."""
_POST = (1.0, 1.0, 3.0)
"""Microseconds that a step takes at least where the group spans nodes (getNetOverhead, on an Intel host)."""
_LL_WITHIN = {7: 39.0e9, 8: 87.7e9, 9: 141.0e9, 10: 282.0e9}
"""Bus bytes a second that LL reaches within a node, by the major compute capability (llMaxBws)."""
_LL_ACROSS = {2: 22.5e9}
_LL_ACROSS_MORE = 19.0e9
"""The same for two nodes and for more: the lower of the figures for Intel and AMD hosts."""
_PLATEAU = 1.4
"""What the latency of a ring's all-reduce with Simple is multiplied by between nodes ("plateau effect")."""
_TREE_CORRECTION = {
    "LL": (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1),
    "LL128": (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1),
    "Simple": (
        *(0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8),
        *(0.9, 0.9),
    ),
}
"""treeCorrectionFactor: of the bandwidth, for powers of two from 64 bytes to 256 MiB."""

_NVLINK_EFFICIENCY = {7: 20.0 / 25.0, 8: 20.0 / 25.0, 9: 20.6 / 25.0, 10: 40.1 / 50.0}
"""What NCCL reckons with of a link's nominal bytes a second (SM70_NVLINK_BW and its siblings)."""
_PCIE_EFFICIENCY = 12.0 / 16.0
"""PCI_BW, of PCIe 3.0 x16, over its nominal bytes a second; NCCL takes the same part of later ones."""
_NETWORK_EFFICIENCY = 12.0 / 12.5
"""NET_BW, NCCL's default, over the 100 Gb/s that it stands for."""

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")


@dataclass(frozen=True)
class Wiring:
    """The ranks of one group, and what joins them."""

    ranks_per_node: int
    num_nodes: int
    link: str
    """Within a node: ``nvlink`` or ``pcie``."""
    link_bandwidth: float
    """Bytes a second and direction that a rank's links carry within a node."""
    network_bandwidth: float
    """Bytes a second and direction between nodes that this group has of each node's network."""
    capability: int
    """Major compute capability."""

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return self.ranks_per_node * self.num_nodes

    @property
    def bus_bandwidth(self) -> float:
        """Bytes a second of the slowest link that every byte of a ring crosses."""
        return self.link_bandwidth if self.num_nodes == 1 else min(self.link_bandwidth, self.network_bandwidth)


@dataclass(frozen=True)
class Groups:
    """What joins the ranks of each group: shard groups gather and scatter, replicate groups add gradients up."""

    shard: Wiring | None
    """None where a group is one rank, or what joins its ranks is not documented; so are the others."""
    replicate: Wiring | None
    world: Wiring | None


def groups_of(cluster: Cluster, setup: TrainSetup) -> Groups:
    """Return the groups that rank 0 is in; shard groups are neighbours, replicate groups span them."""
    each, shard = cluster.gpus_per_node, setup.shard_group_size
    replicas = cluster.world_size // shard
    if each % shard and shard % each:
        return Groups(shard=None, replicate=None, world=_wiring(cluster, cluster.world_size, each))
    within = max(each // shard, 1) if replicas > 1 else 1
    return Groups(
        shard=_wiring(cluster, shard, min(shard, each)),
        replicate=_wiring(cluster, replicas, min(within, replicas), stride=shard),
        world=_wiring(cluster, cluster.world_size, each),
    )


def _wiring(cluster: Cluster, size: int, ranks_per_node: int, stride: int = 1) -> Wiring | None:
    """Return the wiring of a group whose ranks are a stride apart.

    All GPUs of a node are in such groups, which share its network.
    """
    capability = cluster.gpu.compute_capability
    if size <= 1 or capability is None or int(capability) not in _NVLINK_EFFICIENCY:
        return None
    num_nodes = size // ranks_per_node
    link = math.inf if ranks_per_node == 1 else _link_bandwidth(cluster, ranks_per_node, stride)
    network = _network_bandwidth(cluster) if num_nodes > 1 else 0.0
    if link is None or network is None:
        return None
    return Wiring(
        ranks_per_node=ranks_per_node,
        num_nodes=num_nodes,
        link="pcie" if _is_pcie(cluster) else "nvlink",
        link_bandwidth=link,
        network_bandwidth=network * ranks_per_node / cluster.gpus_per_node,
        capability=int(capability),
    )


def _is_pcie(cluster: Cluster) -> bool:
    return cluster.server.intra_node is not None and cluster.server.intra_node.kind is LinkKind.PCIE


def _link_bandwidth(cluster: Cluster, ranks_per_node: int, stride: int) -> float | None:
    """Return a GPU's bytes a second to others of its node and group."""
    link, efficiency = cluster.server.intra_node, _NVLINK_EFFICIENCY[int(cluster.gpu.compute_capability or 0)]
    if link is None or link.bandwidth_bytes_per_second is None:
        return None
    if link.kind is LinkKind.PCIE:
        return _pcie_bandwidth(link, ranks_per_node, stride, cluster.gpus_per_node // ranks_per_node)
    is_whole_mesh = link.kind is LinkKind.NVLINK_MESH and ranks_per_node == cluster.server.gpus_per_node
    if link.kind is not LinkKind.NVSWITCH and not is_whole_mesh:
        return None
    return link.bandwidth_bytes_per_second * efficiency


def _pcie_bandwidth(link: Interconnect, ranks_per_node: int, stride: int, groups_per_node: int) -> float | None:
    """Return what a ring carries through the processors, beside the other groups of the node."""
    if link.bandwidth_bytes_per_second is None or link.gpus_per_socket is None:
        return None
    lanes, span = link.bandwidth_bytes_per_second * _PCIE_EFFICIENCY, ranks_per_node * stride
    if link.gpus_per_socket % span == 0:
        return lanes
    if link.socket_bandwidth_bytes_per_second is None:
        return None
    return min(lanes, link.socket_bandwidth_bytes_per_second / groups_per_node)


def _network_bandwidth(cluster: Cluster) -> float | None:
    """Return a node's bytes a second to other nodes, from the interfaces next to the GPUs that are used."""
    network, all_gpus = cluster.server.inter_node, cluster.server.gpus_per_node
    if network is None or network.bandwidth_bytes_per_second is None:
        return None
    nics = network.num_nics or all_gpus
    near = min(cluster.gpus_per_node * max(nics / all_gpus, 1), nics)
    return network.bandwidth_bytes_per_second * _NETWORK_EFFICIENCY * near / nics


def collective_seconds(kind: str, message_bytes: float, wiring: Wiring) -> float:
    """Return what one collective takes, by the algorithm and protocol that NCCL finds fastest.

    Args:
        kind: one of KINDS.
        message_bytes: the whole message: an all-gather's output, a reduce-scatter's input, else the tensor.
        wiring: its group.
    """
    algorithms = ("ring", "tree") if kind == "all_reduce" else ("ring",)
    protocols = [index for index, name in enumerate(PROTOCOLS) if name != "LL128" or wiring.link == "nvlink"]
    return min(
        _latency(kind, algorithm, protocol, wiring)
        + message_bytes / _bandwidth(kind, algorithm, protocol, message_bytes, wiring)
        for algorithm in algorithms
        for protocol in protocols
    )


def _latency(kind: str, algorithm: str, protocol: int, wiring: Wiring) -> float:
    """Return the seconds that do not depend on the message."""
    across = wiring.num_nodes > 1
    within = max(_STEP[wiring.link][algorithm][protocol], _POST[protocol] if across else 0.0)
    between = _STEP["network"]["tree" if wiring.ranks_per_node == 1 else algorithm][protocol]
    base = _BASE[algorithm][protocol]
    if algorithm == "tree":
        hops = (wiring.ranks_per_node - 1) * _STEP[wiring.link]["tree"][protocol]
        return (base + 2 * (hops + math.floor(math.log2(wiring.num_nodes)) * between)) * MICROSECOND
    if kind == "broadcast":
        return (base + (between if across else within)) * MICROSECOND
    passes = 2 if kind == "all_reduce" else 1
    steps_between = passes * (wiring.num_nodes - 1)
    steps_within = passes * (wiring.size - 1) - steps_between
    latency = base + steps_within * within + steps_between * between
    if kind == "all_reduce" and across and PROTOCOLS[protocol] == "Simple":
        latency *= _PLATEAU
    return latency * MICROSECOND


def _bandwidth(kind: str, algorithm: str, protocol: int, message_bytes: float, wiring: Wiring) -> float:
    """Return the message's bytes a second."""
    bus, name, single = wiring.bus_bandwidth, PROTOCOLS[protocol], wiring.num_nodes == 1
    slow = _LL_WITHIN.get(wiring.capability, _LL_WITHIN[10]) if single else None
    slow = slow or _LL_ACROSS.get(wiring.num_nodes, _LL_ACROSS_MORE)
    if algorithm == "tree":
        bus *= 0.92
        if name == "LL":
            bus = min(bus / 3.8, slow)
        elif name == "LL128":
            bus *= 7 / 9 if single else 120 / 128
        return bus / 2 * _correction(name, message_bytes)
    if name == "LL":
        bus = min(bus / 2, slow)
    elif name == "LL128":
        bus *= 0.92
    if kind == "broadcast":
        return bus
    passes = 2 if kind == "all_reduce" else 1
    return bus * wiring.size / (passes * (wiring.size - 1))


def _correction(protocol: str, message_bytes: float) -> float:
    """Return a tree's correction; between two powers of two on the line, where NCCL takes the lower one's.

    NCCL's steps would make a message faster than a smaller one.
    """
    table = _TREE_CORRECTION[protocol]
    power = min(max(math.log2(max(message_bytes, 1) / 64), 0.0), len(table) - 1.0)
    low = math.floor(power)
    high = min(low + 1, len(table) - 1)
    return table[low] + (power - low) * (table[high] - table[low])
