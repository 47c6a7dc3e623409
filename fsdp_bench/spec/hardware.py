"""Gpu, Server, Hardware and their links: facts with their source and date. A value that is not documented is None."""

from __future__ import annotations

import datetime
import re
from typing import Annotated

import msgspec
from msgspec import Meta

from fsdp_bench.spec.checked import CaseInsensitiveEnum, Checked, Count, Positive, Rate
from fsdp_bench.spec.errors import SpecError, not_allowed, shown
from fsdp_bench.spec.units import parse_watts

Efficiency = Annotated[float, Meta(ge=0.001, le=1)]
"""A fraction of a peak."""
Capability = Annotated[float, Meta(ge=1, le=99)]
Multiprocessors = Annotated[int, Meta(ge=1, le=100_000)]

FIRST_WITH_FLASH_ATTENTION = 8.0
"""The compute capability from which on torch has FlashAttention."""

_PEAK_DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8")


class Source(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The source of a fact."""

    title: str
    date: str
    """Date of the document: year, month or day (ISO 8601)."""
    note: str | None = None
    """The values that are derived, and how."""

    def age_days(self, today: datetime.date) -> int | None:
        """Return how old the source is. None if it names no day."""
        try:
            return (today - datetime.date.fromisoformat(self.date)).days
        except ValueError:
            return None


def cuda_version(text: str) -> tuple[int, int]:
    """Return major and minor number of a version of CUDA.

    Raises SpecError for anything else than two numbers, as in ``12.1``.
    """
    found = re.fullmatch(r"(\d{1,2})\.(\d{1,2})", text.strip())
    if found is None:
        raise SpecError(f"cuda: {shown(text)} is no version of CUDA; two numbers, as torch.version.cuda has them: 12.1")
    return int(found[1]), int(found[2])


class OlderCublas(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rate of matrix products with a cuBLAS older than a version of CUDA."""

    before_cuda: str
    """The first version of CUDA to which this no longer applies: ``12.5``."""
    matmul_efficiency: Efficiency
    source: Source

    def _check(self) -> None:
        cuda_version(self.before_cuda)


class ClockUnderPower(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The clock of large matrix products with random numbers at a power limit, from which other limits follow."""

    limit_watts: Positive
    matmul_efficiency: Efficiency
    """The fraction of the 16-bit peak at this limit."""
    clock_mhz: Positive
    """The SM clock at which they run."""
    static_watts: Positive
    """The power that does not fall with the clock."""
    voltage: tuple[tuple[Positive, Positive], ...]
    """Clocks in MHz, in increasing order, each with its voltage in any unit. It is constant below the first, and linear
    between two; the last is the highest clock."""
    source: Source

    def _check(self) -> None:
        clocks = [clock for clock, _ in self.voltage]
        if not clocks or clocks != sorted(set(clocks)) or self.clock_mhz > clocks[-1]:
            raise SpecError("voltage: clocks in increasing order, of which the last is not below clock_mhz")
        if self.static_watts >= self.limit_watts:
            raise SpecError(f"static_watts: {self.static_watts:g} is not allowed; less than limit_watts")


class PowerLimits(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The power limits of a GPU, as nvidia-smi -q -d POWER names them."""

    default_watts: Positive
    lowest_watts: Positive | None = None
    highest_watts: Positive | None = None
    """None: the default."""
    source: Source
    clock: ClockUnderPower | None = None
    """None where it is not known how much a lower limit slows down the GPU."""


class StatedPower(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The power limit of each GPU of a server, where a document or nvidia-smi's output there says it."""

    watts: Positive
    source: Source


class Gpu(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One GPU: one CUDA device in torch."""

    name: str
    product_names: tuple[str, ...]
    """The names that NVML and torch.cuda.get_device_name report, exactly."""
    memory_gib: Positive
    """Nominal memory, as sold."""
    source: Source
    dense_flops_per_second: dict[str, Rate]
    """Peak FLOP/s without sparsity by dtype: fp8, bf16, fp16, tf32, fp32. A missing dtype is unknown or unsupported."""
    native_bf16: bool
    compute_capability: Capability | None = None
    """NVIDIA's number for the architecture: 8.0 is GA100, 9.0 Hopper. None for other vendors."""
    memory_bandwidth_bytes_per_second: Rate | None = None
    num_multiprocessors: Multiprocessors | None = None
    """Streaming multiprocessors, or compute units."""
    l2_cache_mib: Count | None = None
    """The L2 cache: torch.cuda.get_device_properties(0).L2_cache_size. Inductor allocates as much while it tunes."""
    matmul_efficiency: Efficiency | None = None
    """The fraction of the 16-bit peak that large matrix products of whole waves of tiles reach with random numbers
    under the power limit, if it is published."""
    matmul_efficiency_source: Source | None = None
    older_cublas: OlderCublas | None = None
    """The same with an older cuBLAS, where that is published and differs."""
    cuda: str | None = None
    """The version of CUDA of the torch in use, ``12.1``; None for a recent one. Never in the built-in catalogue."""
    power: PowerLimits | None = None
    power_limit_watts: Positive | None = None
    """The power limit in force; None for the default. Never in the built-in catalogue."""
    power_limit_source: Source | None = None
    fp8_matmul_efficiency: Efficiency | None = None
    """The fraction of the fp8 peak that the fastest large matrix products reach, at the clock that they run at."""
    fp8_matmul_efficiency_source: Source | None = None
    nvml_total_bytes: Count | None = None
    """Total memory in NVML and nvidia-smi, which includes memory that the driver reserves."""
    usable_memory_bytes: Count | None = None
    """Memory that one process, alone on the GPU, can use: torch.cuda.get_device_properties(0).total_memory, which is
    also the "total capacity" in torch's out-of-memory messages. It must hold all memory of the process: reserved memory
    of the caching allocator, the CUDA context and NCCL's buffers. The latter two are not subtracted, because they
    depend on the CUDA version and on the communicators. Only a measured context is subtracted (see context_bytes)."""
    usable_memory_source: Source | None = None
    context_bytes: Count | None = None
    """Memory of the CUDA context, if a calibration measured it; it is then subtracted from ``usable_memory_bytes``.
    It is never in the built-in catalogue."""

    def _check(self) -> None:
        for dtype in self.dense_flops_per_second:
            if dtype not in _PEAK_DTYPES:
                raise not_allowed("dense_flops_per_second", dtype, _PEAK_DTYPES)
        if self.cuda is not None:
            cuda_version(self.cuda)

    def with_cuda(self, version: str) -> Gpu:
        """Return the GPU with the cuBLAS and cuDNN of a CUDA version, such as ``12.1``. Raises SpecError."""
        cuda, older = cuda_version(version), self.older_cublas
        found = msgspec.structs.replace(self, cuda=version.strip())
        if older is None or cuda >= cuda_version(older.before_cuda):
            return found
        return msgspec.structs.replace(
            found, matmul_efficiency=older.matmul_efficiency, matmul_efficiency_source=older.source
        )

    def under_power(self, limit: str | float, source: Source | None = None) -> Gpu:
        """Return the GPU under a power limit, ``"500W"`` or watts, which decides its rates (rates/power.py).

        ``source``: by default the user. Raises SpecError for a limit that it cannot have, or whose effect is unknown.
        """
        watts, power = parse_watts(limit, "power"), self.power
        if power is None:
            raise SpecError(f"power: {watts:g} W is not allowed; the default limit of {self.name} is not known")
        low, high = power.lowest_watts or 0, power.highest_watts or power.default_watts
        if not low <= watts <= high:
            least = f"{low:g} to" if low else "up to"
            raise SpecError(f"power: {watts:g} W is not allowed; {least} {high:g} W on {self.name}")
        if power.clock is None and watts != power.default_watts:
            default = f"its default of {power.default_watts:g} W"
            raise SpecError(f"power: {watts:g} W is not allowed; how slow {self.name} is below {default} is not known")
        source = source or Source(title="as stated, --power", date="")
        return msgspec.structs.replace(self, power_limit_watts=watts, power_limit_source=source)

    @property
    def limit_watts(self) -> float | None:
        """The power limit in force: as stated, else the default. None if neither is known."""
        return self.power_limit_watts or (self.power.default_watts if self.power else None)

    @property
    def is_before_sm80(self) -> bool:
        """Whether it is NVIDIA's and older than the A100: V100 and T4.

        torch has no FlashAttention for it, and its memory-efficient attention is not for bf16
        (aten/native/transformers/cuda/sdp_utils.cpp).
        """
        return self.compute_capability is not None and self.compute_capability < FIRST_WITH_FLASH_ATTENTION

    def lacks_flash_attention(self, compute: str) -> bool:
        """Whether attention in a compute dtype would be FlashAttention on newer GPUs, and is not on this one."""
        return self.is_before_sm80 and compute != "fp32"

    @property
    def has_older_cublas(self) -> bool:
        """Whether its matrix products are those of the older cuBLAS."""
        return self.older_cublas is not None and self.matmul_efficiency_source == self.older_cublas.source

    @property
    def clock_hertz(self) -> float | None:
        """The clock of the documented fp32 peak. None where the peak or the multiprocessors are not documented.

        A multiprocessor starts 64 multiply-adds a clock before compute capability 8.6, then 128 (CUDA C++ Programming
        Guide, Throughput of Native Arithmetic Instructions).
        """
        peak, multiprocessors = self.dense_flops_per_second.get("fp32"), self.num_multiprocessors
        if peak is None or multiprocessors is None or self.compute_capability is None:
            return None
        return peak / (2 * (64 if self.compute_capability < 8.6 else 128) * multiprocessors)

    def peak_flops_per_second(self, dtype: str) -> float | None:
        """Return the dense peak of ``fp32``, ``bf16``, ``fp16`` or ``fp8``; None if it is not documented.

        fp32 is not tf32: torch.backends.cuda.matmul.allow_tf32 is False by default. Raises SpecError for other dtypes.
        """
        if dtype not in _PEAK_DTYPES:
            raise not_allowed("dtype", dtype, _PEAK_DTYPES)
        return self.dense_flops_per_second.get(dtype)


class LinkKind(CaseInsensitiveEnum, field="kind"):
    """The kind of link between GPUs or nodes. It determines the topology for the cost of collectives."""

    NVSWITCH = "nvswitch"
    """Every GPU reaches every other GPU at its full NVLink rate."""
    NVLINK_MESH = "nvlink-mesh"
    """NVLinks from GPU to GPU without a switch: each pair has only some of a GPU's links."""
    XGMI = "xgmi"
    """AMD's Infinity Fabric, GPU to GPU without a switch."""
    PCIE = "pcie"
    INFINIBAND = "infiniband"
    ROCE = "roce"
    EFA = "efa"
    """AWS's Elastic Fabric Adapter."""
    TCP = "tcp"
    """Ethernet without RDMA between nodes, including Google's GPUDirect-TCPX and TCPXO."""


class Interconnect(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The link of each GPU of a node to the other GPUs, or to the host."""

    kind: LinkKind
    source: Source
    generation: str | None = None
    """The generation as text: ``NVLink 4``, ``PCIe 4.0 x16``."""
    bandwidth_bytes_per_second: Rate | None = None
    """Nominal bandwidth per GPU and direction: half of the bidirectional figure that vendors print."""
    gpus_per_uplink: Count | None = None
    """Number of GPUs that share one uplink of this bandwidth, for a host link. None if that is not documented."""
    gpus_per_socket: Count | None = None
    """Number of GPUs per CPU socket, for GPUs connected by PCIe. None if that is not documented."""
    socket_bandwidth_bytes_per_second: Rate | None = None
    """Bandwidth between two CPU sockets per direction, as NCCL assumes for the kind of CPU (src/graph/topo.h). Where it
    or ``gpus_per_socket`` is None, it is taken to be no slower than the GPUs' links."""


class Network(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The network between nodes."""

    kind: LinkKind
    source: Source
    generation: str | None = None
    num_nics: Count | None = None
    """Number of network interfaces for the GPUs' traffic, without those for storage and management."""
    bandwidth_bytes_per_second: Rate | None = None
    """Nominal bandwidth per node and direction of all these interfaces together (3200 Gbps = 400e9)."""


class Server(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A machine with GPUs, bought or rented: a node of a cluster."""

    name: str
    provider: str
    gpu: str
    gpus_per_node: Count
    source: Source
    """The source for GPUs, host memory and CPUs. Links have sources of their own."""
    aliases: tuple[str, ...] = ()
    intra_node: Interconnect | None = None
    host_link: Interconnect | None = None
    inter_node: Network | None = None
    host_memory_bytes: Count | None = None
    """Host memory of the machine. The operating system and the data loader use part of it."""
    power_watts: Positive | None = None
    """The most electric power that the machine takes, as its maker states it."""
    gpu_power: StatedPower | None = None
    """The power limit of each GPU. None if that is not documented: then the GPU's default is assumed."""
    num_vcpus: Count | None = None
    """Hardware threads, as cloud providers count."""
    num_cores: Count | None = None
    """Physical cores, if these are documented instead."""


class Hardware(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nodes of one kind, with the same number of GPUs used on each; ``of_gpu`` makes one of a GPU alone.

    Raises:
        SpecError: if a count is not positive, a node has fewer GPUs, or the GPU is not the server's.
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

    @classmethod
    def of_gpu(cls, gpu: Gpu) -> Hardware:
        """Return one node of one GPU, without known links or host memory. A run has one for each rank."""
        server = Server(name="", provider="", gpu=gpu.name, gpus_per_node=1, source=gpu.source)
        return cls(server=server, gpu=gpu, gpus_per_node=1)

    @property
    def has_server(self) -> bool:
        """Whether a server is named, and not a GPU alone."""
        return bool(self.server.name)

    @property
    def name(self) -> str:
        """The server's name, or that of a GPU alone."""
        return self.server.name or self.gpu.name

    @property
    def world_size(self) -> int:
        """Number of GPUs of all nodes, one rank each."""
        return self.num_nodes * self.gpus_per_node

    def holds(self, world_size: int) -> bool:
        """Whether a run of so many ranks has exactly these GPUs; always without a server."""
        return not self.has_server or self.world_size == world_size

    def ranks_per_node(self, world_size: int) -> int:
        """Return the ranks on each node; without a server they are all taken to be on one."""
        return self.gpus_per_node if self.has_server else world_size

    def count(self, world_size: int) -> int:
        """Return how many of what ``name`` names a run has: nodes, or GPUs, one for each rank."""
        return self.num_nodes if self.has_server else world_size
