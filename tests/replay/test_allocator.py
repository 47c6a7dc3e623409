"""The caching allocator's replay against numbers worked out by hand from torch's rules.

The rules (c10/cuda/CUDACachingAllocator.cpp, c10/core/AllocatorConfig.h), named in the tests that rest on them:

    round_size            up to a multiple of 512
    get_pool              small up to 1 MiB after rounding, else large
    get_allocation_size   small: 2 MiB; below 10 MiB: 20 MiB; else up to a multiple of 2 MiB
    should_split          small or expandable: the rest is at least 512; large: the rest is more than 1 MiB
    get_free_block        the smallest free block of the pool and stream that fits, of equal ones the lowest
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_bench.replay.caching_allocator.replay import OutOfMemory
from fsdp_bench.simulate.events import Event, Kind, Queue, Stream, Work
from fsdp_bench.simulate.repeat import Log
from tests.replay.call_by_call import Block, CachingAllocator
from tests.replay.replaying import replay

MIB = 1 << 20
COMPUTE, SIDE, THIRD = 0, 1, 2


def allocator_with(*mib: float, card_mib: int | None = None, expandable: bool = False) -> CachingAllocator:
    """Tensors 0, 1, ... of these MiB, allocated in order on the compute stream."""
    allocator = CachingAllocator(None if card_mib is None else card_mib * MIB, expandable_segments=expandable)
    for tensor, size in enumerate(mib):
        assert allocator.allocate(tensor, int(size * MIB))
    return allocator


@pytest.mark.parametrize(
    ("num_bytes", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),  # the largest small one
        (MIB + 1, MIB + 512, 20 * MIB),  # large, split: 19 MiB - 512 are more than 1 MiB
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),  # from kMinLargeAlloc on: a multiple of 2 MiB
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),  # the rest is 2 MiB - 512, more than 1 MiB: split
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),  # the rest is 1 MiB + 512: split
        (11 * MIB, 12 * MIB, 12 * MIB),  # the rest is exactly 1 MiB: not split, the block is the segment
        (100 * MIB, 100 * MIB, 100 * MIB),
    ],
)
def test_the_first_allocation_is_rounded_and_its_segment_sized_by_the_pool(
    num_bytes: int, allocated: int, reserved: int
) -> None:
    allocator = CachingAllocator()
    assert allocator.allocate(0, num_bytes)
    assert (allocator.allocated_bytes, allocator.active_bytes) == (allocated, allocated)
    assert allocator.reserved_bytes == reserved
    allocator.free(0)
    assert (allocator.allocated_bytes, allocator.active_bytes, allocator.reserved_bytes) == (0, 0, reserved)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0
    assert allocator.peak_allocated_bytes == allocated
    assert allocator.peak_reserved_bytes == reserved
    assert allocator.num_alloc_retries == 0


def test_an_empty_tensor_has_no_memory() -> None:
    """NativeCachingAllocator::allocate returns a null pointer for size 0; recordStream ignores it."""
    allocator = CachingAllocator()
    assert allocator.allocate(0, 0)
    allocator.record_stream(0, SIDE)
    allocator.free(0)
    assert allocator.peak_reserved_bytes == 0


def test_freeing_what_is_not_alive_is_an_error() -> None:
    with pytest.raises(KeyError):
        CachingAllocator().free(7)


def test_small_tensors_share_a_segment_until_it_is_full() -> None:
    """4096 blocks of 512 bytes fill 2 MiB; the next one needs another segment."""
    allocator = CachingAllocator()
    for tensor in range(4096):
        allocator.allocate(tensor, 100)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (2 * MIB, 2 * MIB)
    allocator.allocate(4096, 100)
    assert allocator.reserved_bytes == 4 * MIB


def test_small_and_large_blocks_do_not_share() -> None:
    """A free large block of 20 MiB does not serve a request of 1 MiB, nor a free small segment one of 1 MiB + 512."""
    allocator = allocator_with(20)
    allocator.free(0)
    allocator.allocate(1, MIB)
    assert allocator.reserved_bytes == 22 * MIB
    allocator.free(1)
    allocator.allocate(2, 20 * MIB)
    allocator.allocate(3, MIB + 1)
    assert allocator.reserved_bytes == 42 * MIB


def test_best_fit_takes_the_smallest_block_that_holds_the_request() -> None:
    """14 goes into 20, so that 30 still finds 30; first fit would put it into 30 and need a fourth segment."""
    allocator = allocator_with(12, 30, 20)
    for tensor in range(3):
        allocator.free(tensor)
    allocator.allocate(3, 14 * MIB)
    allocator.allocate(4, 30 * MIB)
    allocator.allocate(5, 12 * MIB)
    assert allocator.allocated_bytes == 56 * MIB
    assert allocator.reserved_bytes == 62 * MIB


def test_the_lowest_of_equal_blocks_is_taken() -> None:
    """BlockComparatorSize: size, then address. Two segments of 20; 13 must come from the first, whose rest is 7."""
    allocator = allocator_with(20, 20)
    first = address(allocator, 0)
    allocator.free(1)
    allocator.free(0)
    allocator.allocate(2, 13 * MIB)
    assert address(allocator, 2) == first


def test_a_hole_between_live_blocks_is_fragmentation() -> None:
    """6+6+6 in a 20 MiB segment, the middle one freed: 7 fits neither 6 nor the 2 at the end. 8 MiB free, 20 more."""
    allocator = allocator_with(6, 6, 6)
    assert allocator.reserved_bytes == 20 * MIB
    allocator.free(1)
    allocator.allocate(3, 7 * MIB)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (19 * MIB, 40 * MIB)


def test_freed_neighbours_merge_on_both_sides() -> None:
    """The same with the last one freed too: 6+6+2 merge into 14; 13 takes it whole, the rest of 1 MiB is not split."""
    for order in ((1, 2), (2, 1)):
        allocator = allocator_with(6, 6, 6)
        for tensor in order:
            allocator.free(tensor)
        allocator.allocate(3, 13 * MIB)
        assert (allocator.allocated_bytes, allocator.reserved_bytes) == (20 * MIB, 20 * MIB)


def test_a_stream_does_not_reuse_another_ones_block() -> None:
    allocator = allocator_with(20)
    allocator.free(0)
    allocator.allocate(1, 20 * MIB, SIDE)
    assert allocator.reserved_bytes == 40 * MIB
    allocator.allocate(2, 20 * MIB, COMPUTE)
    assert allocator.reserved_bytes == 40 * MIB


class TestDeferredFrees:
    """recordStream, insert_events, process_events."""

    @staticmethod
    def freed_while_used(*streams: int) -> CachingAllocator:
        allocator = CachingAllocator()
        allocator.allocate(0, 20 * MIB, COMPUTE)
        for stream in streams:
            allocator.record_stream(0, stream)
        allocator.free(0)
        return allocator

    @staticmethod
    def reserved_after_another(allocator: CachingAllocator) -> int:
        allocator.allocate(1, 20 * MIB, COMPUTE)
        return allocator.reserved_bytes // MIB

    def test_a_use_on_its_own_stream_defers_nothing(self) -> None:
        allocator = self.freed_while_used(COMPUTE)
        assert allocator.active_bytes == 0
        assert self.reserved_after_another(allocator) == 20

    def test_a_freed_block_stays_active_until_the_other_stream_is_known_to_be_past_it(self) -> None:
        allocator = self.freed_while_used(SIDE)
        assert (allocator.allocated_bytes, allocator.active_bytes) == (0, 20 * MIB)
        assert self.reserved_after_another(allocator) == 40
        assert allocator.peak_active_bytes == 40 * MIB
        assert allocator.peak_allocated_bytes == 20 * MIB

    def test_waiting_for_a_later_event_frees_it(self) -> None:
        allocator = self.freed_while_used(SIDE)
        allocator.record_event(0)
        allocator.host_wait(0)
        assert self.reserved_after_another(allocator) == 20

    def test_waiting_for_an_event_recorded_before_the_free_does_not(self) -> None:
        allocator = CachingAllocator()
        allocator.allocate(0, 20 * MIB, COMPUTE)
        allocator.record_stream(0, SIDE)
        allocator.record_event(0)
        allocator.free(0)
        allocator.host_wait(0)
        assert self.reserved_after_another(allocator) == 40

    def test_an_older_event_takes_nothing_back(self) -> None:
        allocator = allocator_with(20, 20)
        for tensor in range(2):
            allocator.record_stream(tensor, SIDE)
            allocator.free(tensor)
            allocator.record_event(tensor)
        allocator.host_wait(1)
        allocator.host_wait(0)
        allocator.allocate(2, 20 * MIB)
        allocator.allocate(3, 20 * MIB)
        assert allocator.reserved_bytes == 40 * MIB

    def test_two_uses_of_one_block_are_two_events(self) -> None:
        allocator = self.freed_while_used(SIDE, THIRD)
        allocator.state.num_completed += 1  # the first of the two events
        assert self.reserved_after_another(allocator) == 40
        allocator.state.num_completed += 1
        allocator.allocate(2, 20 * MIB)
        assert allocator.reserved_bytes == 40 * MIB

    def test_a_deferred_block_does_not_merge(self) -> None:
        """try_merge_blocks leaves a neighbour with event_count > 0: of 6+6+8 in a segment 14 merge, too few for 15."""
        allocator = allocator_with(6, 6)
        allocator.record_stream(0, SIDE)
        allocator.free(0)
        allocator.free(1)
        allocator.allocate(2, 15 * MIB)
        assert allocator.reserved_bytes == 36 * MIB

    def test_the_retry_waits_for_all_of_them(self) -> None:
        """synchronize_and_free_events, then the unsplit segment goes back to the card and 30 fits on 40."""
        allocator = CachingAllocator(40 * MIB)
        allocator.allocate(0, 20 * MIB)
        allocator.record_stream(0, SIDE)
        allocator.free(0)
        assert allocator.allocate(1, 30 * MIB)
        assert allocator.num_alloc_retries == 1
        assert allocator.active_bytes == allocator.reserved_bytes == 30 * MIB


class TestAFullCard:
    """alloc_block, release_cached_blocks, alloc_block again."""

    def test_a_retry_returns_cached_segments_and_is_counted_once(self) -> None:
        allocator = allocator_with(30, card_mib=40)
        allocator.free(0)
        assert allocator.allocate(1, 36 * MIB)
        assert allocator.num_alloc_retries == 1
        assert allocator.reserved_bytes == allocator.peak_reserved_bytes == 36 * MIB

    def test_a_retry_returns_every_cached_segment_of_every_stream_and_pool(self) -> None:
        """It frees all of release_blocks' unsplit segments, not only enough: 12 + 12 + 2 go, 36 is left."""
        allocator = allocator_with(12, 1, card_mib=40)
        allocator.allocate(2, 12 * MIB, SIDE)
        for tensor in range(3):
            allocator.free(tensor)
        assert allocator.reserved_bytes == 26 * MIB
        assert allocator.allocate(3, 16 * MIB)
        assert allocator.num_alloc_retries == 1
        assert allocator.reserved_bytes == 16 * MIB

    def test_a_segment_in_use_is_not_returned(self) -> None:
        """6 in a segment of 20 keep 14 that 24 cannot use: out of memory with 6 of 40 MiB allocated."""
        allocator = allocator_with(6, card_mib=40)
        assert not allocator.allocate(1, 24 * MIB)
        assert allocator.num_alloc_retries == 1
        assert allocator.allocated_bytes == 6 * MIB
        assert allocator.allocate(1, 20 * MIB)
        assert allocator.reserved_bytes == 40 * MIB

    @pytest.mark.parametrize("freed", [0, 1])
    def test_a_segment_with_one_free_end_is_not_returned(self, freed: int) -> None:
        allocator = allocator_with(6, 6)
        allocator.free(freed)
        allocator.empty_cache()
        assert allocator.reserved_bytes == 20 * MIB

    def test_the_last_byte_of_the_card_can_be_had(self) -> None:
        assert allocator_with(30, 10, card_mib=40).num_alloc_retries == 0


