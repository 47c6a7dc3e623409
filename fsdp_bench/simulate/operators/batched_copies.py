"""Arguments of FSDP2's batched copies on a GPU: addresses and sizes, packed into one tensor of int64.

aten/native/cuda/TensorShape.cu, pack_vecs: the host fills it, moves it to the GPU, and the kernel's blocks of threads
look up which tensor they are to copy. It is freed with the call, but in a pool of small tensors it can be what makes
the allocator reserve one more segment.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fsdp_bench.simulate.operators.kernels import INT64, Kernels

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
