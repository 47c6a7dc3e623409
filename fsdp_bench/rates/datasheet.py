"""The time of a step's work: the interface that replay/schedule.py uses, and a datasheet's answers.

Nothing here is fitted to a training run. A datasheet gives peaks. The fraction of a peak that kernels reach has its own
source: ``matmul_efficiency`` in gpus.toml for matrix products, attention.toml for attention, the constants below for
what moves bytes. They are fractions that a GPU reaches at its power limit: no clock is multiplied with them. A
calibration (calibrated.py) replaces them with measurements on one machine.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Protocol

from fsdp_bench.rates.attention_time import FLASH_ATTENTION_2, MEMORY_EFFICIENT, attention_seconds, kernel_of
from fsdp_bench.rates.collectives import ALL_TO_ALL, Groups, Topology, collective_seconds, groups_of
from fsdp_bench.rates.communicators import channels_of
from fsdp_bench.rates.power import efficiency_under_power
from fsdp_bench.simulate.events import FAST_ACCUMULATION, SCALES_OF_ROWS, Work
from fsdp_bench.spec.hardware import Gpu, Hardware
from fsdp_bench.spec.pointwise import CASTING, STRIDED
from fsdp_bench.spec.setup import TrainSetup

SPREAD = 0.05 / 2.85
"""Standard deviation of the rate of matrix products among GPUs of one product.

"5%+ MAMF spread between GPUs" on one node of eight (stas00/ml-engineering, compute/accelerator/README.md, Silicon
lottery); the range of eight normal numbers is 2.85 standard deviations. It agrees with an "average performance
variation of 8% across GPUs" of whole clusters (arXiv 2208.11035): the range of a hundred is 5.0 standard deviations."""


def slowest_of(num_gpus: int) -> float:
    """Return the expected rate of the slowest of some GPUs, by the average GPU's (Blom's approximation)."""
    if num_gpus < 2:
        return 1.0
    return 1.0 - SPREAD * NormalDist().inv_cdf((num_gpus - 0.375) / (num_gpus + 0.25))


class Rates(Protocol):
    """The time of one piece of work. Each method returns seconds, or None if they are unknown."""

    source: str
    """The source of the seconds: ``datasheet`` or ``calibrated``."""
    blocks_host: bool
    """Whether the host itself computes and communicates, one after the other: true for a CPU."""
    launch_seconds: float
    """Seconds in which the host launches one operator or collective."""

    def run(self, work: Work, beside: tuple[Work, ...] = ()) -> float | None:
        """Return the seconds of an operator while the collectives ``beside`` it run all the time."""

    def collective(self, work: Work) -> float | None:
        """Return the seconds of a collective."""

    def copy(self, work: Work) -> float | None:
        """Return the seconds of a copy to or from the host."""

    def host(self, work: Work) -> float | None:
        """Return the seconds of work that the host itself does."""