class TestExpandableSegments:
    """find_expandable_block, map_block, unmap_block; pages of 20 MiB (large pool) and 2 MiB (small pool)."""

    def test_a_segment_grows_where_another_one_would_be_needed(self) -> None:
        """30: two pages. After its free 50 needs 10 more than these 40: one page. Fixed segments: 30 + 50."""
        growing, fixed = allocator_with(30, expandable=True), allocator_with(30)
        assert growing.reserved_bytes == 40 * MIB
        for allocator in (growing, fixed):
            allocator.free(0)
            allocator.allocate(1, 50 * MIB)
        assert growing.reserved_bytes == 60 * MIB
        assert fixed.reserved_bytes == 80 * MIB

    def test_blocks_tile_across_pages(self) -> None:
        """Seven of 30 MiB are 210: 11 pages. Seven of 12 MiB + 512: 84 MiB and 3.5 KiB, 5 pages; fixed: seven of 14."""
        assert allocator_with(*[30] * 7, expandable=True).reserved_bytes == 220 * MIB
        size = 12 + 512 / MIB
        assert allocator_with(*[size] * 7, expandable=True).reserved_bytes == 100 * MIB
        assert allocator_with(*[size] * 7).reserved_bytes == 98 * MIB

    def test_small_pages_are_two_mib(self) -> None:
        assert allocator_with(1, 0.5, 0.5, 0.25, expandable=True).reserved_bytes == 4 * MIB

    def test_any_rest_is_split_off(self) -> None:
        """should_split with expandable segments: 11 MiB of a page leave 9, of which 9 - 512 B leave 512 B."""
        allocator = allocator_with(11, 9 - 512 / MIB, expandable=True)
        assert allocator.allocated_bytes == 20 * MIB - 512
        assert allocator.reserved_bytes == 20 * MIB

    def test_the_block_that_could_expand_is_taken_last(self) -> None:
        """8, 10, 13 in two pages leave 9 at the end; with the 10 freed, 9 goes into 10 although 9 fits better.

        So a following 10 has to map a third page (get_free_block compares expandable sizes).
        """
        allocator = allocator_with(8, 10, 13, expandable=True)
        assert allocator.reserved_bytes == 40 * MIB
        allocator.free(1)
        allocator.allocate(3, 9 * MIB)
        allocator.allocate(4, 10 * MIB)
        assert allocator.reserved_bytes == 60 * MIB

    def test_the_lowest_of_equal_blocks_is_taken(self) -> None:
        """Two holes of 10 that cannot expand, and a free end that is larger."""
        allocator = allocator_with(10, 10, 10, 10, 10, expandable=True)
        second = address(allocator, 1)
        allocator.free(3)
        allocator.free(1)
        allocator.allocate(5, 10 * MIB)
        assert address(allocator, 5) == second

    @pytest.mark.parametrize("order", list(permutations(range(3))))
    def test_unmapped_pages_become_one_gap(self, order: tuple[int, ...]) -> None:
        """unmap_block merges what it unmaps with the gaps beside it: 60 before the fourth page, the rest behind."""
        allocator = allocator_with(20, 20, 20, 20, expandable=True)
        for tensor in order:
            allocator.free(tensor)
            allocator.empty_cache()
        (chain,) = segments_of(allocator)
        assert [(block.size, block.is_mapped) for block in chain[:2]] == [(60 * MIB, False), (20 * MIB, True)]
        assert allocator.reserved_bytes == 20 * MIB
        allocator.free(3)
        allocator.empty_cache()
        assert allocator.reserved_bytes == 0

    def test_a_retry_unmaps_empty_pages_only_and_grows_again_from_the_gap(self) -> None:
        """10 and 40 in three pages; the 40 freed: the second and third page are empty, the first is not."""
        allocator = allocator_with(10, 40, card_mib=60, expandable=True)
        assert allocator.reserved_bytes == 60 * MIB
        allocator.free(1)
        assert allocator.allocate(2, 40 * MIB, SIDE)  # needs two pages
        assert (allocator.num_alloc_retries, allocator.reserved_bytes) == (1, 60 * MIB)
        assert allocator.allocate(3, 10 * MIB)  # the free half of the first page
        assert not allocator.allocate(4, 2 * MIB)
        allocator.free(2)
        assert allocator.allocate(4, 40 * MIB)  # another flush, then two pages behind the first again
        assert allocator.num_alloc_retries == 3
        assert address(allocator, 4) == address(allocator, 3) + 10 * MIB
        assert allocator.allocated_bytes == allocator.reserved_bytes == 60 * MIB

    def test_fixed_segments_run_out_where_expandable_ones_do_not(self) -> None:
        """6 in a former block of 60, then 56 on a card of 100: 60 + 56 is too much; 62 in pages are 80."""

        def fits(expandable: bool) -> bool:
            allocator = allocator_with(60, card_mib=100, expandable=expandable)
            allocator.free(0)
            allocator.allocate(1, 6 * MIB)
            return allocator.allocate(2, 56 * MIB)

        assert not fits(expandable=False)
        assert fits(expandable=True)

    def test_expandable_segments_run_out_where_fixed_ones_do_not(self) -> None:
        """20 blocks of 13 MiB, every second freed, then 280 on a card of 420.

        Fixed: 20 segments of 14 without a split, ten go back, 140 + 280 fit. Expandable: 13 pages of 20, none of which
        lies in a hole of 13, so 260 stay.
        """

        def fits(expandable: bool) -> bool:
            allocator = allocator_with(*[13] * 20, card_mib=420, expandable=expandable)
            for tensor in range(0, 20, 2):
                allocator.free(tensor)
            return allocator.allocate(20, 280 * MIB)

        assert fits(expandable=False)
        assert not fits(expandable=True)


