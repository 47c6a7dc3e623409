"""Workspaces of CUDA's kernels: what attention and sums of rows allocate beside their results, in bytes.

Read from PyTorch's source (aten/src/ATen, main between 2.10 and 2.13), and from its memory history on the stand-in for
NVIDIA's libraries (tests/on_stand_in/rehearse/test_workspaces.py). Not modelled, because small or not documented:
partial sums of norms' weight gradients, sorting's scratch.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from fsdp_bench.simulate.operators.kernels import FP32, INT32, INT64, Kernels, KernelScratch, Passing
from fsdp_bench.spec.hardware import FIRST_WITH_FLASH_ATTENTION


def embedding_backward_workspace(num_indices: int, rows: int, width: int) -> tuple[KernelScratch, KernelScratch]:
    """Return what aten::embedding_dense_backward allocates before its result, and after it.

    aten/native/cuda/Embedding.cu sorts above 3072 indices, with their places; EmbeddingBackwardKernel.cu finds where
    each row's begin (cub::unique_by_key, which leaves the keys in a tensor of their own), and then sums runs of ten
    indices in fp32 (NROWS_PER_THREAD, max_partial_segment).
    """
    if num_indices <= 3072:
        return (), ()
    keys, segments = num_indices * INT64, min(num_indices, rows)
    partial = num_indices // 10 + segments
    sums = segments * INT64, segments * INT64, INT64, partial * INT64, partial * width * FP32
    return (keys, keys, Passing(keys, 0)), (keys, INT64, Passing(keys, 0), *sums)


def sum_over_rows_workspace(rows: int, columns: int, kernels: Kernels) -> list[int]:
    """Return what aten::sum allocates beside its result to add up the rows of a matrix, as a bias's gradient needs.

    setReduceConfig in aten/native/cuda/Reduce.cuh: a thread adds up four columns; where each would have 256 rows or
    more, several blocks share an output, and leave partial sums in fp32 and a counter each in global memory.
    """
    vector = 4 if columns % 4 == 0 else 2 if columns % 2 == 0 else 1
    most_threads = _REDUCE_THREADS // vector
    across, down = _last_power(columns // vector, most_threads), _last_power(rows, most_threads)
    height = min(down, most_threads // min(across, _WARP))
    width = min(across, most_threads // height)
    if rows < min(height * 16, _MOST_VALUES):
        return []
    values, grid = -(-rows // height), -(-(columns // vector) // width)
    wanted = kernels.num_multiprocessors * (kernels.threads_per_multiprocessor // (width * height))
    if values < _MOST_VALUES or grid > wanted:
        return []
    shared = max(min(-(-wanted // grid), -(-values // _FEWEST_VALUES)), -(-values // _MOST_VALUES))
    if shared <= 1:
        return []
    return [FP32 * columns * shared * width * vector, FP32 * grid]


def reduce_all_workspace(numel: int, kernels: Kernels, itemsize: int = FP32) -> list[int]:
    """Return what aten::linalg_vector_norm, mean and sum allocate beside one number; they add up in ``itemsize`` bytes.

    setReduceConfig in aten/native/cuda/Reduce.cuh: a block reduces all; where each of its threads would have 256
    elements or more, several blocks do, and leave a partial result each, and one counter, in global memory.
    """
    threads = _last_power(numel // 4 if numel >= _VECTORIZED else numel, _REDUCE_THREADS)
    values = -(-numel // threads)
    if values < _MOST_VALUES:
        return []
    wanted = kernels.num_multiprocessors * (kernels.threads_per_multiprocessor // threads)
    blocks = max(min(wanted, -(-values // _FEWEST_VALUES)), -(-values // _MOST_VALUES))
    return [itemsize * blocks, INT32] if blocks > 1 else []


def foreach_norm_workspace(numels: Sequence[int]) -> list[int]:
    """Return what aten::_foreach_norm allocates before its results: a number in fp32 for each chunk of each tensor.

    foreach_tensor_norm_cuda (aten/native/cuda/ForeachReduceOp.cu), output_per_tensor: all tensors have as many chunks
    as the largest one.
    """
    return [FP32 * len(numels) * -(-max(numels) // _FOREACH_CHUNK)] if numels else []


_FOREACH_CHUNK = 65536
"""Elements that a block of foreach kernels takes: kChunkSize in MultiTensorApply.cuh."""
_REDUCE_THREADS, _WARP = 512, 32
_VECTORIZED = 128
"""Elements from which on a thread loads four at once."""
_FEWEST_VALUES, _MOST_VALUES = 16, 256
"""Values that one thread adds up."""


def _last_power(number: int, most: int) -> int:
    """Return the largest power of two that is not above a number, nor above ``most``, a power of two itself."""
    power = most
    while power > 1 and power > number:
        power //= 2
    return power


# -- Arguments of FSDP2's batched copies on a GPU: addresses and sizes, packed into one tensor of int64 ----------------
#
# aten/native/cuda/TensorShape.cu, pack_vecs: the host fills it, moves it to the GPU, and the kernel's blocks of threads
# look up which tensor they are to copy. It is freed with the call, but in a pool of small tensors it can be what makes
# the allocator reserve one more segment.

_THREADS = 128
_TILE_BYTES = 16 * _THREADS
"""Bytes that one block of threads copies in one iteration."""


def split_arguments(parts: Sequence[int], num_chunks: int, kernels: Kernels) -> int:
    """Return the bytes for aten::split_with_sizes_copy of a gathered buffer.

    ``parts`` are the bytes of each parameter in one rank's chunk; ``num_chunks`` ranks were gathered from. Large copies
    give each block of threads several iterations, depending on the GPU's multiprocessors.
    """
    most_blocks = kernels.num_multiprocessors * kernels.threads_per_multiprocessor // _THREADS * 2
    iterations = -(-_tiles(parts, 1) * num_chunks // most_blocks)
    chunks_per_block = min(math.ceil(math.sqrt(iterations)), num_chunks)
    blocks = _tiles(parts, -(-iterations // chunks_per_block))
    # Destinations, sources, sizes, each block's part, the first block of each part, and the end of the last.
    return INT64 * (3 * len(parts) + blocks + len(parts) + 1)


def chunk_cat_arguments(parts: Sequence[int]) -> int:
    """Return the bytes for aten::_chunk_cat of gradients.

    ``parts`` are the bytes of each gradient in one rank's chunk, padded, in the dtype of the result.
    """
    return INT64 * (6 * len(parts) + 2 + _tiles(parts, 1))


def _tiles(parts: Sequence[int], iterations: int) -> int:
    tile_bytes = _TILE_BYTES * iterations
    return sum([-(-part // tile_bytes) for part in parts])


# -- Attention ---------------------------------------------------------------------------------------------------------


class _Tiles(NamedTuple):
    """The tiles of a kernel of memory-efficient attention's backward: kBlockSizeI, kBlockSizeJ, kOutputInRF."""

    rows: int
    columns: int
    keeps_outputs: bool
    """Whether the gradients of keys and values stay in registers until they are whole."""


