"""Compiled code, recorded once: what a block's forward and backward allocate and free under torch.compile.

torch.compile turns a block into one node of the graph. AOTAutograd's partitioner chooses what that node saves;
Inductor writes a Python function for forward and one for backward, which allocate, reuse and delete buffers in an order
that is fixed when they are compiled. These functions are what is recorded.

Storages are numbered: first the inputs, then what is made, in order. Those of backward have numbers of their own:
first what was saved, then the output's gradient.
"""

from collections.abc import Mapping
from enum import StrEnum
from math import isqrt
from typing import NamedTuple

import msgspec

from fsdp_bench.spec.model import ModelShape
from fsdp_bench.spec.recording.config import HEADS, HIDDEN, Architecture
from fsdp_bench.spec.recording.steps import Drop, Operator, Size
from fsdp_bench.spec.setup import Checkpointing, Float8


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
    backward_inputs: tuple[Size, ...] = ()
    """Bytes of what backward takes, where several orders of it are recorded."""


class Order(StrEnum):
    """In which order the kernels of a recorded backward run; Inductor takes the one with the lowest peak."""

    AS_TRACED = ""
    BREADTH_FIRST = "breadth first"
    DEPTH_FIRST = "depth first"


BOTH_WAYS, FEW_TOKENS, MORE_TOKENS = REGIMES = "both ways", "few tokens", "more tokens"


class CompiledKind(NamedTuple):
    """The block that was compiled, and for what."""

    block: str
    """The code that was compiled: see ``benchmark_block`` and ``huggingface_block``."""
    itemsize: int
    """Bytes of an element of its parameters and inputs."""
    checkpointing: Checkpointing
    policy: str | None
    regime: str
    """The order and fusion of its backward: see ``regime_of``."""
    float8: Float8 = Float8.NONE
    order: Order = Order.AS_TRACED
    is_fsdp1: bool = False
    """Whether its weights are FSDP1's views of a flat parameter, where that changes what is saved for backward.

    It does in float8 without checkpointing: instead of the weights their copies in float8 are saved, which stay."""

    @property
    def dtypes(self) -> str:
        """The beginning of the name: the block, and the dtypes in which it computes."""
        recipe = "" if self.float8 is Float8.NONE else f" float8 {self.float8.value}"
        return f"{self.block} {8 * self.itemsize} bits{recipe}"

    @property
    def name(self) -> str:
        """The name in the catalogue."""
        wrapper = "fsdp1" if self.is_fsdp1 else ""
        parts = [self.dtypes, self.checkpointing.value, self.policy or "", self.regime, wrapper, self.order.value]
        return " ".join(part for part in parts if part)


def benchmark_block(shape: ModelShape) -> str:
    """Return the name of a benchmark model's block: the family, ``grouped`` with fewer key-value heads than heads."""
    is_grouped = shape.num_key_value_heads < shape.num_attention_heads
    return f"{shape.family.value} grouped" if is_grouped else shape.family.value


_OF_THE_ENDS = ("tie_word_embeddings",)
"""Settings that change what is outside of the blocks alone."""


def huggingface_block(architecture: Architecture) -> str:
    """Return the name of a block in transformers' code: the model_type, and the settings that decide what it runs."""
    settings = [
        name if value is True else f"{name}={value}"
        for name, value in architecture.settings.items()
        if name not in _OF_THE_ENDS
    ]
    return " ".join([architecture.model_type, *settings])


