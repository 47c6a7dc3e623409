"""Workspaces of CUDA's kernels that add up rows: what they allocate beside their results, in bytes.

Read from PyTorch's source (aten/src/ATen, main between 2.10 and 2.13), and from its memory history on the stand-in for
NVIDIA's libraries (tests/on_stand_in/rehearse/test_partial_sums.py). Not modelled, because small or not documented:
partial sums of norms' weight gradients, sorting's scratch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fsdp_bench.simulate.operators.kernels import FP32, INT32, INT64, Kernels, KernelScratch, Passing


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

    Args:
        parts: Bytes of each parameter in one rank's chunk.
        num_chunks: Ranks that were gathered from.
        kernels: The GPU's multiprocessors; large copies give each block of threads several iterations.
    """
    most_blocks = kernels.num_multiprocessors * kernels.threads_per_multiprocessor // _THREADS * 2
    iterations = -(-_tiles(parts, 1) * num_chunks // most_blocks)
    chunks_per_block = min(math.ceil(math.sqrt(iterations)), num_chunks)
    blocks = _tiles(parts, -(-iterations // chunks_per_block))
    # Destinations, sources, sizes, each block's part, the first block of each part, and the end of the last.
    return INT64 * (3 * len(parts) + blocks + len(parts) + 1)


def chunk_cat_arguments(parts: Sequence[int]) -> int:
    """Return the bytes for aten::_chunk_cat of gradients.

    Args:
        parts: Bytes of each gradient in one rank's chunk, padded, in the dtype of the result.
    """
    return INT64 * (6 * len(parts) + 2 + _tiles(parts, 1))


def _tiles(parts: Sequence[int], iterations: int) -> int:
    tile_bytes = _TILE_BYTES * iterations
    return sum([-(-part // tile_bytes) for part in parts])