def efficient_backward_workspace(
    batch: int, heads: int, length: int, keys: int, dims: tuple[int, int], itemsize: int, compute_capability: float
) -> int:
    """Return what memory-efficient attention's backward adds up gradients in, in bytes.

    AttentionBackwardKernel::Params::workspace_size (mem_eff_attention/kernel_backward.h): the queries' gradient in
    tiles of fp32 with a lock and a counter each; and, where the kernel does not keep them, those of keys and values.

    ``dims`` are the sizes of a head of queries and keys, and of values; ``heads`` and ``length`` are those of the
    queries. The GPU's compute capability is 7.0 or newer.
    """
    tiles = _efficient_tiles(max(dims), itemsize == FP32, compute_capability)
    tile_bytes = tiles.rows * tiles.columns * FP32 + 16
    num_bytes = -(-length // tiles.rows) * -(-dims[0] // tiles.columns) * tile_bytes
    if not tiles.keeps_outputs and itemsize != FP32:
        splits = _splits_of_keys(batch * heads, keys, tiles.columns)
        num_bytes += sum(splits * tiles.columns * -(-dim // tiles.rows) * tiles.rows * FP32 for dim in dims)
    return batch * heads * num_bytes


def row_sums(batch: int, heads: int, length: int, dim: int, itemsize: int) -> list[int | Passing]:
    """Return what memory-efficient attention's backward allocates for the sums of grad_out * out in fp32, in bytes.

    delta in _efficient_attention_backward (attention_backward.cu). In 16 bits the kernel computes it
    (kKernelComputesDelta). In fp32 the product and its sums, token by token, are freed once there is a copy, head by
    head; of one head or token none is made.

    ``dim`` is the size of a head of the values; ``heads`` and ``length`` are those of the queries.
    """
    sums = batch * heads * length * FP32
    if itemsize != FP32:
        return [sums]
    is_copied = heads > 1 and length > 1
    return [Passing(sums * dim, 1 + is_copied), *[Passing(sums, 1)] * is_copied, sums]


def efficient_forward_workspace(out_numel: int, dims: tuple[int, int], itemsize: int) -> list[int]:
    """Return what memory-efficient attention's forward adds its output up in, in bytes.

    kNeedsOutputAccumulatorBuffer (mem_eff_attention/kernel_forward.h): a copy of the output in fp32, where that is in
    16 bits and does not stay in registers (kKeepOutputInRF): of heads wider than 128.

    ``dims`` are the sizes of a head of queries and keys, and of values.
    """
    return [out_numel * FP32] if itemsize != FP32 and max(dims) > 128 else []


def _efficient_tiles(head_dim: int, is_fp32: bool, compute_capability: float) -> _Tiles:
    """dispatch_cutlassB (kernels/cutlassB.h): the first kernel that fits into a multiprocessor's shared memory.

    That of compute capability 7.5 is 64 KiB a block, of 7.0 96 KiB, of 8.6, 8.9 and 12.0 99 KiB, and of others from 8.0
    on 163 KiB and more.
    """
    is_small = compute_capability in (8.6, 8.9, 12.0)
    if head_dim <= 64:
        return _Tiles(64, 64, True)
    if compute_capability < FIRST_WITH_FLASH_ATTENTION:  # dispatch_cutlassB_f16_sm70, f32_sm70, and the same of sm75
        return _Tiles(64 if is_fp32 else 128, 64, head_dim <= 128)
    if is_fp32:
        return _Tiles(64 if is_small else 128, 64, False)
    if head_dim <= 96 and compute_capability in (8.6, 8.9):
        return _Tiles(128, 64, True)
    if head_dim <= 128:
        return _Tiles(64, 64, False) if is_small else _Tiles(128, 128, True)
    return _Tiles(128, 64, False)


def _splits_of_keys(rows: int, keys: int, columns: int) -> int:
    """_efficient_attention_backward (attention_backward.cu), "Keys splitting heuristic", for a kernel with staging."""
    splits = 1 if rows >= 256 and keys <= 1024 else -(-keys // columns)
    return max(1, min(splits, 200 // rows))


def flash_backward_workspace(batch: int, heads: int, length: int, head_dim: int, groups: int) -> list[int]:
    """Return what flash attention 2's backward allocates beside its results, in bytes for 16-bit inputs.

    pytorch_flash::mha_bwd (aten/native/transformers/cuda/flash_attn/flash_api.cpp): softmax_d and dq_accum in fp32,
    with the sequence rounded to 128 and the head to 32 (to 256 above 192), and with grouped keys their expanded
    gradients.
    """
    rounded_length = -(-length // 128) * 128
    softmax_d = batch * heads * rounded_length * FP32
    sizes = [softmax_d, softmax_d * _rounded_head(head_dim)]
    if groups > 1:
        sizes += [batch * length * heads * head_dim * 2] * 2
    return sizes


def flash_forward_workspace(batch: int, heads: int, length: int, head_dim: int, num_multiprocessors: int) -> list[int]:
    """Return what flash attention 2's forward allocates beside its results, in bytes: partial sums of split keys.

    Where batch and heads leave multiprocessors without work, each row's keys are split among several blocks, which
    leave the logarithm of their sum and their output in fp32 (set_params_splitkv in pytorch_flash, flash_api.cpp).
    """
    block = 256 if head_dim <= 64 else 128 if head_dim <= 128 else 64
    # torch counts two blocks of threads on a multiprocessor.
    splits = _num_splits(batch * heads * -(-length // 64), 2 * num_multiprocessors, -(-length // block))
    sums = splits * batch * heads * length * FP32
    return [sums, sums * _rounded_head(head_dim)] if splits > 1 else []


MOST_CUDNN_HEAD = {9.0: 256, 10.0: 128, 10.3: 128}
"""The largest head that torch 2.13 gives cuDNN's attention in training, by compute capability (sdp_utils.cpp,
check_cudnn_tensor_shapes)."""


def cudnn_backward_workspace(
    batch: int, heads: int, length: int, head_dim: int, groups: int, capability: float
) -> list[int]:
    """Return what cuDNN's attention allocates beside its results in backward, in bytes for 16-bit inputs: all at once.

    Queries' gradients in fp32 (dQ_accum_size in cudnn-frontend, scaled_dot_product_flash_attention.h), of each row the
    sum of output times gradient (softmax_sum_size), and cuDNN's own: with grouped keys their expanded gradients, and
    256 bytes on Hopper, 128 on Blackwell. Equal to the byte to what cuDNN 9.19 took on an H100 and an H200
    (results/nvidia-h200); on Blackwell to what cuDNN 9.20 asks for.
    """
    rows, is_hopper = batch * heads * length, capability < 10
    expanded = 2 * rows * head_dim * 2 + 128 * (not is_hopper) if groups > 1 else 0
    return [rows * (head_dim + 1) * FP32 + expanded + 256 * is_hopper]


def _num_splits(row_blocks: int, slots: int, key_blocks: int) -> int:
    """num_splits_heuristic (flash_api.cpp): the fewest splits within 85 % of the best use of the multiprocessors."""
    if row_blocks >= 0.8 * slots:
        return 1
    efficiency: dict[int, float] = {}
    for splits in range(1, min(128, slots, key_blocks) + 1):
        if splits == 1 or -(-key_blocks // splits) != -(-key_blocks // (splits - 1)):
            waves = row_blocks * splits / slots
            efficiency[splits] = waves / math.ceil(waves)
    return next(splits for splits, fraction in efficiency.items() if fraction >= 0.85 * max(efficiency.values()))


def _rounded_head(head_dim: int) -> int:
    return -(-head_dim // 32) * 32 if head_dim <= 192 else 256


# -- By the name and the sizes of an operator --------------------------------------------------------------------------

_ATTENTION = "aten::_scaled_dot_product_"
_FLASH_ATTN = "flash_attn::flash_attn_func"


class Workspace(NamedTuple):
    """Bytes that a kernel allocates for itself, until it has allocated everything."""

    before: KernelScratch = ()
    """Before its results."""
    after_second: KernelScratch = ()
    """After the second of its results."""
    after: KernelScratch = ()


NONE = Workspace()


def workspace_of(
    name: str,
    dims: tuple[int, ...],
    itemsize: int,
    kernels: Kernels,
    num_bytes: int = 0,
    results: tuple[int, ...] = (),
    num_keys: int = 1,
) -> Workspace:
    """Return what the kernel of an operator allocates for itself.

    ``dims`` are its sizes, () where none were recorded; ``num_bytes`` is what it reads and writes, ``results`` are the
    bytes of what it returns. ``num_keys`` are the keys of unfused attention, for recordings that do not have its sizes.
    """
    result_bytes = results[0] if results else 0
    if name in ("aten::_safe_softmax", "aten::_softmax_backward_data"):
        return _of_softmax(name, dims, itemsize, num_bytes, result_bytes, num_keys)
    if not dims:
        return NONE
    if name.startswith((_ATTENTION, _FLASH_ATTN)):
        return _of_attention(name, dims, itemsize, kernels, results)
    if name == "aten::embedding_dense_backward":
        indices, rows, columns, *is_copied = dims
        copied = (indices * columns * itemsize,) * len(is_copied)
        before, after = embedding_backward_workspace(indices, rows, columns)
        return Workspace(before=(*copied, *before), after=after)
    if name == "aten::sum":
        return Workspace(after=tuple(sum_over_rows_workspace(dims[0], dims[1], kernels)))
    return NONE


def _of_attention(
    name: str, dims: tuple[int, ...], itemsize: int, kernels: Kernels, results: tuple[int, ...]
) -> Workspace:
    batch, heads, groups, length, keys, head_dim, _is_causal, *copies = dims
    capability = kernels.compute_capability
    is_cudnn = kernels.cudnn_attention and length > 1 and head_dim <= MOST_CUDNN_HEAD.get(capability, 0)
    if is_cudnn and name == f"{_ATTENTION}flash_attention":
        return Workspace(after_second=(256,) * (capability < 10))
    if is_cudnn and name == f"{_ATTENTION}flash_attention_backward":
        return Workspace(
            after=tuple(cudnn_backward_workspace(batch, heads, length, head_dim, heads // groups, capability))
        )
    if name in (f"{_ATTENTION}flash_attention", _FLASH_ATTN):
        inside = flash_forward_workspace(batch, heads, length, head_dim, kernels.num_multiprocessors)
        return Workspace(after_second=tuple(inside))
    if name == f"{_ATTENTION}flash_attention_backward":
        copied = (batch * heads * length * head_dim * itemsize,) * sum(copies)
        inside = flash_backward_workspace(batch, heads, length, head_dim, heads // groups)
        return Workspace(before=copied, after=tuple(inside))
    if name == f"{_FLASH_ATTN}_backward":  # softmax_d is its result
        return Workspace(after=tuple(flash_backward_workspace(batch, heads, length, head_dim, heads // groups)[1:]))
    if name == f"{_ATTENTION}efficient_attention":
        numel = results[0] // itemsize
        widths = head_dim, numel // (batch * heads * length)
        return Workspace(after_second=tuple(efficient_forward_workspace(numel, widths, itemsize)))
    if name == f"{_ATTENTION}efficient_attention_backward":
        # _efficient_attention_backward: each row's sum of grad_out * out, and what it adds up gradients in
        values_dim = results[2] // (batch * heads * keys * itemsize) if len(results) > 2 else head_dim
        size = batch, heads, length, keys, (head_dim, values_dim), itemsize
        sums = row_sums(batch, heads, length, values_dim, itemsize)
        return Workspace(after=(*sums, efficient_backward_workspace(*size, kernels.compute_capability)))
    return NONE


def _of_softmax(
    name: str, dims: tuple[int, ...], itemsize: int, num_bytes: int, result_bytes: int, num_keys: int
) -> Workspace:
    if name == "aten::_softmax_backward_data":  # softmax_backward_cuda_out (SoftMax.cu): tmp = grad * output
        return Workspace(after=((num_bytes - result_bytes) // 2,))
    # _safe_softmax (SoftMax.cpp): masked = self.eq(-inf), masked_rows = all(masked), zero
    numel = result_bytes // itemsize
    return Workspace(after=(numel, dims[0] if dims else numel // num_keys, itemsize))
