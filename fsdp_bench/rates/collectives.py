"""The time that a collective takes: NCCL's own cost model, on the links of a server.

NCCL chooses an algorithm and a protocol for each collective by a model of latency and bandwidth (ncclTopoTuneModel and
ncclTopoGetAlgoTime in src/graph/tuning.cc, read in a copy of 2.28.3); the constants here are its defaults, the links'
bandwidths are those of src/graph/topo.h (NVIDIA/nccl, a copy of 2026). A ring's time is

    base latency + steps inside of nodes x their latency + steps between nodes x theirs + message x (n - 1) / n / bus

for an all-gather and a reduce-scatter. An all-reduce has twice the steps and the bytes, and NCCL may use a tree for it
instead. The bus is the slowest link that every byte crosses: a GPU's own links, or the network of a node. All groups of
a node that communicate at the same time share its network.

GPUs on PCIe communicate through CPU sockets. A ring crosses each GPU's PCIe link once per direction. A ring whose ranks
are attached to two sockets also crosses the link between them, which all such groups of the node share. Both bandwidths
are NCCL's own, by PCIe generation and CPU. Where nobody documents which GPUs share a socket, or what joins the sockets,
that link is taken to be no slower than the GPUs': the time is then the least that is possible.

NCCL has no model for messages (send, receive) and all-to-alls, which are messages to every rank. They take what the
bytes take on the slowest link, after one step, as NCCL's benchmarks count them (nccl-tests, doc/PERFORMANCE.md: a
message's bus bandwidth is its own; an all-to-all's is (n - 1) / n of it), with the bandwidths and latencies of a ring.
Between nodes each rank has its part of the network. Messages use LL or Simple (addP2pToPlan in src/enqueue.cc); the
faster one is taken. An all-to-all among GPUs on PCIe is unknown: nobody documents how it shares the sockets' links.

Not covered: NVLink SHARP (NVLS), CollNet, PAT, tuner plugins, network contention from other jobs, PCIe bandwidth lost
on Intel CPUs (INTEL_P2P_OVERHEAD), and which of its whole-numbered ring speeds NCCL chooses. The time is unknown for
part of a node with an NVLink mesh, for groups that do not fill nodes evenly, and for architectures without constants
here.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from fsdp_bench.simulate.events import Work
from fsdp_bench.spec.hardware import Hardware, Interconnect, LinkKind
from fsdp_bench.spec.setup import TrainSetup

PROTOCOLS = ("LL", "LL128", "Simple")
"""NCCL's protocols: 8 bytes with a flag (LL), 128 bytes with a flag (LL128), large slices with a fence (Simple)."""

MICROSECOND = 1e-6
_BASE = {"ring": (6.6, 14.0, 8.4), "tree": (6.8, 14.0, 8.4)}
"""Base latency in microseconds, by protocol (baseLatencies)."""
_STEP = {
    "nvlink": {"ring": (0.6, 1.9, 3.4), "tree": (0.6, 1.25, 4.0)},
    "pcie": {"ring": (1.0, 2.5, 5.7), "tree": (1.0, 1.9, 4.0)},
    "network": {"ring": (2.7, 4.0, 14.0), "tree": (5.0, 8.5, 14.0)},
}
"""Latency in microseconds of one step over a link, by protocol (hwLatencies)."""
_POST = (1.0, 1.0, 3.0)
"""Lowest latency in microseconds of a step in a group that spans nodes, by protocol (getNetOverhead, Intel host)."""
_LL_WITHIN = {7: 39.0e9, 8: 87.7e9, 9: 141.0e9, 10: 282.0e9}
"""Highest bus bandwidth of LL within a node in bytes per second, by major compute capability (llMaxBws)."""
_LL_ACROSS = {2: 22.5e9}
_LL_ACROSS_MORE = 19.0e9
"""Highest bus bandwidth of LL on two nodes and on more: the lower of NCCL's values for Intel and AMD hosts."""
_PLATEAU = 1.4
"""Factor on the latency of a ring all-reduce with Simple between nodes ("plateau effect")."""
_TREE_CORRECTION = {
    "LL": (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1),
    "LL128": (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1),
    "Simple": (
        *(0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8),
        *(0.9, 0.9),
    ),
}
"""Factor on the bandwidth of a tree, for powers of two from 64 bytes to 256 MiB (treeCorrectionFactor)."""