MATMUL_EFFICIENCY = 0.75
"""Fraction of the 16-bit peak, if gpus.toml has none for a GPU: the H100's, which is lower than the A100's."""
FP32_EFFICIENCY = 0.775
"""Fraction of the fp32 peak: 51.9 of 66.9 TFLOP/s at 4096 and 8192 on an H100 with torch 2.7
(zzc0721/torch-performance-test-data issue 79, 2025-10)."""
FP8_MATMUL_EFFICIENCY = 0.709
"""Fraction of the fp8 peak, if gpus.toml has none for a GPU: the H100's, the lowest that is known."""
FP8_ACCUMULATION = {"": 0.97, FAST_ACCUMULATION: 1.0, FAST_ACCUMULATION + SCALES_OF_ROWS: 1.01}
"""The rate of products by their layout, by the GPU's: with fp32 accumulation, without, and without with scales of rows.

Medians of 0.687, 0.714 and 0.718 of the peak, over whole waves of tiles, for 18 shapes of Llama-3.1-8B with random
numbers on an H100 of 700 W, torch 2.11 (results/nvidia-h100). torchao computes forward's products without fp32
accumulation and backward's with it; backward's have one scale a tensor in both recipes, and with ``rowwise`` their
result is scaled by a kernel of its own (torchao/float8/float8_ops.py, addmm_float8_unwrapped)."""
MEMORY_EFFICIENCY = 0.896
"""Fraction of the nominal memory bandwidth: torch.clone of 1 GiB in bf16 on an H100, 3003 of 3350 GB/s
(Dao-AILab/quack, AI/hadamard_roofline_analysis.md, 2025)."""
LISTS_EFFICIENCY = {"aten::_foreach_": 0.80, "optimizer adamw-foreach": 0.80, "optimizer sgd": 0.80}
"""The same of operators on lists of tensors (multi_tensor_apply), by the beginning of their names: 0.75 to 0.81 for
eight operators on 32 tensors of 16 million numbers on an H100 (results/nvidia-h100/rates.json)."""
FUSED_EFFICIENCY = {"aten::_fused_adam": 0.74, "optimizer adamw-fused": 0.74}
"""The same of fused AdamW, on the same tensors."""
ELEMENTS_PER_CLOCK = {
    STRIDED: 1.7,
    CASTING: 1.55,
    f"{STRIDED} {CASTING}": 0.8,
    f"aten::cat {STRIDED}": 1.1,
    "aten::sum": 4.2,
    "aten::embedding_dense_backward": 0.2,
}
"""Elements that a multiprocessor computes each clock, where computing places or casting takes longer than loading.

By the kernel's path (spec/pointwise.py) or the operator: medians of 34 operators of 33 million elements on an H100
(results/nvidia-h100/rates.json), after the time of their bytes, with which this adds up as a root of squares. On an
H200, whose multiprocessors are the same and whose memory is 1.43 times as fast, strided operators then differ by 2.5 %
(median), casts by 10 and norms by 12 (tests/rates/test_measured_kernels.py). On other generations they are assumed."""
NORM_BYTES_PER_CLOCK = 11.0
"""Bytes that a multiprocessor moves each clock in torch's own norms: the same measurements, forward and backward."""
SOFTMAX_PASSES = 2
"""Passes of log_softmax over its bytes: it reads each row three times and writes once (cunn_SoftMaxForward in
aten/native/cuda/SoftMax.cu; 5.3 ps an element of fp32 on that H100, which are 16 bytes)."""
KERNEL_SECONDS = 1.8e-6
"""The least time of a kernel on the GPU, one after another: rsqrt of 2,048 numbers, on an H100 and an H200 alike
(results/nvidia-h200/kernel_times.json). Steps of scripts that kept the GPU busy took 1.5 to 3.3 us a kernel more than
their kernels alone (results/nvidia-h100/scripts/measured.json)."""
QUANTIZATION_EFFICIENCY = {"maximum": 0.69, "maximum and cast": 0.60, "transposed": 0.61}
"""Fractions of the bandwidth of Inductor's kernels around products in float8.

Bytes over seconds of all such kernels of Llama-3.1-8B's blocks, 8192 tokens, in the profiles of one step in each recipe
on an H100 of 700 W (results/nvidia-h100). What casts and does not transpose had 0.95, and is taken to reach
MEMORY_EFFICIENCY."""
SCALING_BYTES_PER_CLOCK = {"transposed": 6.5, "result": 2.8}
"""Bytes that a multiprocessor moves each clock in kernels of ``rowwise`` that compute a scale for every element, in
fp64 (amax_to_scale in torchao/float8/float8_utils.py): the same measurements, less the time of their bytes."""
LAUNCH_SECONDS = 7e-6
"""Time of a server's CPU for one operator in eager PyTorch: the overhead of a launch with an H100
(meta-pytorch/autoparallel pull request 146, 2025). Inductor's kernels take 6.8 to 9.1 us on a Grace CPU
(meta-pytorch/tritonbench pull request 1017, 2026). It decides small models; ``fsdp-bench calibrate`` measures it."""
HOOK_SECONDS = 100e-6
"""Assumed time of a server's CPU for one of FSDP's hooks; ``fsdp-bench calibrate`` measures it, too."""
COPY_EFFICIENCY = 0.8
"""Fraction of a host link's nominal bandwidth, with pinned memory: PCIe 4.0 x16 is known to give 25 of 32 GB/s."""
SMALL_COPY_BYTES = 1 << 20
"""A copy of so much takes 0.16 ms on the slowest host link in servers.toml, which is assumed where none is known."""
ASSUMED_HOST_LINK = 6.4e9
"""Bytes per second of that link: of PCIe 3.0 x16 80 %, for each of two GPUs."""
HOST_ADAM_BYTES_PER_SECOND = 23e9
"""Bytes per second of an optimizer in host memory, of one process with one thread, as torchrun starts them: AdamW of
FSDP2's offloaded parameters takes 1.93 s for 537 million elements, 84 bytes each, on a server with 8 H100
(ISEEKYAN/Megatron-LM issue 188, 2026). The rate of each of eight processes at once is not known."""

