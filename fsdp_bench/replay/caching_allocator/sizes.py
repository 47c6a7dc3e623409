"""Sizes in which the caching allocator rounds requests and asks the GPU for segments and pages.

The constants are those of c10/core/AllocatorConfig.h as installed with torch 2.13.0. Every setting of
PYTORCH_CUDA_ALLOC_CONF but ``expandable_segments`` has its default: unlimited max_split_size_mb, no
roundup_power2_divisions, no garbage_collection_threshold, large_segment_size of 20 MiB.
"""

from __future__ import annotations

MIN_BLOCK_BYTES = 512
"""kMinBlockSize: every size is rounded up to a multiple of it."""
SMALL_BYTES = 1 << 20
"""kSmallSize: the largest block of the small pool."""
SMALL_SEGMENT_BYTES = 2 << 20
"""kSmallBuffer: the small pool's segments, and the pages of its expandable segments."""
LARGE_SEGMENT_BYTES = 20 << 20
"""large_segment_size: segments for requests below MIN_LARGE_BYTES, and the pages of large expandable segments."""
MIN_LARGE_BYTES = 10 << 20
"""kMinLargeAlloc: from here on a request has a segment of its own size."""
LARGE_ROUND_BYTES = 2 << 20
"""kRoundLarge: such a segment is a multiple of it."""


def rounded(num_bytes: int) -> int:
    """Return the size of the block for a request; round_size."""
    return -(-num_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES


def pool_of(size: int, stream: int) -> int:
    """Return the pool of a block of this size on a stream; get_pool."""
    return 2 * stream + (size <= SMALL_BYTES)


def segment_bytes(size: int) -> int:
    """Return what cudaMalloc is asked for when no free block holds ``size`` bytes; get_allocation_size."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < MIN_LARGE_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size // LARGE_ROUND_BYTES) * LARGE_ROUND_BYTES


def page_bytes(pool: int) -> int:
    """Return the page of a pool's segments: 2 MiB in a small one, 20 MiB in a large one."""
    return SMALL_SEGMENT_BYTES if pool % 2 == 1 else LARGE_SEGMENT_BYTES