def test_replay_reports_peaks_and_the_place_where_memory_ran_out() -> None:
    """40 on a card of 64: the second 40 does not fit; until then 40 allocated and reserved, one retry."""
    events = [
        Event(Kind.MARK, -1, label="forward"),
        Event(Kind.ALLOCATE, 0, 40 * MIB, label="aten::mm"),
        Event(Kind.MARK, 3, label="backward"),
        Event(Kind.ALLOCATE, 1, 40 * MIB, label="aten::add"),
        Event(Kind.FREE, 0, 40 * MIB),
        Event(Kind.FREE, 1, 40 * MIB),
    ]
    full = replay(events, 64 * MIB)
    assert full.out_of_memory == OutOfMemory("backward", 3, "aten::add", 40 * MIB)
    assert full.num_alloc_retries == 1
    assert full.peak_allocated_bytes == full.peak_reserved_bytes == 40 * MIB
    enough = replay(events)
    assert enough.out_of_memory is None
    assert enough.num_alloc_retries == 0
    assert enough.peak_allocated_bytes == enough.peak_reserved_bytes == enough.peak_active_bytes == 80 * MIB


def test_the_all_gathers_rate_limit_bounds_what_is_deferred() -> None:
    """FSDP1's order: gathered on its stream, used on compute, freed; the host waits two units back.

    A unit is used for a second. While one is in use only the one before it is outstanding, so ten units need two
    segments; without the waits ten. On a GPU of three every fourth allocation finds none: the 4th, 7th and 10th retry.
    """

    def units(waits: bool) -> Iterator[Event]:
        for unit in range(10):
            if waits and unit >= 2:
                yield Event(Kind.HOST_WAIT, Queue.FREE)
            yield Event(Kind.ALLOCATE, unit, 30 * MIB, stream=Stream.ALL_GATHER)
            yield Event(Kind.RECORD_STREAM, unit, stream=Stream.COMPUTE)
            yield Event(Kind.KERNEL, -1, work=Work("aten::mul"))
            yield Event(Kind.FREE, unit, 30 * MIB, stream=Stream.ALL_GATHER)
            yield Event(Kind.RECORD_EVENT, Queue.FREE, stream=Stream.COMPUTE)

    limited, free_running = replay(units(waits=True)), replay(units(waits=False))
    assert (limited.peak_allocated_bytes, limited.peak_reserved_bytes) == (30 * MIB, 60 * MIB)
    assert free_running.peak_reserved_bytes == free_running.peak_active_bytes == 300 * MIB
    assert replay(units(waits=False), 90 * MIB).num_alloc_retries == 3


