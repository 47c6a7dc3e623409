"""GPU memory of one NCCL communicator, from NCCL's source: channels, connections, and what is allocated at its start.

NCCL allocates with cuMemCreate, not through torch's caching allocator, and every allocation, however small, is whole
granules of 2 MiB (ncclCuMemAlloc in src/include/alloc.h). Read in 2.29.2, 2.29.3 and 2.29.7 (src/channel.cc in an older
copy); PyTorch builds with 2.28.9 and 2.29.3. Connections are made when an algorithm is first used
(NCCL_RUNTIME_CONNECT, src/init.cc).

Assumed: cuMem as on every driver from CUDA 12 on; NCCL's defaults, but for what AWS's plugin sets; GPUDirect RDMA over
InfiniBand, RoCE and EFA; no other interfaces than the catalogue counts. Not covered: the code of NCCL's kernels (part
of the CUDA context), send and receive, buffers that users register, CollNet, tuner plugins.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_bench.spec.units import KIB, MIB

GRANULE = 2 * MIB
"""CU_MEM_ALLOC_GRANULARITY_MINIMUM of device memory, and CUDA_IPC_MIN of src/include/comm.h."""
MAX_CHANNELS = 64
"""MAXCHANNELS (src/include/device.h); the search for rings stops at half, because they are doubled after it."""
SIMPLE = 4 * MIB
"""DEFAULT_BUFFSIZE (src/init.cc)."""
SIMPLE_OF_AWS = 8 * MIB
"""NCCL_BUFFSIZE as aws-ofi-nccl sets it on p4d, p5 and later (platform_data_map in its platform-aws source file)."""
MULTICAST_SLICE = 128 * KIB
"""NCCL_NVLS_CHUNKSIZE (src/transport/nvls.cc)."""
MULTICAST_SLICE_OF_AWS = 512 * KIB

_STEPS = 8
"""NCCL_STEPS: slots of a buffer."""
_LL = 8 * 512 * _STEPS * 16
"""DEFAULT_LL_BUFFSIZE: lines a thread, threads, steps, sizeof(ncclLLFifoLine)."""
_LL128 = 120 * 640 * _STEPS * 8
"""DEFAULT_LL128_BUFFSIZE: elements a thread, threads, steps, sizeof(uint64_t)."""
_CONTROL = 4096
"""sizeof(ncclSendMem) and of ncclRecvMem: MEM_ALIGN (src/include/comm.h)."""
_PEER = 4 * 152
"""sizeof(ncclDevChannelPeer): four ncclConnInfo (src/include/device.h)."""

_SPEEDS = {
    8: (40, 30, 20, 18, 15, 12, 10, 9, 7, 6, 5, 4, 3),
    9: (60, 50, 40, 30, 24, 20, 15, 12, 11, 6, 3),
    10: (90, 80, 70, 60, 50, 45, 40, 30, 24, 20, 19, 18),
}
"""GB/s of a ring that the search tries in a node, by major compute capability (speedArrayIntra and its siblings)."""
_MULTICAST_CHANNELS = {9: (16, 16), 10: (24, 32)}
"""NVLS_NCHANNELS_SM90 and siblings (src/transport/nvls.cc): within a node, across nodes."""


@dataclass(frozen=True)
class Bounds:
    """A whole number between two others, both possible."""

    low: int
    high: int

    def __post_init__(self) -> None:
        assert 0 <= self.low <= self.high

    def __add__(self, other: Bounds) -> Bounds:
        return Bounds(self.low + other.low, self.high + other.high)


@dataclass(frozen=True)
class Connections:
    """Bytes on one GPU for one connection of one channel, in each direction."""

    send: int
    """Over NVLink: control, and Simple's buffer where the receiver reads it (p2pSendSetup, src/transport/p2p.cc)."""
    receive: int
    """Over NVLink: control and the other buffers (p2pRecvSetup)."""
    net_send: int
    """Over the network: LL is on the host (sendProxyConnect, src/transport/net.cc)."""
    net_receive: int

    @property
    def pair(self) -> int:
        """One neighbour to send to and one to receive from, as each channel of a ring has them."""
        return self.send + self.receive

    @property
    def net_pair(self) -> int:
        """The same over the network."""
        return self.net_send + self.net_receive


