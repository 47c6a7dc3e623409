"""How long the work of a step takes: the interface that replay/schedule.py uses, and a datasheet's answers.

Nothing here is fitted to a training run. A datasheet gives peaks. The fraction of a peak that the best kernels achieve
has its own source: ``matmul_efficiency`` in gpus.toml for matrix products (MATMUL_EFFICIENCY where that is absent), the
FlashAttention papers for attention. A calibration
(calibrated.py) replaces both with measurements on one machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from fsdp_bench.rates.collectives import Groups, Topology, collective_seconds
from fsdp_bench.simulate.events import Work
from fsdp_bench.spec.hardware import Cluster, Gpu
from fsdp_bench.spec.setup import TrainSetup


class Rates(Protocol):
    """How long one piece of work takes. Each method returns seconds, or None if they are unknown."""

    source: str
    """The source of the seconds: ``datasheet`` or ``calibrated``."""
    blocks_host: bool
    """Whether the host itself computes and communicates, one after the other: true for a CPU."""
    launch_seconds: float
    """Seconds in which the host launches one operator or collective."""

    def run(self, work: Work) -> float | None:
        """Return the seconds of an operator."""

    def collective(self, work: Work) -> float | None:
        """Return the seconds of a collective."""

    def copy(self, work: Work) -> float | None:
        """Return the seconds of a copy to or from the host."""

    def host(self, work: Work) -> float | None:
        """Return the seconds of work that the host itself does."""


MATMUL_EFFICIENCY = 0.8
"""Fraction of the peak, if gpus.toml has none for a GPU: the lower of the A100's 0.87 and the H100's 0.80."""
FP8_MATMUL_EFFICIENCY = 0.709
"""Fraction of the fp8 peak, if gpus.toml has none for a GPU: the H100's, the lowest that is known.

It is that of one scale a tensor, and is taken for scales of rows, too, of which no public figure was found. With
torchao's rowwise recipe only the products of forward have such scales: those of backward run without, and their result
is scaled by a kernel of its own (torchao/float8/float8_ops.py, addmm_float8_unwrapped)."""
SUSTAINED_CLOCK = 0.851
"""Fraction of the boost clock, if gpus.toml has none for a GPU: an A100's 1200 of 1410 MHz."""
MEMORY_EFFICIENCY = 0.91
"""Fraction of the nominal memory bandwidth: 1861 of 2039 GB/s on an H800 PCIe (arXiv 2501.12084)."""
LAUNCH_SECONDS = 6e-6
HOOK_SECONDS = 100e-6
"""Assumed time of a server's CPU for one operator in eager PyTorch, and for one of FSDP's hooks.

They matter for small models only. ``fsdp-bench calibrate`` measures both."""
COPY_EFFICIENCY = 0.8
"""Fraction of a host link's nominal bandwidth, with pinned memory: PCIe 4.0 x16 is known to give 25 of 32 GB/s."""
HOST_ADAM_BYTES_PER_SECOND = 10e9
"""Assumed part of a server's memory bandwidth that one process gets, for an optimizer in host memory."""

ATTENTION_EFFICIENCY = {8: (0.73, 0.63), 9: (0.374, 0.34)}
"""Fractions of the 16-bit peak, forward and backward, by major compute capability: FlashAttention-2, as in torch.

sm80: "up to 73 %" and "up to 63 %" of an A100's peak (FlashAttention-2, section 4 and figure 6); sm90: 370 of 989
TFLOP/s forward at head size 128 (FlashAttention-3, figure 5), "35 %" for both (its abstract)."""
_ATTENTION_TILE = 128
"""Rows of a tile. The kernel skips whole tiles above the diagonal."""
_TILES = ((128, 256), (256, 128), (128, 128))
"""Tile sizes of the fastest matrix products (NVIDIA, Matrix Multiplication Background User's Guide)."""