def test_retries_that_go_on_are_told_from_those_of_the_first_steps() -> None:
    """On a card of 64, two steps and two like the second. No stream can use blocks that another one has freed."""

    def hold(mib: int, stream: Stream = Stream.COMPUTE) -> list[Event]:
        return [Event(kind, stream, mib * MIB, stream=stream) for kind in (Kind.ALLOCATE, Kind.FREE)]

    def later(*held: list[Event], further_steps: int = 2) -> tuple[int, int | None]:
        begin, end = (Event(Kind.MARK, -1, label=label) for label in ("forward", "optimizer"))
        steps = [[begin, *each, end, *hold(1)] for each in held]
        events = [event for one in steps for event in one]
        ranges = [range(sum(map(len, steps[:index])), sum(map(len, steps[: index + 1]))) for index in range(len(steps))]
        reading = replay(Log(events, ranges, 0, 0, further_steps=further_steps), 64 * MIB)
        return reading.num_alloc_retries, reading.num_retries_later

    assert later(hold(40), hold(40)) == (0, 0)
    assert later(hold(30), hold(40)) == (1, 0)  # 40 takes the place of 30, and stays
    both = [*hold(40), *hold(40, Stream.ALL_GATHER)]  # each sends the other's back to CUDA, in every step
    assert later(both, both) == (1 + 3 * 2, 2)
    assert later(both, both, further_steps=0) == (1 + 2, None)  # nothing says that a third is like the second


