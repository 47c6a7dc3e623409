"""Parts of the GPU memory of one NCCL communicator, from NCCL's source: its creation, its channels and its connections.

communicators.py adds them up.

NCCL allocates with cuMemCreate, not through torch's caching allocator, and rounds every allocation up to granules of
2 MiB (ncclCuMemAlloc in src/include/alloc.h). The source was read in 2.29.2, 2.29.3 and 2.29.7 (src/channel.cc in an
older copy); PyTorch builds with 2.28.9 and 2.29.3. NCCL makes connections when an algorithm is first used
(NCCL_RUNTIME_CONNECT, src/init.cc).

Assumed: cuMem, as with every driver from CUDA 12 on; NCCL's defaults, except those that AWS's plugin changes; GPUDirect
RDMA over InfiniBand, RoCE and EFA; no network interfaces but those in the catalogue. Not covered: the code of NCCL's
kernels (part of the CUDA context), send and receive, buffers that users register, CollNet, tuner plugins.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_bench.spec.units import KIB, MIB

GRANULE = 2 * MIB
"""CU_MEM_ALLOC_GRANULARITY_MINIMUM of device memory, and CUDA_IPC_MIN of src/include/comm.h."""
MAX_CHANNELS = 64
"""MAXCHANNELS (src/include/device.h). The search finds at most 32 rings; NCCL then doubles them."""
SIMPLE = 4 * MIB
"""DEFAULT_BUFFSIZE (src/init.cc)."""
SIMPLE_OF_AWS = 8 * MIB
"""NCCL_BUFFSIZE as aws-ofi-nccl sets it on p4d, p5 and later (platform_data_map in its platform-aws source file)."""
MULTICAST_SLICE = 128 * KIB
"""NCCL_NVLS_CHUNKSIZE (src/transport/nvls.cc)."""
MULTICAST_SLICE_OF_AWS = 512 * KIB

_STEPS = 8
"""NCCL_STEPS: the number of slots in a buffer."""
_LL = 8 * 512 * _STEPS * 16
"""DEFAULT_LL_BUFFSIZE: lines per thread, threads, steps, sizeof(ncclLLFifoLine)."""
_LL128 = 120 * 640 * _STEPS * 8
"""DEFAULT_LL128_BUFFSIZE: elements per thread, threads, steps, sizeof(uint64_t)."""
_CONTROL = 4096
"""sizeof(ncclSendMem) and of ncclRecvMem: MEM_ALIGN (src/include/comm.h)."""
_PEER = 4 * 152
"""sizeof(ncclDevChannelPeer): four ncclConnInfo (src/include/device.h)."""

_SPEEDS = {
    8: (40, 30, 20, 18, 15, 12, 10, 9, 7, 6, 5, 4, 3),
    9: (60, 50, 40, 30, 24, 20, 15, 12, 11, 6, 3),
    10: (90, 80, 70, 60, 50, 45, 40, 30, 24, 20, 19, 18),
}
"""Speeds of a ring within a node that the search tries, in GB/s, by major compute capability (speedArrayIntra)."""
_MULTICAST_CHANNELS = {9: (16, 16), 10: (24, 32)}
"""Channels of NVLS within a node and across nodes, by major compute capability (NVLS_NCHANNELS_SM90 and others)."""


@dataclass(frozen=True)
class Bounds:
    """Lower and upper bound, inclusive."""

    low: int
    high: int

    def __post_init__(self) -> None:
        assert 0 <= self.low <= self.high

    def __add__(self, other: Bounds) -> Bounds:
        return Bounds(self.low + other.low, self.high + other.high)


@dataclass(frozen=True)
class Connections:
    """Bytes on one GPU of one channel's connection to a peer, by direction and link."""

    send: int
    """Bytes of a send connection over NVLink (p2pSendSetup, src/transport/p2p.cc).

    Includes the Simple buffer when the receiver reads from the sender's memory."""
    receive: int
    """Bytes of a receive connection over NVLink (p2pRecvSetup).

    Includes the LL and LL128 buffers, and the Simple buffer when the sender writes into it.
    """
    net_send: int
    """Bytes of a send connection over the network (sendProxyConnect, src/transport/net.cc), without the LL buffer."""
    net_receive: int
    """Bytes of a receive connection over the network."""

    @property
    def pair(self) -> int:
        """Bytes of a send and a receive connection over NVLink: the next and the previous rank of a ring."""
        return self.send + self.receive

    @property
    def net_pair(self) -> int:
        """Bytes of a send and a receive connection over the network."""
        return self.net_send + self.net_receive


