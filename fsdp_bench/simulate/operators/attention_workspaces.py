"""Workspaces of attention's kernels on CUDA: what they allocate beside their results, in bytes.

Read from PyTorch's source (aten/src/ATen, main between 2.10 and 2.13), and from its memory history on the stand-in for
NVIDIA's libraries (fsdp_bench/rehearse).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from fsdp_bench.simulate.operators.kernels import FP32, Passing
from fsdp_bench.spec.hardware import FIRST_WITH_FLASH_ATTENTION


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

    Args:
        batch: sequences.
        heads: of the queries.
        length: of the queries.
        keys: how many.
        dims: the sizes of a head of queries and keys, and of values.
        itemsize: bytes of an element of the inputs.
        compute_capability: of the GPU, 7.0 or newer.
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

    Args:
        batch: sequences.
        heads: of the queries.
        length: of the queries.
        dim: the size of a head of the values.
        itemsize: bytes of an element of the inputs.
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

    Args:
        out_numel: elements of the output.
        dims: the sizes of a head of queries and keys, and of values.
        itemsize: bytes of an element of the inputs.
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