# Properties

SIZES = st.one_of(
    st.integers(0, 4096), st.integers(MIB - 600, MIB + 600), st.integers(MIB, 40 * MIB), st.sampled_from([9, 13, 20])
)
STEPS = st.lists(st.tuples(st.integers(0, 9), SIZES, st.integers(0, 2)), max_size=80)
OPTIONS = st.fixed_dictionaries({"expandable_segments": st.booleans()})


def events_from(steps: list[tuple[int, int, int]]) -> list[Event]:
    """A valid order of events: about half allocations, frees of a live tensor, and uses and waits between them."""
    events: list[Event] = []
    live: list[int] = []
    for index, (choice, size, stream) in enumerate(steps):
        where = Stream(stream)
        if choice < 5 or not live:
            events.append(Event(Kind.ALLOCATE, index, size, stream=where))
            live.append(index)
        elif choice < 8:
            events.append(Event(Kind.FREE, live.pop(size % len(live))))
        elif choice == 8:
            events.append(Event(Kind.RECORD_STREAM, live[size % len(live)], stream=where))
        else:
            work = Event(Kind.KERNEL, -1, stream=where, work=Work("aten::mul"))
            events += [work, Event(Kind.RECORD_EVENT, Queue.FREE, stream=where), Event(Kind.HOST_WAIT, Queue.FREE)]
    return events