MEMORY_TRAFFIC = {"all_gather": 3, "reduce_scatter": 3, "all_reduce": 6, "broadcast": 3, ALL_TO_ALL: 4}
"""Bytes that a GPU's memory reads and writes for each byte of a collective's message.

A ring passes every byte through a buffer: it is written there, read, and written again (all-gather) or read with the
GPU's own part (reduce-scatter); an all-reduce does both (NCCL, src/device/prims_simple.h). An all-to-all also reads
every byte from its input."""
ASSUMED_CHANNELS = 16
"""NCCL's channels where they cannot be derived: those of a group that spans nodes with a network interface per GPU."""
LEAST_BANDWIDTH = 0.5
"""Assumed fraction of the memory's bandwidth that an operator gets at least: the memory serves both alike."""

_NORMS = frozenset(
    f"aten::{name}{direction}" for name in ("native_layer_norm", "_fused_rms_norm") for direction in ("", "_backward")
)
_ATTENTION_TILE = 128
"""Rows of a tile of attention. The kernel skips whole tiles above the diagonal."""
_TILES = ((128, 256), (256, 128), (128, 128))
"""Tile sizes of the fastest matrix products (NVIDIA, Matrix Multiplication Background User's Guide)."""
_FP32_TILES = ((128, 128), (128, 64), (64, 128), (64, 64))
"""The same in fp32, without tensor cores (CUTLASS, default SIMT GEMM configurations)."""
UNALIGNED_FLOPS_PER_CLOCK = 500
"""FLOPs that a multiprocessor computes each clock in a 16-bit product whose rows begin at odd addresses.

Then loads are of 2 bytes each, as with a vocabulary of 50257 (NVIDIA, Matrix Multiplication Background User's Guide,
Tensor Core requirements): 105, 140 and 145 TFLOP/s in the head of GPT-2 on an H100, whose other products reached 740
(results/nvidia-h100/scripts/measured.json, ddp_gpt2_fp16)."""
_LEAST_K = 512
"""The least part of k for which a multiprocessor is taken, an assumption. Products of 1 to 512 rows then differ by 26 %
(median) from what they took on an H200, instead of 51 % (results/nvidia-h200/kernel_times.json); 128 and 256 do no
better."""


