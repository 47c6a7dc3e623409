"""Compiled code, recorded once: what a block's forward and backward allocate and free under torch.compile.

torch.compile turns a block into one node of the graph. AOTAutograd's partitioner chooses what that node saves;
Inductor writes a Python function for forward and one for backward, which allocate, reuse and delete buffers in an order
that is fixed when they are compiled. These functions are what is recorded.

Storages are numbered: first the inputs, then what is made, in order. Those of backward have numbers of their own:
first what was saved, then the output's gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from typing import NamedTuple

import msgspec

from fsdp_bench.spec.model import Family
from fsdp_bench.spec.recording.steps import Drop, Operator, Size
from fsdp_bench.spec.setup import Checkpointing


class Tuning(msgspec.Struct, array_like=True, frozen=True, gc=False, tag="t"):
    """Inductor tries several configurations of the kernel that follows, once, when it first runs.

    While it does, it holds a buffer of the size of the GPU's L2 cache (InductorBenchmarker.benchmark_gpu in
    torch/_inductor/runtime/benchmarking.py), and copies of what the kernel changes in place.
    """

    copies: tuple[Size, ...]
    """Bytes of each copy. In backward Inductor makes only those that do not raise the peak
    (CachingAutotuner.copy_args_to_cpu_if_needed in torch/_inductor/runtime/triton_heuristics.py)."""


Step = Operator | Drop | Tuning


class CompiledCode(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One compiled function and its backward."""

    inputs: tuple[str, ...]
    """Names of parameters in the module, and of its inputs: ``x_BSD``, ``cos_SE``, ..."""
    formulas: tuple[str, ...]
    names: tuple[str, ...]
    """Names of operators and kernels."""
    forward: tuple[Step, ...]
    output: int
    saved: tuple[int, ...]
    """Storages of forward, in the order in which backward takes them."""
    backward: tuple[Step, ...]
    gradients: tuple[int | None, ...]
    """The storage of each input's gradient; None for an input that needs none."""


BOTH_WAYS, FEW_TOKENS, MORE_TOKENS = REGIMES = "both ways", "few tokens", "more tokens"


class CompiledKind(NamedTuple):
    """Which block was compiled, and for what."""

    family: Family
    is_grouped: bool
    """Whether there are fewer key-value heads than heads."""
    itemsize: int
    """Bytes of an element of its parameters and inputs."""
    checkpointing: Checkpointing
    policy: str | None
    regime: str
    """How its backward is ordered and fused: see ``regime_of``."""

    @property
    def name(self) -> str:
        """The name in the catalogue."""
        parts = [self.family.value, "grouped" if self.is_grouped else "", f"{8 * self.itemsize} bits"]
        parts += [self.checkpointing.value, self.policy or "", self.regime]
        return " ".join(part for part in parts if part)


class CompiledCatalog(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Recorded compiled code, by ``CompiledKind.name``."""

    torch: str
    """The version that compiled it."""
    date: str
    codes: dict[str, CompiledCode]


def splits_of_sum(rows: int, columns: int, num_multiprocessors: int, threads_per_multiprocessor: int) -> int:
    """Return in how many parts Inductor sums each of some columns, which it then adds up in a second kernel.

    InductorChoices.reduction_split_factor, for sums that are not along the contiguous dimension
    (torch/_inductor/choices.py, torch 2.13).

    Args:
        rows: numbers to sum.
        columns: sums.
        num_multiprocessors: of the GPU.
        threads_per_multiprocessor: of the GPU.
    """
    fewest, most, values_per_thread, warp = 32, 512, 4, 32
    slots = num_multiprocessors * threads_per_multiprocessor
    if rows * columns < fewest * slots:
        size = fewest
    elif rows * columns < most * slots:
        blocks = -(-(slots // (8 * warp)) // -(-columns // 128))
        wanted = -(-rows // (values_per_thread * blocks))
        closest = _closest_divisor(rows, wanted)
        size = max(closest, fewest) if abs(wanted - closest) < 20 else wanted
    else:
        closest = _closest_divisor(rows, most)
        size = closest if abs(closest - most) < 50 else most
    return -(-rows // (values_per_thread * size))


def _closest_divisor(number: int, wanted: int) -> int:
    """Return the divisor that is closest, of two the smaller."""
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return min(sorted({*small, *(number // one for one in small)}), key=lambda one: abs(one - wanted))


def sums_both_ways(rows: int, columns: int) -> bool:
    """Return whether one kernel sums both along the rows and along the columns of a norm's gradient.

    MixOrderReduction.can_fuse (torch/_inductor/scheduler.py, torch 2.13): large, and more rows than columns.
    """
    return rows * columns >= 5 * 2**20 and rows >= max(2 * columns, 4096) and columns <= 2**14


def regime_of(tokens: int, hidden_size: int) -> str:
    """Return in which of its ways Inductor orders and fuses the kernels of a block's backward.

    It depends on sizes: on whether one kernel sums a norm's gradient both ways, and on which is larger, a weight's
    gradient or an activation, because Inductor takes the order with the least memory (torch/_inductor/memory.py,
    reorder_for_peak_memory).
    """
    if sums_both_ways(tokens, hidden_size):
        return BOTH_WAYS
    return FEW_TOKENS if tokens <= hidden_size else MORE_TOKENS


def parts_of_both_ways(rows: int, num_multiprocessors: int) -> int:
    """Return in how many parts such a kernel sums each column (simd.py, _codegen_mix_order_reduction)."""
    per_part = rows // (8 * num_multiprocessors)
    size = 1 << (per_part.bit_length() - 1) if per_part else 0
    return -(-rows // min(max(size, 16), 128))


def symbols_of_block(
    sizes: Mapping[str, int], num_multiprocessors: int, threads_per_multiprocessor: int
) -> dict[str, int]:
    """Return the values of all symbols of compiled blocks: those given, and the parts of the sums over all tokens.

    ``sizes`` has B, S, num_attention_heads, num_key_value_heads, head_dim and intermediate_size. ``parts_x`` are the
    parts of a sum for each of hidden_size columns, ``parts_3x`` of three times that, ``parts_f`` of intermediate_size,
    ``parts_both`` of a kernel that sums both ways.
    """
    rows, width = sizes["B"] * sizes["S"], sizes["num_attention_heads"] * sizes["head_dim"]
    columns = {"parts_x": width, "parts_3x": 3 * width, "parts_f": sizes["intermediate_size"]}
    gpu = num_multiprocessors, threads_per_multiprocessor
    parts = {name: splits_of_sum(rows, count, *gpu) for name, count in columns.items()}
    return {**sizes, **parts, "parts_both": parts_of_both_ways(rows, num_multiprocessors)}