_NVLINK_EFFICIENCY = {7: 20.0 / 25.0, 8: 20.0 / 25.0, 9: 20.6 / 25.0, 10: 40.1 / 50.0}
"""Fraction of NVLink's nominal bandwidth that NCCL assumes, by major compute capability (SM70_NVLINK_BW and others)."""
_PCIE_EFFICIENCY = 12.0 / 16.0
"""Fraction of PCIe's nominal bandwidth that NCCL assumes: PCI_BW, for PCIe 3.0 x16 and later generations."""
_NETWORK_EFFICIENCY = 12.0 / 12.5
"""Fraction of a network's nominal bandwidth: NET_BW, NCCL's default for an interface of 100 Gb/s."""

MESSAGES, ALL_TO_ALL = "send_recv", "all_to_all"
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", ALL_TO_ALL, MESSAGES)


@dataclass(frozen=True)
class Topology:
    """The ranks of one process group, and the links between them."""

    ranks_per_node: int
    num_nodes: int
    link: str
    """The interconnect within a node: ``nvlink`` or ``pcie``."""
    link_bandwidth: float
    """Bandwidth of a rank's links within a node, in bytes per second and direction."""
    network_bandwidth: float
    """This group's part of a node's network bandwidth, in bytes per second and direction."""
    capability: int
    """Major compute capability of the GPU."""

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return self.ranks_per_node * self.num_nodes

    @property
    def bus_bandwidth(self) -> float:
        """Bandwidth of the slowest link that every byte of a ring crosses, in bytes per second."""
        return self.link_bandwidth if self.num_nodes == 1 else min(self.link_bandwidth, self.network_bandwidth)


@dataclass(frozen=True)
class Groups:
    """The topology of each process group that rank 0 belongs to.

    The shard group runs all-gather and reduce-scatter, the replicate group all-reduce.
    """

    shard: Topology | None = None
    """Each is None if the group has one rank or its interconnect is not documented."""
    replicate: Topology | None = None
    world: Topology | None = None
    post_forward: Topology | None = None
    """Consecutive ranks too: fully_shard's all-gather in backward with reshard_after_forward=N."""
    across_post_forward: Topology | None = None
    """Corresponding ranks of all those groups, which send nothing."""
    of_script: Mapping[str, Topology | None] = field(default_factory=dict)
    """The process groups of a rehearsed script, by its own names."""
    pairs: Mapping[int, Topology | None] = field(default_factory=dict)
    """The links to the ranks with which a rehearsed rank exchanges messages."""

    def that_communicate(self) -> dict[str, Topology | None]:
        """Return the process groups by the names that Work.group has."""
        own = {"shard": self.shard, "replicate": self.replicate, "world": self.world}
        return {**own, "post_forward": self.post_forward, **self.of_script}

    def topology(self, work: Work) -> Topology | None:
        """Return the links of a collective; of messages to several ranks the slowest."""
        if work.name != MESSAGES:
            return self.that_communicate()[work.group]
        found = [self.pairs[peer] for peer in work.dims]
        known = [one for one in found if one is not None]
        return min(known, key=lambda one: one.bus_bandwidth) if len(known) == len(found) else None