@dataclass(frozen=True)
class Datasheet:
    """Rates from a GPU's datasheet and NCCL's cost model."""

    gpu: Gpu
    dtype: str
    """The dtype of 16-bit work."""
    groups: Groups
    copy_bandwidth: float | None
    channels: Mapping[str, int] = field(default_factory=dict)
    """Multiprocessors that a collective of a process group occupies. GPUs on PCIe use few, which are not counted."""
    attention_kernel: str = FLASH_ATTENTION_2
    slowest_gpu: float = 1.0
    """The clock of the slowest GPU by an average one's: all wait for it."""
    _known: dict[Work, float] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The seconds of collectives, which many operators that run beside one ask for."""
    source = "datasheet"
    blocks_host = False
    launch_seconds = LAUNCH_SECONDS

    @property
    def is_over_pcie(self) -> bool:
        """Whether any group communicates over PCIe within a node."""
        topologies = (*self.groups.that_communicate().values(), *self.groups.pairs.values())
        return any(one is not None and _is_over_pcie(one) for one in topologies)

    def run(self, work: Work, beside: tuple[Work, ...] = ()) -> float | None:
        """Return the seconds of an operator by the roofline: the longer of computing and of moving the bytes."""
        computing: float | None = 0.0
        moving = self._moving(work, beside)
        if work.is_product:
            computing = self._product(work, self._multiprocessors(beside))
        elif work.is_attention:
            computing = self._attention(work, self._multiprocessors(beside))
        return None if computing is None or moving is None else KERNEL_SECONDS + max(computing, moving)

    def _multiprocessors(self, beside: tuple[Work, ...]) -> int | None:
        """Return how many multiprocessors the kernels of collectives leave to an operator."""
        count = self.gpu.num_multiprocessors
        return None if count is None else max(count - sum(self.channels.get(one.group, 0) for one in beside), 1)

    def _moving(self, work: Work, beside: tuple[Work, ...]) -> float | None:
        bandwidth = self.gpu.memory_bandwidth_bytes_per_second
        if bandwidth is None:
            return None
        taken = sum(MEMORY_TRAFFIC[one.name] * one.num_bytes / (self.collective(one) or math.inf) for one in beside)
        left = max(bandwidth * MEMORY_EFFICIENCY - taken, bandwidth * MEMORY_EFFICIENCY * LEAST_BANDWIDTH)
        passes = SOFTMAX_PASSES if work.name == "aten::_log_softmax" else 1
        loading = passes * work.num_bytes / min(left, bandwidth * _memory_efficiency(work.name))
        return math.hypot(loading, self._computing(work, beside))

    def _computing(self, work: Work, beside: tuple[Work, ...]) -> float:
        """Return the seconds for which an operator without products keeps multiprocessors busy beside its loads."""
        of_bytes = NORM_BYTES_PER_CLOCK if work.name in _NORMS else _scaling_bytes_per_clock(work.name)
        rate = of_bytes or _elements_per_clock(work)
        clock, multiprocessors = self.gpu.clock_hertz, self._multiprocessors(beside)
        if rate is None or clock is None or multiprocessors is None:
            return 0.0
        size = work.num_bytes if of_bytes else work.elements or work.num_bytes // max(work.itemsize, 1)
        return size / (rate * clock * multiprocessors)

    def _peak(self, itemsize: int, multiprocessors: int | None) -> float | None:
        """Return the peak in FLOP/s of the slowest GPU's multiprocessors."""
        peak = self.gpu.peak_flops_per_second({1: "fp8", 4: "fp32"}.get(itemsize, self.dtype))
        count = self.gpu.num_multiprocessors
        part = 1.0 if multiprocessors is None or count is None else multiprocessors / count
        return None if peak is None else peak * part * self.slowest_gpu

    def _product(self, work: Work, multiprocessors: int | None) -> float | None:
        peak = self._peak(work.itemsize, multiprocessors)
        if peak is None:
            return None
        m, n, k = work.dims
        efficiency = self.gpu.matmul_efficiency or MATMUL_EFFICIENCY
        if work.itemsize == 1:
            layout = work.name.split()[1].removeprefix("nt")
            efficiency = (self.gpu.fp8_matmul_efficiency or FP8_MATMUL_EFFICIENCY) * FP8_ACCUMULATION[layout]
        elif work.itemsize == 4:
            efficiency = FP32_EFFICIENCY
        if work.itemsize != 4:
            efficiency = efficiency_under_power(self.gpu, efficiency, is_fp8=work.itemsize == 1)
        tiles = _FP32_TILES if work.itemsize == 4 else _TILES
        fraction = tile_fraction((m, n, k), self.gpu.num_multiprocessors, multiprocessors, tiles)
        rate = peak * efficiency * fraction
        if _is_unaligned(work) and multiprocessors is not None and self.gpu.clock_hertz is not None:
            rate = min(rate, UNALIGNED_FLOPS_PER_CLOCK * multiprocessors * self.gpu.clock_hertz)
        return 2 * m * n * k / rate

    def _attention(self, work: Work, multiprocessors: int | None) -> float | None:
        peak = self._peak(work.itemsize, multiprocessors)
        if peak is None:
            return None
        if work.itemsize == 4:  # CUTLASS's kernel, on the same units as matrix products in fp32
            return attention_flops(work.dims, work.is_backward) / (peak * FP32_EFFICIENCY)
        kernel = FLASH_ATTENTION_2 if work.is_flash_attn else self.attention_kernel
        kernel = MEMORY_EFFICIENT if work.is_efficient_attention else kernel
        return attention_seconds(kernel, self.gpu.compute_capability, peak, work.dims, work.is_backward)

    def collective(self, work: Work) -> float | None:
        """Return the seconds of a collective by NCCL's cost model; None if its group's topology is not documented."""
        if work not in self._known:
            topology = self.groups.topology(work)
            if topology is None or (work.name == ALL_TO_ALL and _is_over_pcie(topology)):
                return None
            self._known[work] = collective_seconds(work.name, work.num_bytes, topology)
        return self._known[work]

    def copy(self, work: Work) -> float | None:
        """Return the seconds of a copy over the host link; of a small one, such as a loss, also without knowing it."""
        if self.copy_bandwidth is None:
            return work.num_bytes / ASSUMED_HOST_LINK if work.num_bytes <= SMALL_COPY_BYTES else None
        return work.num_bytes / self.copy_bandwidth

    def host(self, work: Work) -> float | None:
        """Return the seconds of a hook, or of an optimizer step in host memory."""
        if work.name.startswith("optimizer"):
            return work.num_bytes / HOST_ADAM_BYTES_PER_SECOND
        return HOOK_SECONDS