def in_granules(num_bytes: int) -> int:
    """Return what an allocation really takes."""
    return -(-num_bytes // GRANULE) * GRANULE


def connections(capability: float, simple_bytes: int = SIMPLE) -> Connections:
    """Return the bytes of connections; GPUs of 8.0 read over NVLink, others write (ncclTopoCheckP2p)."""
    at_sender, at_receiver = (simple_bytes, 0) if capability == 8.0 else (0, simple_bytes)
    return Connections(
        send=in_granules(_CONTROL + at_sender),
        receive=in_granules(_CONTROL + _LL + _LL128 + at_receiver),
        net_send=in_granules(_LL128 + simple_bytes),
        net_receive=in_granules(_LL + _LL128 + simple_bytes),
    )


def channels_within(link_bytes_per_second: float, major: int) -> int | None:
    """Return the channels of GPUs behind one NVSwitch; None for architectures without figures here.

    ncclTopoCompute (src/graph/search.cc) keeps what carries most of its tries, fastest rings first, down to half the
    speed of the best; each ring takes its speed of every GPU's links. ncclTopoDupChannels then halves fast rings, and
    ncclTopoPostset (src/graph/connect.cc) doubles all. That trees find as many was checked with a port of the search,
    for 2, 4 and 8 GPUs of each architecture.

    Args:
        link_bytes_per_second: of a GPU's links in one direction, as NCCL reckons with them.
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
    """Return the channels of a group of whole nodes, or of one rank a node; None where they do not follow.

    The fastest rings that the search tries take more than half of an interface each, and slower ones carry no more
    together; so one ring goes over each interface, if the NVLinks carry them all. A rank that is alone on its node
    has the interfaces next to it, which share its PCIe lanes: one ring, halved in two where the lanes reach 25 GB/s
    and more, which those of PCIe 4 do not. Checked with the same port, for one interface to a GPU and to two GPUs, and
    for two on a switch with two GPUs.

    Args:
        interfaces: network devices that NCCL sees on a node.
        interface_bytes_per_second: nominal, of one of them in one direction.
        ranks_per_node: of the group.
        link_bytes_per_second: of a GPU's links in one direction, as NCCL reckons with them.
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
    """Return the channels that NVLink SHARP (NVLS) gets at the start; 0 for one GPU a node, and before Hopper."""
    if major not in _MULTICAST_CHANNELS or ranks_per_node < 2:
        return 0
    within, across = _MULTICAST_CHANNELS[major]
    return within if num_nodes == 1 else across


def multicast_buffers(channels: int, ranks_per_node: int, slice_bytes: int = MULTICAST_SLICE) -> int:
    """Return the bytes that NVLS takes when an all-reduce first uses it (ncclNvlsBufferSetup): a head for each GPU."""
    return in_granules(channels * 2 * slice_bytes * _STEPS * ranks_per_node)


def at_start(num_ranks: int, ranks_per_node: int, channels: int, multicast: int = 0) -> int:
    """Return the bytes of a communicator that is connected to nobody yet.

    devCommSetup (src/init.cc) has two allocations; initChannel (src/channel.cc) three a channel: peers, pointers to
    them, the order of the ring; ncclNvlsSetup one a channel and its credits.
    """
    each = (
        in_granules(num_ranks * _PEER)
        + in_granules((num_ranks + 1 + ranks_per_node) * 8)
        + in_granules(num_ranks * 4)
    )  # fmt: skip
    start = 2 * GRANULE + max(channels, multicast) * each
    if multicast:
        start += multicast * in_granules(ranks_per_node * _PEER) + in_granules(multicast * 2 * 64 * ranks_per_node)
    return start