def groups_of(hardware: Hardware, setup: TrainSetup) -> Groups:
    """Return the topologies of the groups that rank 0 belongs to.

    Shard groups hold consecutive ranks; replicate groups hold corresponding ranks of all shard groups.
    """
    each, shard = hardware.gpus_per_node, setup.shard_group_size
    replicas = hardware.world_size // shard
    if each % shard and shard % each:
        return Groups(world=_topology(hardware, hardware.world_size, each))
    within = max(each // shard, 1) if replicas > 1 else 1
    post_forward, across = _post_forward_groups(hardware, setup)
    return Groups(
        shard=_topology(hardware, shard, min(shard, each)),
        replicate=_topology(hardware, replicas, min(within, replicas), stride=shard),
        world=_topology(hardware, hardware.world_size, each),
        post_forward=post_forward,
        across_post_forward=across,
    )


def topology_of_ranks(hardware: Hardware, ranks: Sequence[int]) -> Topology | None:
    """Return the topology of a process group, whatever its ranks; ranks fill one node after another.

    None for one rank, for links that are not documented, and for ranks that are spread unevenly over nodes or within.
    """
    each, ordered = hardware.gpus_per_node, sorted(ranks)
    nodes: dict[int, list[int]] = {}
    for rank in ordered:
        nodes.setdefault(rank // each, []).append(rank % each)
    places = list(nodes.values())
    strides = {second - first for first, second in pairwise(places[0])} if places else set()
    if not places or any(other != places[0] for other in places) or len(strides) > 1:
        return None
    return _topology(hardware, len(ordered), len(places[0]), strides.pop() if strides else 1)


def topology_of_pair(hardware: Hardware, rank: int, other: int) -> Topology | None:
    """Return the links of messages between two ranks, while all ranks of a node exchange such messages.

    On two nodes each has its part of the network, wherever on its node it is.
    """
    each = hardware.gpus_per_node
    is_within = rank // each == other // each
    return topology_of_ranks(hardware, (rank, other) if is_within else (0, each))


def _post_forward_groups(hardware: Hardware, setup: TrainSetup) -> tuple[Topology | None, Topology | None]:
    """Return the groups of the mesh that reshard_after_forward=N makes: (all ranks / N, N)."""
    each, ranks = hardware.gpus_per_node, setup.reshard_after_forward
    if ranks is None or (each % ranks and ranks % each):
        return None, None
    others = hardware.world_size // ranks
    within = min(max(each // ranks, 1), others)
    return _topology(hardware, ranks, min(ranks, each)), _topology(hardware, others, within, stride=ranks)


def _topology(hardware: Hardware, size: int, ranks_per_node: int, stride: int = 1) -> Topology | None:
    """Return the topology of a group whose ranks are ``stride`` apart.

    Every GPU of a node belongs to one such group; the groups of a node share its network.
    """
    capability = hardware.gpu.compute_capability
    if size <= 1 or capability is None or int(capability) not in _NVLINK_EFFICIENCY:
        return None
    num_nodes = size // ranks_per_node
    link = math.inf if ranks_per_node == 1 else _link_bandwidth(hardware, ranks_per_node, stride)
    network = _network_bandwidth(hardware) if num_nodes > 1 else 0.0
    if link is None or network is None:
        return None
    return Topology(
        ranks_per_node=ranks_per_node,
        num_nodes=num_nodes,
        link="pcie" if is_over_pcie(hardware) else "nvlink",
        link_bandwidth=link,
        network_bandwidth=network * ranks_per_node / hardware.gpus_per_node,
        capability=int(capability),
    )


def is_over_pcie(hardware: Hardware) -> bool:
    """Return whether PCIe alone joins the GPUs of a node."""
    return hardware.server.intra_node is not None and hardware.server.intra_node.kind is LinkKind.PCIE


def socket_is_assumed(hardware: Hardware) -> bool:
    """Return whether a time over PCIe rests on a link between CPU sockets that nobody documents."""
    link = hardware.server.intra_node
    if link is None or not is_over_pcie(hardware) or hardware.gpus_per_node == 1:
        return False
    if link.gpus_per_socket is None:
        return True
    return link.socket_bandwidth_bytes_per_second is None and hardware.gpus_per_node > link.gpus_per_socket


def _link_bandwidth(hardware: Hardware, ranks_per_node: int, stride: int) -> float | None:
    """Return a GPU's bandwidth to the other GPUs of its group on the node, in bytes per second; None if unknown."""
    link, efficiency = hardware.server.intra_node, _NVLINK_EFFICIENCY[int(hardware.gpu.compute_capability or 0)]
    if link is None or link.bandwidth_bytes_per_second is None:
        return None
    if link.kind is LinkKind.PCIE:
        return _pcie_bandwidth(link, ranks_per_node, stride, hardware.gpus_per_node // ranks_per_node)
    is_whole_mesh = link.kind is LinkKind.NVLINK_MESH and ranks_per_node == hardware.server.gpus_per_node
    if link.kind is not LinkKind.NVSWITCH and not is_whole_mesh:
        return None
    return link.bandwidth_bytes_per_second * efficiency


def _pcie_bandwidth(link: Interconnect, ranks_per_node: int, stride: int, groups_per_node: int) -> float | None:
    """Return a ring's bandwidth over PCIe in bytes per second, with the node's other groups active; None if unknown."""
    if link.bandwidth_bytes_per_second is None:
        return None
    lanes, span = link.bandwidth_bytes_per_second * _PCIE_EFFICIENCY, ranks_per_node * stride
    if link.gpus_per_socket is None or link.gpus_per_socket % span == 0:
        return lanes
    if link.socket_bandwidth_bytes_per_second is None:
        return lanes
    return min(lanes, link.socket_bandwidth_bytes_per_second / groups_per_node)


def _network_bandwidth(hardware: Hardware) -> float | None:
    """Return a node's bandwidth to other nodes in bytes per second, over the interfaces nearest to the GPUs in use."""
    network, all_gpus = hardware.server.inter_node, hardware.server.gpus_per_node
    if network is None or network.bandwidth_bytes_per_second is None:
        return None
    nics = network.num_nics or all_gpus
    near = min(hardware.gpus_per_node * max(nics / all_gpus, 1), nics)
    return network.bandwidth_bytes_per_second * _NETWORK_EFFICIENCY * near / nics


def collective_seconds(kind: str, message_bytes: float, topology: Topology) -> float:
    """Return the seconds of one collective with the algorithm and protocol that NCCL's model finds fastest.

    ``message_bytes``: the output of an all-gather, the input of a reduce-scatter, what a rank sends in an all-to-all,
    else the tensor.
    """
    algorithms = ("ring", "tree") if kind == "all_reduce" else ("ring",)
    has_128 = topology.link == "nvlink" and kind not in (MESSAGES, ALL_TO_ALL)
    protocols = [index for index, name in enumerate(PROTOCOLS) if name != "LL128" or has_128]
    return min(
        _latency(kind, algorithm, protocol, topology)
        + message_bytes / _bandwidth(kind, algorithm, protocol, message_bytes, topology)
        for algorithm in algorithms
        for protocol in protocols
    )


def _latency(kind: str, algorithm: str, protocol: int, topology: Topology) -> float:
    """Return the part of the seconds that does not depend on the message size."""
    across = topology.num_nodes > 1
    within = max(_STEP[topology.link][algorithm][protocol], _POST[protocol] if across else 0.0)
    between = _STEP["network"]["tree" if topology.ranks_per_node == 1 else algorithm][protocol]
    base = _BASE[algorithm][protocol]
    if algorithm == "tree":
        hops = (topology.ranks_per_node - 1) * _STEP[topology.link]["tree"][protocol]
        return (base + 2 * (hops + math.floor(math.log2(topology.num_nodes)) * between)) * MICROSECOND
    if kind in ("broadcast", MESSAGES, ALL_TO_ALL):
        return (base + (between if across else within)) * MICROSECOND
    passes = 2 if kind == "all_reduce" else 1
    steps_between = passes * (topology.num_nodes - 1)
    steps_within = passes * (topology.size - 1) - steps_between
    latency = base + steps_within * within + steps_between * between
    if kind == "all_reduce" and across and PROTOCOLS[protocol] == "Simple":
        latency *= _PLATEAU
    return latency * MICROSECOND


def _bandwidth(kind: str, algorithm: str, protocol: int, message_bytes: float, topology: Topology) -> float:
    """Return the bytes of a message that are sent per second."""
    bus = _all_to_all_bandwidth(topology) if kind == ALL_TO_ALL else topology.bus_bandwidth
    name, single = PROTOCOLS[protocol], topology.num_nodes == 1
    slow = _LL_WITHIN.get(topology.capability, _LL_WITHIN[10]) if single else None
    slow = slow or _LL_ACROSS.get(topology.num_nodes, _LL_ACROSS_MORE)
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
    if kind in ("broadcast", MESSAGES, ALL_TO_ALL):
        return bus
    passes = 2 if kind == "all_reduce" else 1
    return bus * topology.size / (passes * (topology.size - 1))


def _all_to_all_bandwidth(topology: Topology) -> float:
    """Return the bytes per second of a rank's whole message.

    Its own part stays; those for its own node and those for others go at once, over NVLink and the rank's part of the
    network.
    """
    size, near = topology.size, topology.ranks_per_node
    within = topology.link_bandwidth * size / (near - 1) if near > 1 else math.inf
    across = topology.network_bandwidth / near * size / (size - near) if topology.num_nodes > 1 else math.inf
    return min(within, across)


def _correction(protocol: str, message_bytes: float) -> float:
    """Return the factor on a tree's bandwidth.

    Interpolate linearly between powers of two; NCCL uses the lower entry. With NCCL's table as it is, a larger message
    could take less time than a smaller one.
    """
    table = _TREE_CORRECTION[protocol]
    power = min(max(math.log2(max(message_bytes, 1) / 64), 0.0), len(table) - 1.0)
    low = math.floor(power)
    high = min(low + 1, len(table) - 1)
    return table[low] + (power - low) * (table[high] - table[low])
