"""The number of a process group's NCCL channels: each is one thread block, and occupies a multiprocessor."""

from __future__ import annotations

from fsdp_bench.rates import nccl_buffers as nccl
from fsdp_bench.rates.collectives import Topology
from fsdp_bench.rates.nccl_buffers import Bounds
from fsdp_bench.spec.hardware import Hardware, LinkKind, Network


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
