"""Hardware as facts, each with its source and date. A value that is not documented is None."""

from __future__ import annotations

from fsdp_bench.spec.checked import CaseInsensitiveEnum, Checked, Count, Positive
from fsdp_bench.spec.errors import SpecError, not_allowed

_PEAK_DTYPES = ("fp32", "tf32", "bf16", "fp16")


class Source(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a fact was read."""

    title: str
    date: str
    """Year, month or day of the document (ISO 8601)."""
    note: str | None = None
    """What had to be derived, and how."""


class Gpu(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One GPU as torch sees one device."""

    name: str
    product_names: tuple[str, ...]
    """Exactly what NVML and torch.cuda.get_device_name report for it."""
    memory_gib: Positive
    """Nominal memory, as sold."""
    source: Source
    dense_flops_per_second: dict[str, Positive]
    """Peak FLOP/s without sparsity by dtype: bf16, fp16, tf32, fp32; a missing dtype is unknown or unsupported."""
    native_bf16: bool
    compute_capability: Positive | None = None
    """NVIDIA's number for the architecture: 8.0 is GA100, 9.0 Hopper. None for other vendors."""
    memory_bandwidth_bytes_per_second: Positive | None = None
    num_multiprocessors: Count | None = None
    """Streaming multiprocessors, or compute units."""
    matmul_efficiency: Positive | None = None
    """The part of the 16-bit peak that the best of large matrix products have, where it is published."""
    matmul_efficiency_source: Source | None = None
    sustained_clock: Positive | None = None
    """The fraction of the boost clock, which peaks refer to, that the power limit allows under long matrix products."""
    sustained_clock_source: Source | None = None
    nvml_total_bytes: Count | None = None
    """NVML's and nvidia-smi's total, which contains what the driver keeps for itself."""
    usable_memory_bytes: Count | None = None
    """What one process that is alone on the GPU can fill: torch.cuda.get_device_properties(0).total_memory, which is
    also the "total capacity" of torch's out-of-memory messages. Everything of the process must fit into it: what the
    caching allocator reserves, the CUDA context and NCCL's buffers. The latter two are not subtracted, because they
    depend on the CUDA version and on the communicators; a context that was measured is (see context_bytes)."""
    usable_memory_source: Source | None = None
    context_bytes: Count | None = None
    """What a process's CUDA context takes, where a calibration measured it; ``usable_memory_bytes`` is then without it.
    No catalogue has it."""

    def _check(self) -> None:
        for dtype in self.dense_flops_per_second:
            if dtype not in _PEAK_DTYPES:
                raise not_allowed("dense_flops_per_second", dtype, _PEAK_DTYPES)

    def peak_flops_per_second(self, dtype: str) -> float | None:
        """Dense peak for ``fp32``, ``bf16`` or ``fp16``, or None when it is not documented.

        torch computes float32 matrix products in float32 by default (torch.backends.cuda.matmul.allow_tf32 is
        False), so fp32 stands for the plain fp32 rate, not for tf32.

        Raises:
            SpecError: for a dtype that is not one of those.
        """
        if dtype not in _PEAK_DTYPES:
            raise not_allowed("dtype", dtype, _PEAK_DTYPES)
        return self.dense_flops_per_second.get(dtype)


class LinkKind(CaseInsensitiveEnum):
    """What GPUs or nodes are joined with. The topology that a cost of collectives needs follows from it."""

    NVSWITCH = "nvswitch"
    """Every GPU reaches every other at its full NVLink rate."""
    NVLINK_MESH = "nvlink-mesh"
    """NVLinks from GPU to GPU without a switch: a pair has only some of a GPU's links."""
    XGMI = "xgmi"
    """AMD's Infinity Fabric, GPU to GPU without a switch."""
    PCIE = "pcie"
    INFINIBAND = "infiniband"
    ROCE = "roce"
    EFA = "efa"
    """AWS's Elastic Fabric Adapter."""
    TCP = "tcp"
    """Ethernet without RDMA between nodes; Google's GPUDirect-TCPX and TCPXO among it."""

    @classmethod
    def field(cls) -> str:
        """The field in the catalogue's files."""
        return "kind"


class Interconnect(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A link of every GPU of a node: to the other GPUs, or to the host."""

    kind: LinkKind
    source: Source
    generation: str | None = None
    """For people: ``NVLink 4``, ``PCIe 4.0 x16``."""
    bandwidth_bytes_per_second: Positive | None = None
    """Nominal, per GPU and per direction: half of the bidirectional figure that vendors print."""
    gpus_per_uplink: Count | None = None
    """Of a host link: GPUs that share one uplink of that bandwidth, so that together they have it once. None where
    the wiring is not documented."""
    gpus_per_socket: Count | None = None
    """Of GPUs that PCIe joins: how many are attached to one processor. None where the wiring is not documented."""
    socket_bandwidth_bytes_per_second: Positive | None = None
    """Between two processors, per direction, as NCCL reckons with it for their kind (src/graph/topo.h)."""


class Network(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What joins one node to the other nodes."""

    kind: LinkKind
    source: Source
    generation: str | None = None
    num_nics: Count | None = None
    """Network interfaces that carry the GPUs' traffic; those for storage and management are not counted."""
    bandwidth_bytes_per_second: Positive | None = None
    """Nominal, per node and per direction: of all those interfaces together, as sold (3200 Gbps = 400e9)."""


class Server(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One machine with GPUs, bought or rented: a node of a cluster."""

    name: str
    provider: str
    gpu: str
    """The GPU's name in the catalogue."""
    gpus_per_node: Count
    source: Source
    """Of the GPUs, the host memory and the processors; the links have their own."""
    aliases: tuple[str, ...] = ()
    intra_node: Interconnect | None = None
    """Between the GPUs of a node."""
    host_link: Interconnect | None = None
    """Between a GPU and the host's memory."""
    inter_node: Network | None = None
    host_memory_bytes: Count | None = None
    """As documented for the machine; the operating system and the data loader live in it too."""
    num_vcpus: Count | None = None
    """Hardware threads that a rented machine shows."""
    num_cores: Count | None = None
    """Physical cores, where they are what is documented."""


class Cluster(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nodes of one kind, of which a training run uses the same number of GPUs each.

    Raises:
        SpecError: when the counts are not positive, a node has fewer GPUs, or the GPU is not the server's.
    """

    server: Server
    gpu: Gpu
    num_nodes: Count = 1
    gpus_per_node: Count
    """GPUs that are used on each node."""

    def _check(self) -> None:
        if self.gpus_per_node > self.server.gpus_per_node:
            has = self.server.gpus_per_node
            raise SpecError(f"gpus-per-node: {self.gpus_per_node} is not allowed; {self.server.name} has {has}")
        if self.gpu.name.lower() != self.server.gpu.lower():
            raise SpecError(f"gpu: {self.gpu.name} is not the GPU of {self.server.name}, which is {self.server.gpu}")

    @property
    def world_size(self) -> int:
        """GPUs of the whole run: one rank each."""
        return self.num_nodes * self.gpus_per_node

    @property
    def host_memory_bytes_per_rank(self) -> int | None:
        """A rank's share of its node's memory, or None when that is not documented."""
        total = self.server.host_memory_bytes
        return None if total is None else total // self.gpus_per_node
