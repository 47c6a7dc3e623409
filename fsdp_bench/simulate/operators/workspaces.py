"""What CUDA's operators allocate inside of themselves, beside their results, in bytes.

Read from PyTorch's source (aten/src/ATen, main between 2.10 and 2.13), and from its memory history on the stand-in for
a GPU (tests/hollow_card). Not modelled, because small or not documented: partial sums of norms' weight gradients,
sorting's scratch.
"""

from __future__ import annotations

import math

from fsdp_bench.simulate.operators.kernels import FP32, INT64, Kernels


def efficient_backward_workspace(batch: int, heads: int, length: int, head_dim: int) -> int:
    """Return what memory-efficient attention's backward in fp32 adds up the queries' gradient in, in bytes.

    kernel_backward.h (AttentionBackwardKernel::Params::workspace_elements_gq): for each block of 64 queries tiles of 64
    or 128 columns with a lock and a counter. Read from torch's memory history on the stand-in for an H200.
    """
    columns = 64 if head_dim <= 64 else 128
    tile_bytes = 64 * columns * FP32 + 16
    return batch * heads * -(-length // 64) * -(-head_dim // columns) * tile_bytes


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


def _num_splits(row_blocks: int, slots: int, key_blocks: int) -> int:
    """num_splits_heuristic (flash_api.cpp): the fewest splits within 85 % of the best use of the multiprocessors."""
    if row_blocks >= 0.8 * slots:
        return 1
    efficiency: dict[int, float] = {}
    for splits in range(1, min(128, slots, key_blocks) + 1):
        if splits == 1 or -(-key_blocks // splits) != -(-key_blocks // (splits - 1)):
            waves = row_blocks * splits / slots
            efficiency[splits] = waves / math.ceil(waves)
    return next(splits for splits, share in efficiency.items() if share >= 0.85 * max(efficiency.values()))


def _rounded_head(head_dim: int) -> int:
    return -(-head_dim // 32) * 32 if head_dim <= 192 else 256


def embedding_backward_workspace(num_indices: int, rows: int, width: int) -> list[int]:
    """Return what aten::embedding_dense_backward allocates beside its result.

    aten/native/cuda/Embedding.cu sorts above 3072 indices; EmbeddingBackwardKernel.cu then sums runs of ten indices
    in fp32 (NROWS_PER_THREAD, max_partial_segment).
    """
    if num_indices <= 3072:
        return []
    segments = min(num_indices, rows)
    partial = num_indices // 10 + segments
    indices = [num_indices * INT64] * 3 + [segments * INT64] * 2 + [partial * INT64]
    return [*indices, partial * width * FP32]


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


_REDUCE_THREADS, _WARP = 512, 32
_FEWEST_VALUES, _MOST_VALUES = 16, 256
"""That a thread is given."""


def _last_power(number: int, most: int) -> int:
    """Return the largest power of two that is not above a number, nor above ``most``, a power of two itself."""
    power = most
    while power > 1 and power > number:
        power //= 2
    return power