def in_granules(num_bytes: int) -> int:
    """Round the size of an allocation up to whole granules."""
    return -(-num_bytes // GRANULE) * GRANULE


def connections(capability: float, simple_bytes: int = SIMPLE) -> Connections:
    """Return the bytes of connections.

    Over NVLink, GPUs of compute capability 8.0 read from the sender; all others write (ncclTopoCheckP2p).
    """
    at_sender, at_receiver = (simple_bytes, 0) if capability == 8.0 else (0, simple_bytes)
    return Connections(
        send=in_granules(_CONTROL + at_sender),
        receive=in_granules(_CONTROL + _LL + _LL128 + at_receiver),
        net_send=in_granules(_LL128 + simple_bytes),
        net_receive=in_granules(_LL + _LL128 + simple_bytes),
    )


def channels_within(link_bytes_per_second: float, major: int) -> int | None:
    """Return the number of channels between GPUs on one NVSwitch, or None for architectures without constants here.

    ncclTopoCompute (src/graph/search.cc) tries ring speeds from the fastest down to half of the best one, and keeps the
    candidate speed with the largest total bandwidth. Each ring uses up its speed of every GPU's links.
    ncclTopoDupChannels then splits fast rings in two, and ncclTopoPostset (src/graph/connect.cc) doubles all rings. The
    search for trees finds as many channels: a port of the search was run for 2, 4 and 8 GPUs of each architecture.

    Args:
        link_bytes_per_second: bandwidth of a GPU's links in one direction, as NCCL assumes it.
        major: major compute capability.
    """
    if major not in _SPEEDS:
        return None
    link = round(link_bytes_per_second / 1e9, 3)
    rings, best = 0, 0
    for speed in (speed for speed in _SPEEDS[major] if speed <= link):
        if (best and speed / best <= 0.49) or rings * best >= link:
            break
        found = min(int(link // speed), MAX_CHANNELS // 2)
        if found * speed > rings * best:
            rings, best = found, speed
    if best >= 25 and not (major > 8 and best < 50 and rings > 4):
        rings = min(2 * rings, MAX_CHANNELS // 2)
    return min(2 * rings, MAX_CHANNELS) or None


def channels_across(
    interfaces: int, interface_bytes_per_second: float, ranks_per_node: int, link_bytes_per_second: float
) -> Bounds | None:
    """Return the number of channels of a group of whole nodes, or of one rank per node.

    Each of the fastest rings that the search tries needs more than half of an interface, and slower rings have no
    larger total bandwidth. So there is one ring per interface, if NVLink can carry them all. A rank that is alone on
    its node uses the interfaces nearest to it, which share its PCIe link: it has one ring, which is split in two if
    PCIe reaches 25 GB/s (PCIe 4 does not). The same port of the search was run for one interface per GPU, for one per
    two GPUs, and for two interfaces on a switch with two GPUs.

    Args:
        interfaces: number of network devices that NCCL sees on a node.
        interface_bytes_per_second: nominal bandwidth of one device in one direction.
        ranks_per_node: ranks of the group on each node.
        link_bytes_per_second: bandwidth of a GPU's links in one direction, as NCCL assumes it.

    Returns:
        None if the number cannot be determined.
    """
    may_be_halved = interface_bytes_per_second > 25e9
    if ranks_per_node == 1:
        return Bounds(2, 4 if may_be_halved else 2)
    hops = (ranks_per_node - 1) / ranks_per_node
    if interfaces > ranks_per_node or interfaces * interface_bytes_per_second * hops > link_bytes_per_second:
        return None
    if may_be_halved and interfaces <= 4:
        return None
    return Bounds(2 * interfaces, 2 * interfaces)


def multicast_channels(major: int, ranks_per_node: int, num_nodes: int) -> int:
    """Return the number of channels of NVLink SHARP (NVLS); 0 for one GPU per node, and for GPUs before Hopper."""
    if major not in _MULTICAST_CHANNELS or ranks_per_node < 2:
        return 0
    within, across = _MULTICAST_CHANNELS[major]
    return within if num_nodes == 1 else across


def multicast_buffers(channels: int, ranks_per_node: int, slice_bytes: int = MULTICAST_SLICE) -> int:
    """Return the bytes that NVLS allocates at the first all-reduce: one NVLS head per GPU (ncclNvlsBufferSetup)."""
    return in_granules(channels * 2 * slice_bytes * _STEPS * ranks_per_node)


def at_start(num_ranks: int, ranks_per_node: int, channels: int, multicast: int = 0) -> int:
    """Return the bytes of a communicator before any peer connection.

    devCommSetup (src/init.cc) makes two allocations. initChannel (src/channel.cc) makes three per channel: the peers,
    pointers to them, and the order of the ring. It is called for as many channels as send and receive may use, which is
    the next power of two (ncclTopoComputeP2pChannels, src/graph/paths.cc). ncclNvlsSetup makes one per NVLS channel,
    and one for the credits.
    """
    created = 1 << (channels - 1).bit_length()
    each = (
        in_granules(num_ranks * _PEER)
        + in_granules((num_ranks + 1 + ranks_per_node) * 8)
        + in_granules(num_ranks * 4)
    )  # fmt: skip
    start = 2 * GRANULE + max(created, multicast) * each
    if multicast:
        start += multicast * in_granules(ranks_per_node * _PEER) + in_granules(multicast * 2 * 64 * ranks_per_node)
    return start