def products_efficiency(gpu: Gpu) -> float:
    """Return the fraction of the 16-bit peak that a GPU's large matrix products reach, at its power limit."""
    return efficiency_under_power(gpu, gpu.matmul_efficiency or MATMUL_EFFICIENCY)


class RatesWithoutCommunication:
    """Rates of a rank without peers: a collective takes no time, except for copies within the rank's own memory."""

    def __init__(self, rates: Rates, setup: TrainSetup) -> None:
        self._ranks = setup.group_sizes
        self._rates = rates
        self.source, self.blocks_host, self.launch_seconds = rates.source, rates.blocks_host, rates.launch_seconds
        self.copy, self.host = rates.copy, rates.host

    def run(self, work: Work, beside: tuple[Work, ...] = ()) -> float | None:
        """Return the seconds of an operator, which collectives without time do not slow down."""
        return self._rates.run(work)

    def collective(self, work: Work) -> float | None:
        """Return the seconds of the copies: all-gather repeats the own shard, reduce-scatter keeps the own part."""
        part = work.num_bytes // self._ranks[work.group]
        copied = {"all_gather": part + work.num_bytes, "reduce_scatter": 2 * part}.get(work.name)
        return 0.0 if copied is None else self.run(Work("aten::copy_", copied, itemsize=4))


def _is_over_pcie(topology: Topology) -> bool:
    return topology.link == "pcie" and topology.ranks_per_node > 1


def _memory_efficiency(name: str) -> float:
    """Return the fraction of the memory's bandwidth that an operator or a compiled kernel reaches."""
    if name.startswith("triton_") and ("_clamp" in name or "_abs_" in name):
        return _quantization(name)
    for beginning, efficiency in _EFFICIENCIES:
        if name.startswith(beginning):
            return efficiency
    return MEMORY_EFFICIENCY


_EFFICIENCIES = (*LISTS_EFFICIENCY.items(), *FUSED_EFFICIENCY.items())


def _elements_per_clock(work: Work) -> float | None:
    """Return the elements that a multiprocessor computes each clock; None where memory alone decides."""
    found = ELEMENTS_PER_CLOCK.get(f"{work.name} {work.path}") or ELEMENTS_PER_CLOCK.get(work.path)
    return found or ELEMENTS_PER_CLOCK.get(work.name)


