"""Workspaces of attention's kernels on CUDA: what they allocate beside their results, in bytes.

Read from PyTorch's source (aten/src/ATen, main between 2.10 and 2.13), and from its memory history on the stand-in for
NVIDIA's libraries (fsdp_bench/rehearse).
"""

from __future__ import annotations

import math

from fsdp_bench.simulate.operators.kernels import FP32


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
    return next(splits for splits, fraction in efficiency.items() if fraction >= 0.85 * max(efficiency.values()))


def _rounded_head(head_dim: int) -> int:
    return -(-head_dim // 32) * 32 if head_dim <= 192 else 256
