"""Expandable segments: addresses for the whole GPU, and pages mapped to them as they are needed.

See Note [Expandable Segments] in torch's c10/cuda/CUDACachingAllocator.cpp; docstrings name its functions.
"""

from __future__ import annotations

from bisect import insort
from operator import attrgetter

from fsdp_bench.replay.caching_allocator.allocator import UNMAPPED, CachingAllocator
from fsdp_bench.replay.caching_allocator.blocks import NUM_POOLS, Block, BlockPool, page_bytes

UNLIMITED = 1 << 58
"""Bytes of a GPU without limit."""

_ADDRESS = attrgetter("address")


class ExpandableAllocator(CachingAllocator):
    """The allocator with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."""

    def __init__(self, gpu_bytes: int | None = None) -> None:
        super().__init__(gpu_bytes)
        self.largest_kept_rest = 0
        self.unmapped: list[list[Block]] = [[] for _ in range(NUM_POOLS)]
        """Each pool's unmapped blocks, by address."""

    def best(self, free: BlockPool, at: int) -> int:
        """Return the last block, from ``at`` on, before the size to which blocks can expand stops decreasing."""
        blocks = free.blocks
        expandable = _expandable_bytes(blocks[at])
        for further in range(at + 1, len(blocks)):
            next_expandable = _expandable_bytes(blocks[further])
            if next_expandable >= expandable:
                break
            at, expandable = further, next_expandable
        return at

    def new_block(self, pool: int, size: int) -> Block | None:
        """Map pages until a sequence of free and unmapped blocks holds ``size``; try_allocate_expandable_block.

        Pages that were mapped before the GPU ran out of memory stay mapped, as in torch.
        """
        block = self._find_expandable_block(pool, size)
        while block.is_unmapped or block.size < size:
            unmapped = block if block.is_unmapped else block.after
            assert unmapped is not None
            missing = size if block.is_unmapped else size - block.size
            mapped = self._map(unmapped, min(missing, unmapped.size))
            if mapped is None:
                return None
            block = mapped
        free = self.pools[pool]
        return self.take(free, free.first(block.size, block.address), size)

    def _find_expandable_block(self, pool: int, size: int) -> Block:
        """Return where the lowest sequence of free and unmapped blocks that hold ``size`` begins, or a new segment.

        A segment has addresses for 1 1/8 of the GPU (ExpandableSegment's constructor).
        """
        for unmapped in self.unmapped[pool]:
            before = unmapped.before
            first = unmapped if before is None or not before.is_free else before
            found, block = first.size, first.after
            while found < size and block is not None and (block.is_free or block.is_unmapped):
                found += block.size
                block = block.after
            if found >= size:
                return first
        page = page_bytes(pool)
        wanted = UNLIMITED if self.gpu_bytes is None else self.gpu_bytes + self.gpu_bytes // 8
        segment = self.new_segment(-(-wanted // page) * page, page, pool)
        segment.is_unmapped = True
        self.unmapped[pool].append(segment)
        return segment

    def _map(self, block: Block, size: int) -> Block | None:
        """Map pages to the first ``size`` bytes of an unmapped block; map_block, ExpandableSegment::map.

        Returns the free block that holds them, or None where the GPU is out of memory.
        """
        page = page_bytes(block.pool)
        num_bytes = -(-size // page) * page
        if not self.reserve(num_bytes):
            return None
        unmapped = self.unmapped[block.pool]
        unmapped.remove(block)
        if num_bytes < block.size:
            insort(unmapped, block.cut(num_bytes), key=_ADDRESS)
        block.is_unmapped = False
        return self.insert_free(block)

    def release_blocks(self, free: BlockPool) -> None:
        """Unmap each page that lies in a free block; release_blocks, unmap_block."""
        for block in free.blocks.copy():
            page, end = page_bytes(block.pool), block.address + block.size
            low, high = -(-block.address // page) * page, end // page * page
            if low < high:
                free.remove(block)
                pages = block
                if block.address < low:
                    pages = block.cut(low - block.address)
                    free.insert(block)
                if high < end:
                    free.insert(pages.cut(high - low))
                self.reserved -= high - low
                self._unmap(pages)

    def _unmap(self, block: Block) -> None:
        """Merge unmapped pages with unmapped neighbours; a segment without mapped pages is gone."""
        unmapped = self.unmapped[block.pool]
        block.is_free, block.is_unmapped = False, True
        after, before = block.after, block.before
        if after is not None and after.is_unmapped:
            unmapped.remove(after)
            block.absorb(after)
        if before is not None and before.is_unmapped:
            unmapped.remove(before)
            before.absorb(block)
            block = before
        if block.before is not None or block.after is not None:
            insort(unmapped, block, key=_ADDRESS)

    def pieces(self) -> list[tuple[Block, int]]:
        """Return unmapped blocks, too."""
        return [*super().pieces(), *((block, UNMAPPED) for pool in self.unmapped for block in pool)]


def _expandable_bytes(block: Block) -> int:
    """Return the size of a free block plus the unmapped block after it: to what it can expand."""
    after = block.after
    return block.size + (after.size if after is not None and after.is_unmapped else 0)
