"""Expandable segments: addresses for the whole GPU, and pages mapped to them as they are needed.

See Note [Expandable Segments] in torch's c10/cuda/CUDACachingAllocator.cpp; docstrings name its functions.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from fsdp_bench.replay.caching_allocator.allocator import (
    ADDRESS_MASK,
    MIN_BLOCK_BYTES,
    NUM_POOLS,
    SIZE_SHIFT,
    UNMAPPED,
    Block,
    CachingAllocator,
    page_bytes,
)

UNLIMITED = 1 << 58
"""Bytes of a GPU without limit."""


class ExpandableAllocator(CachingAllocator):
    """The allocator with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."""

    def __init__(self, gpu_bytes: int | None = None) -> None:
        super().__init__(gpu_bytes)
        self.smallest_rest = [MIN_BLOCK_BYTES] * NUM_POOLS
        self.unmapped: list[list[int]] = [[] for _ in range(NUM_POOLS)]
        """The first addresses of each pool's unmapped blocks, sorted."""
        self.unmapped_size: dict[int, int] = {}
        """By address."""

    def _take_best(self, pool: int, at: int, size: int) -> Block:
        """Take from the last block, from ``at`` on, before the size to which blocks can expand stops decreasing."""
        free = self.free_blocks[pool]
        expandable = self._expandable_bytes(free[at])
        for further in range(at + 1, len(free)):
            next_expandable = self._expandable_bytes(free[further])
            if next_expandable >= expandable:
                break
            at, expandable = further, next_expandable
        return self._take(pool, at, size)

    def _expandable_bytes(self, key: int) -> int:
        """Return the size of a free block plus the unmapped block after it: to what it can expand."""
        size = key >> SIZE_SHIFT
        return size + self.unmapped_size.get((key & ADDRESS_MASK) + size, 0)

    def _new_block(self, pool: int, size: int) -> Block | None:
        """Map pages until a sequence of free and unmapped blocks holds ``size``; try_allocate_expandable_block.

        Pages that were mapped before the GPU ran out of memory stay mapped, as in torch.
        """
        address = self._find_expandable_block(pool, size)
        key = self.edges.get(address, address)
        while (available := key >> SIZE_SHIFT) < size:
            unmapped = address + available
            mapped = self._map(pool, unmapped, min(size - available, self.unmapped_size[unmapped]))
            if mapped is None:
                return None
            key = mapped
        return self._take(pool, bisect_left(self.free_blocks[pool], key), size)

    def _find_expandable_block(self, pool: int, size: int) -> int:
        """Return where the lowest sequence of free and unmapped blocks that hold ``size`` begins, or a new segment.

        A segment has addresses for 1 1/8 of the GPU (ExpandableSegment's constructor).
        """
        for unmapped in self.unmapped[pool]:
            first = end = self.edges.get(unmapped, unmapped) & ADDRESS_MASK
            while end - first < size and (length := self._bytes_at(end)):
                end += length
            if end - first >= size:
                return first
        page = page_bytes(pool)
        wanted = UNLIMITED if self.gpu_bytes is None else self.gpu_bytes + self.gpu_bytes // 8
        num_bytes = -(-wanted // page) * page
        address = self.new_segment(num_bytes, page)
        self._insert_unmapped(address, num_bytes, pool)
        return address

    def _bytes_at(self, address: int) -> int:
        """Return the size of the free or unmapped block that begins at an address; 0 where none does."""
        key = self.edges.get(address, 0)
        return key >> SIZE_SHIFT if key & ADDRESS_MASK == address else self.unmapped_size.get(address, 0)

    def _map(self, pool: int, address: int, size: int) -> int | None:
        """Map pages to the first ``size`` bytes of an unmapped block; map_block, ExpandableSegment::map.

        Returns the free block that holds them, or None where the GPU is out of memory.
        """
        page = page_bytes(pool)
        num_bytes = -(-size // page) * page
        if not self.reserve(num_bytes):
            return None
        rest = self._remove_unmapped(address, pool) - num_bytes
        if rest > 0:
            self._insert_unmapped(address + num_bytes, rest, pool)
        return self.insert_free(address, num_bytes, pool)

    def _release_blocks(self, pool: int) -> None:
        """Unmap each page that lies in a free block; release_blocks, unmap_block."""
        page = page_bytes(pool)
        for key in list(self.free_blocks[pool]):
            address, size = key & ADDRESS_MASK, key >> SIZE_SHIFT
            low, high = -(-address // page) * page, (address + size) // page * page
            if low < high:
                self.remove_free(key, pool)
                for begin, end in ((address, low), (high, address + size)):
                    if begin < end:
                        self.insert_free(begin, end - begin, pool)
                self.reserved -= high - low
                self._unmap(low, high, pool)

    def _unmap(self, begin: int, end: int, pool: int) -> None:
        """Merge unmapped pages with unmapped neighbours; a segment without mapped pages is gone."""
        if end in self.unmapped_size:
            end += self._remove_unmapped(end, pool)
        below = self.unmapped[pool][: bisect_left(self.unmapped[pool], begin)]
        if below and below[-1] + self.unmapped_size[below[-1]] == begin:
            begin = below[-1]
            self._remove_unmapped(begin, pool)
        if self.segments.get(begin) == end - begin:
            del self.segments[begin]
        else:
            self._insert_unmapped(begin, end - begin, pool)

    def pieces(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield unmapped blocks, too."""
        yield from super().pieces()
        for pool, addresses in enumerate(self.unmapped):
            for address in addresses:
                yield address, UNMAPPED, self.unmapped_size[address], pool

    def _insert_unmapped(self, address: int, size: int, pool: int) -> None:
        insort(self.unmapped[pool], address)
        self.unmapped_size[address] = size

    def _remove_unmapped(self, address: int, pool: int) -> int:
        self.unmapped[pool].remove(address)
        return self.unmapped_size.pop(address)