@dataclass(frozen=True)
class Datasheet:
    """Rates from a GPU's datasheet and NCCL's cost model."""

    gpu: Gpu
    dtype: str
    """The dtype of 16-bit work."""
    groups: Groups | None
    copy_bandwidth: float | None
    attention_efficiency: tuple[float, float] | None = None
    """Fractions of the peak, forward and backward, of another kernel than torch's."""
    source = "datasheet"
    blocks_host = False
    launch_seconds = LAUNCH_SECONDS

    @property
    def is_over_pcie(self) -> bool:
        """Whether any group communicates over PCIe within a node."""
        found = self.groups
        topologies = (found.shard, found.replicate, found.world, found.post_forward) if found else ()
        return any(one is not None and one.link == "pcie" and one.ranks_per_node > 1 for one in topologies)

    def run(self, work: Work) -> float | None:
        """Return the seconds of an operator by the roofline: the longer of computing and of moving the bytes."""
        moving = self._moving(work.num_bytes)
        if work.is_product:
            computing = self._product(work)
        elif work.is_attention:
            computing = self._attention(work)
        else:
            return moving
        return None if computing is None or moving is None else max(computing, moving)

    def _moving(self, num_bytes: int) -> float | None:
        bandwidth = self.gpu.memory_bandwidth_bytes_per_second
        return None if bandwidth is None else num_bytes / (bandwidth * MEMORY_EFFICIENCY)

    def _peak(self, itemsize: int) -> float | None:
        """Return the peak in FLOP/s at the clock that the power limit permits; datasheets assume the boost clock."""
        peak = self.gpu.peak_flops_per_second("fp32" if itemsize == 4 else self.dtype)
        return None if peak is None else peak * (self.gpu.sustained_clock or SUSTAINED_CLOCK)

    def _product(self, work: Work) -> float | None:
        if work.itemsize == 1:
            return self._float8_product(work)
        peak = self._peak(work.itemsize)
        if peak is None:
            return None
        m, n, k = work.dims
        flops_per_second = peak * (self.gpu.matmul_efficiency or MATMUL_EFFICIENCY)
        return 2 * m * n * k / (flops_per_second * tile_fraction(m, n, self.gpu.num_multiprocessors))

    def _float8_product(self, work: Work) -> float | None:
        """The efficiency was measured at the clock of long products, so no clock enters again."""
        peak = self.gpu.peak_flops_per_second("fp8")
        if peak is None:
            return None
        m, n, k = work.dims
        flops_per_second = peak * (self.gpu.fp8_matmul_efficiency or FP8_MATMUL_EFFICIENCY)
        return 2 * m * n * k / (flops_per_second * tile_fraction(m, n, self.gpu.num_multiprocessors))

    def _attention(self, work: Work) -> float | None:
        peak = self._peak(work.itemsize)
        efficiency = self.attention_efficiency or ATTENTION_EFFICIENCY.get(int(self.gpu.compute_capability or 0))
        if peak is None or efficiency is None:
            return None
        if work.itemsize == 4:  # CUTLASS's kernel, on the same units as matrix products in fp32
            efficiency = (MATMUL_EFFICIENCY, MATMUL_EFFICIENCY)
        return attention_flops(work.dims, work.is_backward) / (peak * efficiency[work.is_backward])

    def collective(self, work: Work) -> float | None:
        """Return the seconds of a collective by NCCL's cost model; None if its group's topology is not documented."""
        topology = topology_of(work.group, self.groups)
        return None if topology is None else collective_seconds(work.name, work.num_bytes, topology)

    def copy(self, work: Work) -> float | None:
        """Return the seconds of a copy over the host link."""
        return None if self.copy_bandwidth is None else work.num_bytes / self.copy_bandwidth

    def host(self, work: Work) -> float | None:
        """Return the seconds of a hook, or of an optimizer step in host memory."""
        if work.name.startswith("optimizer"):
            return work.num_bytes / HOST_ADAM_BYTES_PER_SECOND
        return HOOK_SECONDS


class RatesWithoutCommunication:
    """Rates of a rank without peers: a collective takes no time, except for copies within the rank's own memory."""

    def __init__(self, rates: Rates, setup: TrainSetup) -> None:
        self._ranks = setup.group_sizes
        self._rates = rates
        self.source, self.blocks_host, self.launch_seconds = rates.source, rates.blocks_host, rates.launch_seconds

    def run(self, work: Work) -> float | None:
        """Return the seconds of an operator."""
        return self._rates.run(work)

    def copy(self, work: Work) -> float | None:
        """Return the seconds of a copy to or from the host."""
        return self._rates.copy(work)

    def host(self, work: Work) -> float | None:
        """Return the seconds of work that the host itself does."""
        return self._rates.host(work)

    def collective(self, work: Work) -> float | None:
        """Return the seconds of the copies: all-gather repeats the own shard, reduce-scatter keeps the own part."""
        part = work.num_bytes // self._ranks[work.group]
        copied = {"all_gather": part + work.num_bytes, "reduce_scatter": 2 * part}.get(work.name)
        return 0.0 if copied is None else self.run(Work("aten::copy_", copied, itemsize=4))


def topology_of(group: str, groups: Groups | None) -> Topology | None:
    """Return the topology of a group, or None if it is unknown."""
    if groups is None:
        return None
    found: Topology | None = getattr(groups, group)
    return found


def tile_fraction(m: int, n: int, multiprocessors: int | None) -> float:
    """Return the fraction of a GPU that a matrix product uses: edge tiles and the last wave of tiles are not full."""
    if multiprocessors is None:
        return 1.0
    best = 0.0
    for rows, columns in _TILES:
        tiles = math.ceil(m / rows) * math.ceil(n / columns)
        slots = math.ceil(tiles / multiprocessors) * multiprocessors
        best = max(best, m * n / (slots * rows * columns))
    return best


def attention_flops(dims: tuple[int, ...], is_backward: bool) -> float:
    """Return the FLOPs of attention: for each tile two matrix products forward, five backward.

    Causal attention computes the tiles below the diagonal; any other, which says so, all of them.
    """
    batch, heads, _, length, head_dim, *rest = dims
    keys, is_causal = rest or (length, True)
    tiles, columns = math.ceil(length / _ATTENTION_TILE), math.ceil(keys / _ATTENTION_TILE)
    computed = (tiles * (tiles + 1) / 2 if is_causal else tiles * columns) * _ATTENTION_TILE**2
    products = 5 if is_backward else 2
    return 2 * products * batch * heads * head_dim * computed


def datasheet(cluster: Cluster | None, gpu: Gpu, setup: TrainSetup, groups: Groups | None) -> Datasheet:
    """Return the rates of a GPU in a cluster, or of the GPU alone."""
    link = cluster.server.host_link if cluster else None
    bandwidth = link.bandwidth_bytes_per_second if link else None
    if bandwidth is not None and link is not None:
        gpus_on_uplink = min(link.gpus_per_uplink or 1, cluster.gpus_per_node if cluster else 1)
        bandwidth *= COPY_EFFICIENCY / gpus_on_uplink
    return Datasheet(gpu=gpu, dtype=setup.precision.compute, groups=groups, copy_bandwidth=bandwidth)