class CompiledCatalog(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Recorded compiled code, by ``CompiledKind.name``."""

    torch: str
    """The version that compiled it."""
    date: str
    codes: dict[str, CompiledCode]


_FEWEST = 32
"""The fewest numbers that a thread reduces (InductorChoices.reduction_split_factor, min_elements_per_thread)."""


def splits_of_sum(rows: int, columns: int, num_multiprocessors: int, threads_per_multiprocessor: int) -> int:
    """Return in how many parts Inductor sums each column of so many rows; a second kernel adds them up.

    InductorChoices.reduction_split_factor for sums not along the contiguous dimension (choices.py, torch 2.13).
    """
    most, values_per_thread, warp = 512, 4, 32
    slots = num_multiprocessors * threads_per_multiprocessor
    if rows * columns < _FEWEST * slots:
        size = _FEWEST
    elif rows * columns < most * slots:
        blocks = -(-(slots // (8 * warp)) // -(-columns // 128))
        size = _near_divisor(rows, -(-rows // (values_per_thread * blocks)), within=20)
    else:
        size = _near_divisor(rows, most, within=50)
    return -(-rows // (values_per_thread * size))


def _near_divisor(number: int, wanted: int, within: int) -> int:
    """Return the divisor that is closest to a size, of two the smaller; the size itself if none is near."""
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    closest = min(sorted({*small, *(number // one for one in small)}), key=lambda one: abs(one - wanted))
    return max(closest, _FEWEST) if abs(closest - wanted) < within else wanted


def sums_both_ways(rows: int, columns: int) -> bool:
    """Return whether one kernel sums a norm's gradient both ways (MixOrderReduction.can_fuse, torch 2.13)."""
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


def is_split(columns: int, num_multiprocessors: int) -> bool:
    """Return whether a sum or maximum of each of some columns is computed in parts: of fewer columns than this.

    Reduction.num_splits in torch/_inductor/ir.py, torch 2.13.
    """
    return columns < 64 * num_multiprocessors


def float8_regime_of(sizes: Mapping[str, int], recipe: Float8, num_multiprocessors: int) -> str:
    """Return in which of its ways Inductor fuses the kernels of a block in float8.

    ``sizes`` has B, S and the sizes of the block. Scales of whole tensors need no maxima of columns.
    """
    sums = BOTH_WAYS if sums_both_ways(sizes["B"] * sizes["S"], sizes["hidden_size"]) else "one way"
    batch = "one sequence" if sizes["B"] == 1 else "sequences"
    is_wide = recipe is not Float8.TENSORWISE and not is_split(sizes["intermediate_size"], num_multiprocessors)
    return " ".join([sums, batch, *(["wide"] if is_wide else [])])


def parts_of_both_ways(rows: int, num_multiprocessors: int) -> int:
    """Return in how many parts such a kernel sums each column (simd.py, _codegen_mix_order_reduction)."""
    per_part = rows // (8 * num_multiprocessors)
    size = 1 << (per_part.bit_length() - 1) if per_part else 0
    return -(-rows // min(max(size, 16), 128))


_SIZES = {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": ("num_key_value_heads", *HEADS),
    "head_dim": ("head_dim",),
    "intermediate_size": ("intermediate_size", "n_inner"),
}
"""The sizes of a block by the names that formulas have for them, with their names in config.json files."""


def sizes_of_shape(shape: ModelShape) -> dict[str, int]:
    """Return the sizes of a benchmark model's block."""
    return {name: getattr(shape, name) for name in _SIZES}


def sizes_of_config(given: Mapping[str, int]) -> dict[str, int]:
    """Return the same of a config.json, from the symbols that it has (``config.symbols``)."""
    return {name: next(given[each] for each in names if each in given) for name, names in _SIZES.items()}


def symbols_of_block(
    sizes: Mapping[str, int], num_multiprocessors: int, threads_per_multiprocessor: int
) -> dict[str, int]:
    """Return the values of all symbols of compiled blocks: those given, and the parts of the sums over all tokens.

    ``sizes`` has B, S, and what ``sizes_of_shape`` returns. ``num_qkv_heads`` are the heads of queries, keys and
    values. ``parts_x`` are the parts of a sum over all tokens for each of hidden_size columns, ``parts_3x`` of three
    times that, ``parts_f`` of intermediate_size, ``parts_kv`` of the width of all key-value heads; ``parts_q_norm`` and
    ``parts_k_norm`` of sums over tokens and heads for each of head_dim. With ``both`` in their names: of a kernel that
    sums both ways.
    """
    tokens, width = sizes["B"] * sizes["S"], sizes["hidden_size"]
    head, heads, kv_heads = (sizes[name] for name in ("head_dim", "num_attention_heads", "num_key_value_heads"))
    sums = {
        "parts_x": (tokens, width),
        "parts_3x": (tokens, 3 * width),
        "parts_f": (tokens, sizes["intermediate_size"]),
        "parts_kv": (tokens, kv_heads * head),
        "parts_q_norm": (tokens * heads, head),
        "parts_k_norm": (tokens * kv_heads, head),
    }
    gpu = num_multiprocessors, threads_per_multiprocessor
    parts = {name: splits_of_sum(*each, *gpu) for name, each in sums.items()}
    rows = {"parts_both": tokens, "parts_both_q": tokens * heads, "parts_both_k": tokens * kv_heads}
    both = {name: parts_of_both_ways(each, num_multiprocessors) for name, each in rows.items()}
    return {**sizes, "num_qkv_heads": heads + 2 * kv_heads, **parts, **both}


def splits_of_maximum(numel: int, num_multiprocessors: int, threads_per_multiprocessor: int) -> int:
    """Return in how many parts Inductor reduces a whole tensor to one number, such as its largest absolute value.

    InductorChoices.reduction_split_factor, for one reduction along the contiguous dimension (torch 2.13), on GPUs
    before compute capability 10, where up to 8192 numbers are one part.
    """
    most, threads, not_split = 512, 256, 8192
    slots = num_multiprocessors * threads_per_multiprocessor
    if numel <= not_split:
        return 1
    if numel <= _FEWEST * slots:
        size = _FEWEST
    elif numel < most * slots:
        size = _near_divisor(numel, -(-numel // (threads * (slots // (2 * threads)))), within=30)
    else:
        size = _near_divisor(numel, most, within=50)
    return -(-numel // (size * threads))


def symbols_of_float8(
    sizes: Mapping[str, int], num_multiprocessors: int, threads_per_multiprocessor: int
) -> dict[str, int]:
    """Return the values of all symbols of compiled blocks in float8.

    The subset of ``symbols_of_block`` that the benchmark models use.
    Scales need the largest absolute value of tensors. ``parts_max_x`` are the parts of a whole activation of
    hidden_size columns, ``parts_max_kv``, ``parts_max_f`` and ``parts_max_3x`` of one with as many columns as the
    key-value heads, as intermediate_size and three times hidden_size; ``parts_max_kv_x`` and so on of a whole weight
    with so many rows. ``parts_f_x`` and so on are the parts of a maximum of each column of a weight, by its rows and
    columns.
    """
    tokens, x, f = sizes["B"] * sizes["S"], sizes["hidden_size"], sizes["intermediate_size"]
    kv = sizes["num_key_value_heads"] * sizes["head_dim"]
    gpu = num_multiprocessors, threads_per_multiprocessor
    widths = {"x": x, "kv": kv, "f": f, "3x": 3 * x}
    common = symbols_of_block(sizes, *gpu)
    return {
        **{name: common[name] for name in (*sizes, "parts_x", "parts_3x", "parts_f", "parts_kv", "parts_both")},
        **{f"parts_max_{name}": splits_of_maximum(tokens * width, *gpu) for name, width in widths.items()},
        **{f"parts_max_{name}_x": splits_of_maximum(width * x, *gpu) for name, width in widths.items()},
        **{f"parts_{name}_x": splits_of_sum(width, x, *gpu) for name, width in widths.items()},
        "parts_x_f": splits_of_sum(x, f, *gpu),
    }