def play(allocator: CachingAllocator, events: list[Event]) -> Iterator[Event]:
    for event in events:
        if event.kind is Kind.ALLOCATE:
            assert allocator.allocate(event.number, event.num_bytes, event.stream)
        elif event.kind is Kind.FREE:
            allocator.free(event.number)
        elif event.kind is Kind.RECORD_STREAM:
            allocator.record_stream(event.number, event.stream)
        elif event.kind is Kind.KERNEL:
            pass
        elif event.kind is Kind.RECORD_EVENT:
            allocator.record_event(event.number)
        else:
            allocator.host_wait(event.number)
        yield event


def live_blocks(allocator: CachingAllocator) -> dict[int, Block]:
    blocks = {tensor: allocator.block_of(tensor) for tensor in allocator.live}
    return {tensor: block for tensor, block in blocks.items() if block is not None}


def address(allocator: CachingAllocator, tensor: int) -> int:
    return live_blocks(allocator)[tensor].address


def segments_of(allocator: CachingAllocator) -> list[list[Block]]:
    """Every segment with a live block in it, its blocks from the lowest to the highest."""
    chains = [allocator.segment_of(block) for block in live_blocks(allocator).values()]
    return list({chain[0].address: chain for chain in chains}.values())


@given(STEPS, OPTIONS)
def test_allocated_is_within_active_is_within_reserved(
    steps: list[tuple[int, int, int]], options: dict[str, bool]
) -> None:
    allocator = CachingAllocator(**options)
    requested: dict[int, int] = {}
    for event in play(allocator, events_from(steps)):
        if event.kind is Kind.ALLOCATE:
            requested[event.number] = event.num_bytes
        elif event.kind is Kind.FREE:
            del requested[event.number]
        assert sum(requested.values()) <= allocator.allocated_bytes <= allocator.active_bytes
        assert allocator.active_bytes <= allocator.reserved_bytes <= allocator.peak_reserved_bytes
        assert allocator.reserved_bytes % (2 * MIB) == 0
    assert allocator.peak_allocated_bytes <= allocator.peak_active_bytes <= allocator.peak_reserved_bytes
    assert allocator.num_alloc_retries == 0


@given(STEPS, OPTIONS)
def test_blocks_tile_their_segments_and_no_two_free_ones_touch(
    steps: list[tuple[int, int, int]], options: dict[str, bool]
) -> None:
    allocator = CachingAllocator(**options)
    for _ in play(allocator, events_from(steps)):
        pass
    live = sorted((block.address, block.size) for block in live_blocks(allocator).values())
    assert all(low + size <= high for (low, size), (high, _) in pairwise(live))
    for chain in segments_of(allocator):
        assert sum(block.size for block in chain) % (2 * MIB) == 0
        for block, after in pairwise(chain):
            assert block.address + block.size == after.address
            assert block.size > 0
            assert not (block.is_free and after.is_free)
            assert block.is_mapped or after.is_mapped


@given(STEPS, OPTIONS)
def test_freeing_everything_and_emptying_the_cache_leaves_nothing(
    steps: list[tuple[int, int, int]], options: dict[str, bool]
) -> None:
    allocator = CachingAllocator(**options)
    for _ in play(allocator, events_from(steps)):
        pass
    for tensor in list(allocator.live):
        allocator.free(tensor)
    allocator.empty_cache()
    assert (allocator.allocated_bytes, allocator.active_bytes, allocator.reserved_bytes) == (0, 0, 0)


