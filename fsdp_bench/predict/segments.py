"""Blocks, and the pools that hold the free ones: the memory side of the CUDA caching allocator.

The rules are those of class DeviceCachingAllocator in torch's c10/cuda/CUDACachingAllocator.cpp, read in a copy of
pytorch/pytorch's main between 2.10 and 2.12; docstrings name its functions. The constants are those of
c10/core/AllocatorConfig.h as installed with torch 2.13.0. Every setting of PYTORCH_CUDA_ALLOC_CONF but
``expandable_segments`` has its default: unlimited max_split_size_mb, no roundup_power2_divisions, no
garbage_collection_threshold, large_segment_size of 20 MiB.

A pool here is what torch's BlockPool holds for one stream: BlockComparatorSize orders by stream first and
get_free_block never crosses to another one, so a set for each is the same thing.
"""

from __future__ import annotations

from bisect import bisect_left, insort

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

_ADDRESS_BITS = 64
_UNLIMITED_ADDRESS_BYTES = 1 << 46


def segment_bytes(size: int) -> int:
    """Bytes that cudaMalloc is asked for when no free block holds ``size`` bytes; get_allocation_size."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < MIN_LARGE_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size // LARGE_ROUND_BYTES) * LARGE_ROUND_BYTES


class Card:
    """What cudaMalloc and cuMemCreate may hand out to this process, and what they did.

    Addresses only grow and are not used twice. The driver does use them again; they matter only between free blocks of
    one size, of which the lowest is taken.
    """

    __slots__ = ("_next_address", "card_bytes", "peak_reserved_bytes", "reserved_bytes")

    def __init__(self, card_bytes: int | None) -> None:
        self.card_bytes = card_bytes
        self.reserved_bytes = 0
        self.peak_reserved_bytes = 0
        self._next_address = LARGE_SEGMENT_BYTES

    def reserve(self, num_bytes: int) -> bool:
        """Takes physical memory; False where the card has no more (cudaErrorMemoryAllocation)."""
        reserved = self.reserved_bytes + num_bytes
        if self.card_bytes is not None and reserved > self.card_bytes:
            return False
        self.reserved_bytes = reserved
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, reserved)
        return True

    def give_back(self, num_bytes: int) -> None:
        """Returns physical memory: cudaFree, cuMemUnmap."""
        self.reserved_bytes -= num_bytes

    def addresses(self, num_bytes: int, alignment: int = SMALL_SEGMENT_BYTES) -> int:
        """The first of ``num_bytes`` fresh addresses, a multiple of ``alignment``."""
        address = -(-self._next_address // alignment) * alignment
        self._next_address = address + num_bytes
        return address

    def address_space_bytes(self) -> int:
        """Address space of one expandable segment: 1 1/8 of the card (ExpandableSegment's constructor)."""
        return _UNLIMITED_ADDRESS_BYTES if self.card_bytes is None else self.card_bytes + self.card_bytes // 8


class Block:
    """A piece of a segment; its neighbours there are ``before`` and ``after``."""

    __slots__ = ("address", "after", "before", "is_free", "is_mapped", "num_events", "pool", "size", "uses")

    def __init__(self, address: int, size: int, pool: SegmentPool) -> None:
        self.address = address
        self.size = size
        self.pool = pool
        self.before: Block | None = None
        self.after: Block | None = None
        self.is_free = False
        """In its pool: mapped, not allocated, and no outstanding event defers its release."""
        self.is_mapped = True
        """Physical memory stands behind it; False only for the rest of an expandable segment's addresses."""
        self.uses: set[int] | None = None
        """Other streams that use it (stream_uses)."""
        self.num_events = 0
        """Outstanding events that defer its release (event_count)."""

    def link(self, before: Block | None, after: Block | None) -> None:
        """Puts itself between two neighbours; Block::splice."""
        self.before, self.after = before, after
        if before is not None:
            before.after = self
        if after is not None:
            after.before = self


class SegmentPool:
    """The free blocks of one size class and one stream; its segments come from cudaMalloc and keep their size."""

    __slots__ = ("_card", "_free", "_keys", "_min_rest", "stream")
    # _keys are the free blocks' sizes and addresses, sorted; _free the blocks in the same order.

    def __init__(self, card: Card, stream: int, is_small: bool) -> None:
        self.stream = stream
        self._card = card
        self._keys: list[int] = []
        self._free: list[Block] = []
        self._min_rest = MIN_BLOCK_BYTES if is_small else SMALL_BYTES + 1
        """should_split: the rest becomes a block of its own from this size on."""

    def take(self, size: int) -> Block | None:
        """A free block for ``size`` bytes, the rest split off, or None; get_free_block, alloc_found_block.

        Best fit: the smallest that holds them, of equal ones the lowest (lower_bound under BlockComparatorSize).
        """
        keys = self._keys
        at = bisect_left(keys, size << _ADDRESS_BITS)
        if at == len(keys):
            return None
        del keys[at]
        return self._split(self._free.pop(at), size)

    def grow(self, size: int) -> Block | None:
        """A block of new memory from cudaMalloc, or None where the card has none; the last branch of alloc_block."""
        num_bytes = segment_bytes(size)
        if not self._card.reserve(num_bytes):
            return None
        return self._split(Block(self._card.addresses(num_bytes), num_bytes, self), size)

    def put(self, block: Block) -> None:
        """Takes a block back, merged with its free neighbours; free_block, try_merge_blocks."""
        before = block.before
        if before is not None and before.is_free:
            self._remove(before)
            block.address = before.address
            block.size += before.size
            outer = block.before = before.before
            if outer is not None:
                outer.after = block
        after = block.after
        if after is not None and after.is_free:
            self._remove(after)
            block.size += after.size
            outer = block.after = after.after
            if outer is not None:
                outer.before = block
        self._add(block)

    def trim(self) -> None:
        """Returns the segments that are one free block to the card; release_blocks, release_block."""
        for block in list(self._free):
            if block.before is None and block.after is None:
                self._remove(block)
                self._card.give_back(block.size)

    def _split(self, block: Block, size: int) -> Block:
        """The front of ``block``, which is not in the set, for the request; the rest goes into the set."""
        rest = block.size - size
        if rest < self._min_rest:
            block.is_free = False
            return block
        front = Block(block.address, size, self)
        before = front.before = block.before
        if before is not None:
            before.after = front
        front.after = block
        block.before = front
        block.address += size
        block.size = rest
        self._add(block)
        return front

    def _add(self, block: Block) -> None:
        key = block.size << _ADDRESS_BITS | block.address
        at = bisect_left(self._keys, key)
        self._keys.insert(at, key)
        self._free.insert(at, block)
        block.is_free = True

    def _remove(self, block: Block) -> None:
        at = bisect_left(self._keys, block.size << _ADDRESS_BITS | block.address)
        del self._keys[at], self._free[at]
        block.is_free = False


class ExpandablePool(SegmentPool):
    """A pool whose segments reserve addresses for the whole card and map pages behind them as they grow.

    Note [Expandable Segments]; pages of 2 MiB in the small pool and 20 MiB in the large one.
    """

    __slots__ = ("_page_bytes", "_unmapped")

    def __init__(self, card: Card, stream: int, is_small: bool) -> None:
        super().__init__(card, stream, is_small)
        self._min_rest = MIN_BLOCK_BYTES
        self._page_bytes = SMALL_SEGMENT_BYTES if is_small else LARGE_SEGMENT_BYTES
        self._unmapped: list[Block] = []

    def take(self, size: int) -> Block | None:
        """Best fit by the size that a block can expand to: get_free_block's walk behind lower_bound."""
        keys, free = self._keys, self._free
        at = bisect_left(keys, size << _ADDRESS_BITS)
        if at == len(keys):
            return None
        room = _expandable_bytes(free[at])
        while at + 1 < len(keys) and (next_room := _expandable_bytes(free[at + 1])) < room:
            at, room = at + 1, next_room
        del keys[at]
        return self._split(free.pop(at), size)

    def grow(self, size: int) -> Block | None:
        """Maps pages until a run of free and unmapped blocks holds ``size``; try_allocate_expandable_block.

        Pages that were mapped before the card ran out stay mapped, as in torch.
        """
        block = self._find_room(size)
        if not block.is_mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            rest = block.after
            assert rest is not None
            assert not rest.is_mapped
            if not self._map(rest, min(size - block.size, rest.size)):
                return None
            block = rest
        self._remove(block)
        return self._split(block, size)

    def trim(self) -> None:
        """Unmaps every page that lies wholly in a free block; release_blocks, unmap_block."""
        page = self._page_bytes
        for block in list(self._free):
            begin = -(-block.address // page) * page
            end = (block.address + block.size) // page * page
            if begin < end:
                self._unmap(block, begin, end)

    def _find_room(self, size: int) -> Block:
        """The lowest block from which free and unmapped ones hold ``size``, or a new segment; find_expandable_block."""
        for unmapped in self._unmapped:
            before = unmapped.before
            first = before if before is not None and before.is_free else unmapped
            if _free_run_bytes(first, size) >= size:
                return first
        page = self._page_bytes
        num_bytes = -(-self._card.address_space_bytes() // page) * page
        segment = Block(self._card.addresses(num_bytes, page), num_bytes, self)
        self._add_unmapped(segment)
        return segment

    def _map(self, block: Block, size: int) -> bool:
        """Puts pages behind the first ``size`` bytes of an unmapped block; map_block, ExpandableSegment::map."""
        num_bytes = -(-size // self._page_bytes) * self._page_bytes
        if num_bytes == 0 or not self._card.reserve(num_bytes):
            return False
        self._unmapped.remove(block)
        block.is_mapped = True
        if num_bytes < block.size:
            rest = Block(block.address + num_bytes, block.size - num_bytes, self)
            rest.link(block, block.after)
            self._add_unmapped(rest)
            block.size = num_bytes
        self.put(block)
        return True

    def _unmap(self, block: Block, begin: int, end: int) -> None:
        """Takes the pages from ``begin`` to ``end`` out of a free block; what is left on either side stays free."""
        self._remove(block)
        if block.address < begin:
            front = Block(block.address, begin - block.address, self)
            front.link(block.before, block)
            self._add(front)
        tail_bytes = block.address + block.size - end
        if tail_bytes > 0:
            tail = Block(end, tail_bytes, self)
            tail.link(block, block.after)
            self._add(tail)
        block.address, block.size = begin, end - begin
        self._card.give_back(end - begin)
        self._merge_unmapped(block)
        if block.before is not None or block.after is not None:
            self._add_unmapped(block)

    def _merge_unmapped(self, block: Block) -> None:
        """try_merge_blocks for a block whose pages are gone."""
        before, after = block.before, block.after
        if before is not None and not before.is_mapped:
            self._unmapped.remove(before)
            block.address = before.address
            block.size += before.size
            block.link(before.before, after)
        if after is not None and not after.is_mapped:
            self._unmapped.remove(after)
            block.size += after.size
            block.link(block.before, after.after)

    def _add_unmapped(self, block: Block) -> None:
        block.is_mapped = False
        insort(self._unmapped, block, key=_address)


def _address(block: Block) -> int:
    return block.address


def _expandable_bytes(block: Block) -> int:
    after = block.after
    return block.size if after is None or after.is_mapped else block.size + after.size


def _free_run_bytes(block: Block | None, enough: int) -> int:
    """Bytes of the free and unmapped blocks from ``block`` on, counted until they are ``enough``."""
    room = 0
    while room < enough and block is not None and (block.is_free or not block.is_mapped):
        room += block.size
        block = block.after
    return room