def _quantization(name: str) -> float:
    """Return the fraction of the bandwidth of a compiled kernel that finds maxima, or casts to float8.

    The names are Inductor's, of the operators that it fused: a clone is a cast to the layout that backward needs.
    """
    if "_clamp_clone" in name:
        return QUANTIZATION_EFFICIENCY["transposed"]
    if name.startswith("triton_poi"):
        return MEMORY_EFFICIENCY
    return QUANTIZATION_EFFICIENCY["maximum and cast" if "_clamp" in name and "_exp2" in name else "maximum"]


def _scaling_bytes_per_clock(name: str) -> float | None:
    """Return the rate of a compiled kernel that computes scales for every element; None for any other.

    ``rowwise`` rounds scales to powers of two, by exp2. A kernel without reduction that casts computes them by rows.
    """
    if not name.startswith("triton_") or "_exp2" not in name:
        return None
    if "_clamp_clone" in name:
        return None if name.startswith("triton_poi") else SCALING_BYTES_PER_CLOCK["transposed"]
    is_result = name.startswith("triton_poi") and "_scaled_mm" not in name
    return SCALING_BYTES_PER_CLOCK["result"] if is_result else None


def _is_unaligned(work: Work) -> bool:
    """Whether rows of a 16-bit matrix begin at addresses that are no multiple of 4 bytes."""
    m, n, k = work.dims
    first, second = work.name[-2], work.name[-1]
    rows = (k if first == "n" else m, n if second == "n" else k, n)
    return work.itemsize == 2 and any(row % 2 for row in rows)


def tile_fraction(
    dims: tuple[int, int, int],
    multiprocessors: int | None,
    free: int | None = None,
    tiles: Sequence[tuple[int, int]] = _TILES,
) -> float:
    """Return the fraction of a GPU that a matrix product uses: edge tiles and the last wave of tiles are not full.

    Where a product has fewer tiles than the GPU has multiprocessors, several compute one tile, each a part of k
    (split-K; CUTLASS, Efficient GEMM in CUDA). cuBLAS chooses the tile for the whole GPU, also where a collective
    leaves only ``free`` of its multiprocessors.
    """
    if multiprocessors is None:
        return 1.0

    m, n, k = dims

    def fraction(tile: tuple[int, int], processors: int) -> float:
        rows, columns = tile
        tiles = math.ceil(m / rows) * math.ceil(n / columns)
        splits = max(min(processors // tiles, k // _LEAST_K), 1)
        waves = math.ceil(tiles * splits / processors)
        return m * n * splits / (waves * processors * rows * columns)

    best = max(tiles, key=lambda tile: fraction(tile, multiprocessors))
    return fraction(best, free or multiprocessors)


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


def datasheet(hardware: Hardware, setup: TrainSetup, groups: Groups | None = None) -> Datasheet:
    """Return the rates of a GPU and of its links. ``groups`` communicate; by default those of the setup."""
    link, gpu = hardware.server.host_link, hardware.gpu
    groups = groups or groups_of(hardware, setup)
    bandwidth = link.bandwidth_bytes_per_second if link else None
    if bandwidth is not None and link is not None:
        bandwidth *= COPY_EFFICIENCY / min(link.gpus_per_uplink or 1, hardware.gpus_per_node)
    return Datasheet(
        gpu=gpu,
        dtype=setup.precision.compute,
        groups=groups,
        copy_bandwidth=bandwidth,
        channels=_channels(groups, hardware),
        attention_kernel=kernel_of(gpu),
        slowest_gpu=slowest_of(setup.world_size),
    )


def _channels(groups: Groups, hardware: Hardware) -> dict[str, int]:
    """Return the channels of each group on GPUs with NVLink: each is a thread block that occupies a multiprocessor."""
    found = {}
    for name, group in groups.that_communicate().items():
        if group is not None and group.link == "nvlink":
            channels = channels_of(group, hardware)
            found[name] = ASSUMED_CHANNELS if channels is None else channels.high
    return found