@given(STEPS, st.booleans())
def test_a_card_of_the_unlimited_peak_needs_no_retry_and_a_smaller_one_does(
    steps: list[tuple[int, int, int]], expandable: bool
) -> None:
    events = events_from(steps)
    unlimited = replay(events, expandable_segments=expandable)
    peak = unlimited.peak_reserved_bytes
    assert replay(events, peak, expandable) == unlimited
    if peak:
        short = replay(events, peak - 1, expandable)
        assert short.num_alloc_retries >= 1
        assert short.peak_reserved_bytes < peak


class Plain:
    """The rules for fixed segments once more, with searches over everything instead of sorted sets and links.

    A segment is [pool, address, sizes and owners of its blocks]; an owner is a tensor, None where free.
    """

    def __init__(self, gpu_bytes: int | None) -> None:
        self.gpu_bytes = gpu_bytes
        self.segments: list[tuple[tuple[bool, int], int, list[tuple[int, int | None]]]] = []
        self.next_address = 0
        self.retries = 0

    @property
    def reserved(self) -> int:
        return sum(size for *_, blocks in self.segments for size, _ in blocks)

    @property
    def allocated(self) -> int:
        return sum(size for *_, blocks in self.segments for size, owner in blocks if owner is not None)

    def allocate(self, tensor: int, num_bytes: int, stream: int) -> bool:
        if num_bytes == 0:
            return True
        size = max(512, (num_bytes + 511) // 512 * 512)
        pool = (size <= MIB, stream)
        fits = []
        for where, (owner_pool, start, blocks) in enumerate(self.segments):
            at = start
            for index, (block_size, owner) in enumerate(blocks):
                if owner_pool == pool and owner is None and block_size >= size:
                    fits.append((block_size, at, where, index))
                at += block_size
        if fits:
            _, _, where, index = min(fits)
        else:
            new = (
                2 * MIB if size <= MIB else 20 * MIB if size < 10 * MIB else (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
            )
            if self.gpu_bytes is not None and self.reserved + new > self.gpu_bytes:
                self.retries += 1
                self.segments = [s for s in self.segments if len(s[2]) > 1 or s[2][0][1] is not None]
                if self.reserved + new > self.gpu_bytes:
                    return False
            self.segments.append((pool, self.next_address, [(new, None)]))
            self.next_address += new
            where, index = len(self.segments) - 1, 0
        blocks = self.segments[where][2]
        rest = blocks[index][0] - size
        if rest >= 512 if pool[0] else rest > MIB:
            blocks[index : index + 1] = [(size, tensor), (rest, None)]
        else:
            blocks[index] = (blocks[index][0], tensor)
        return True

    def free(self, tensor: int) -> None:
        for *_, blocks in self.segments:
            merged: list[tuple[int, int | None]] = []
            for size, owner in blocks:
                left = None if owner == tensor else owner
                if merged and left is None and merged[-1][1] is None:
                    merged[-1] = (merged[-1][0] + size, None)
                else:
                    merged.append((size, left))
            blocks[:] = merged


@settings(max_examples=200)
@given(STEPS, st.one_of(st.none(), st.integers(0, 200)))
def test_the_allocator_agrees_with_a_plain_search_at_every_event(
    steps: list[tuple[int, int, int]], card_mib: int | None
) -> None:
    gpu_bytes = None if card_mib is None else card_mib * MIB
    allocator, plain = CachingAllocator(gpu_bytes), Plain(gpu_bytes)
    for event in events_from(steps):
        if event.kind is Kind.ALLOCATE:
            fitted = allocator.allocate(event.number, event.num_bytes, event.stream)
            assert fitted == plain.allocate(event.number, event.num_bytes, event.stream)
            if not fitted:
                return
        elif event.kind is Kind.FREE:
            allocator.free(event.number)
            plain.free(event.number)
        assert (allocator.allocated_bytes, allocator.reserved_bytes) == (plain.allocated, plain.reserved)
        assert allocator.num_alloc_retries == plain.retries


class PlainExpandable:
    """The rules for one pool of expandable segments once more: a list of (size, content) over endless addresses.

    Content is a tensor's number, FREE or GAP (not mapped). The list is rebuilt at every step.
    """

    FREE, GAP = -1, -2

    def __init__(self, page: int) -> None:
        self.page = page
        self.blocks: list[tuple[int, int]] = [(1 << 45, self.GAP)]

    def bytes_of(self, *excluded: int) -> int:
        return sum(size for size, content in self.blocks if content not in excluded)

    def allocate(self, tensor: int, size: int) -> None:
        start = self.start_in_free_block(size)
        if start is None:
            start = self.start_of_run(size)
        self.rewrite(start, start + size, tensor)

    def with_addresses(self) -> list[tuple[int, int, int]]:
        found, address = [], 0
        for size, content in self.blocks:
            found.append((address, size, content))
            address += size
        return found

    def start_in_free_block(self, size: int) -> int | None:
        blocks = self.with_addresses()
        fits = []
        for (address, length, content), (_, after, next_content) in pairwise(blocks):
            if content == self.FREE and length >= size:
                fits.append((length, address, length + (after if next_content == self.GAP else 0)))
        fits.sort()
        while len(fits) > 1 and fits[1][2] < fits[0][2]:
            del fits[0]
        return fits[0][1] if fits else None

    def start_of_run(self, size: int) -> int:
        blocks = self.with_addresses()
        for index, (_, _, content) in enumerate(blocks):
            if content != self.GAP:
                continue
            first = index - 1 if index and blocks[index - 1][2] == self.FREE else index
            run = 0
            for _, length, inside in blocks[first:]:
                if inside >= 0:
                    break
                run += length
            if run >= size:
                return blocks[first][0]
        raise AssertionError("the addresses do not end")

    def rewrite(self, start: int, end: int, tensor: int) -> None:
        """The tensor at [start, end); gaps that it reaches into are mapped up to the end of the last page."""
        pieces: list[tuple[int, int]] = []
        for low, size, content in self.with_addresses():
            high = low + size
            if high <= start or low >= end:
                pieces.append((size, content))
                continue
            pieces += [(start - low, content), (min(high, end) - max(low, start), tensor)]
            if content == self.GAP and high > end:
                mapped = -(-(end - low) // self.page) * self.page
                pieces += [(low + mapped - end, self.FREE), (high - low - mapped, self.GAP)]
            else:
                pieces.append((high - end, content))
        self.blocks = self.merged(pieces)

    def free(self, tensor: int) -> None:
        self.blocks = self.merged(
            [(size, self.FREE if content == tensor else content) for size, content in self.blocks]
        )

    def empty_cache(self) -> None:
        pieces: list[tuple[int, int]] = []
        for low, size, content in self.with_addresses():
            begin, end = -(-low // self.page) * self.page, (low + size) // self.page * self.page
            if content == self.FREE and begin < end:
                pieces += [(begin - low, self.FREE), (end - begin, self.GAP), (low + size - end, self.FREE)]
            else:
                pieces.append((size, content))
        self.blocks = self.merged(pieces)

    @staticmethod
    def merged(pieces: list[tuple[int, int]]) -> list[tuple[int, int]]:
        result: list[tuple[int, int]] = []
        for size, content in pieces:
            if size > 0 and result and result[-1][1] == content:
                result[-1] = (result[-1][0] + size, content)
            elif size > 0:
                result.append((size, content))
        return result


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(0, 9), SIZES), max_size=60))
def test_expandable_segments_agree_with_a_plain_list_at_every_step(steps: list[tuple[int, int]]) -> None:
    allocator = CachingAllocator(expandable_segments=True)
    pools = {True: PlainExpandable(2 * MIB), False: PlainExpandable(20 * MIB)}
    live: list[tuple[int, bool]] = []
    for index, (choice, num_bytes) in enumerate(steps):
        if choice == 0:
            allocator.empty_cache()
            for plain in pools.values():
                plain.empty_cache()
        elif choice < 6 or not live:
            size = max(1, -(-num_bytes // 512)) * 512
            allocator.allocate(index, size)
            pools[size <= MIB].allocate(index, size)
            live.append((index, size <= MIB))
        else:
            tensor, is_small = live.pop(num_bytes % len(live))
            allocator.free(tensor)
            pools[is_small].free(tensor)
        assert allocator.reserved_bytes == sum(plain.bytes_of(PlainExpandable.GAP) for plain in pools.values())
        assert allocator.allocated_bytes == sum(
            plain.bytes_of(PlainExpandable.GAP, PlainExpandable.FREE) for plain in pools.values()
        )
