"""The caching allocator's replay against numbers worked out by hand from torch's rules.

The rules (c10/cuda/CUDACachingAllocator.cpp, c10/core/AllocatorConfig.h), named in the tests that rest on them:

    round_size            up to a multiple of 512
    get_pool              small up to 1 MiB after rounding, else large
    get_allocation_size   small: 2 MiB; below 10 MiB: 20 MiB; else up to a multiple of 2 MiB
    should_split          small or expandable: the rest is at least 512; large: the rest is more than 1 MiB
    get_free_block        the smallest free block of the pool and stream that fits, of equal ones the lowest

tests/gpu/test_on_gpu.py compares drawn steps with PyTorch's own allocator, on a GPU and on the stand-in.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import chain, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_bench.replay.caching_allocator.allocator import CachingAllocator, execute, wait
from fsdp_bench.replay.caching_allocator.blocks import pool_of, rounded
from fsdp_bench.replay.caching_allocator.expandable_segments import ExpandableAllocator
from fsdp_bench.replay.caching_allocator.program import program
from fsdp_bench.replay.caching_allocator.replay import AllocatorReading, OutOfMemory, Replay
from fsdp_bench.simulate.events import Event, Kind, Queue, Stream, Work
from fsdp_bench.simulate.repeat import Log


def log_of(events: Iterable[Event], num_blocks: int = 0, extra_blocks: int = 0) -> Log:
    """Return events as the log of one step."""
    listed = list(events)
    return Log(listed, [range(len(listed))], num_blocks, extra_blocks)


def replay(
    events: Log | Iterable[Event], gpu_bytes: int | None = None, expandable_segments: bool = False
) -> AllocatorReading:
    """Run events, or a log, through a fresh allocator."""
    found = program(events if isinstance(events, Log) else log_of(events))
    assert found is not None
    return Replay(found, gpu_bytes, expandable_segments).until()


MIB = 1 << 20

COUNTERS = {
    "active": lambda allocator: allocator.allocated + allocator.deferred_bytes,
    "retries": lambda allocator: allocator.num_retries * MIB,
}
"""Counters that are no attribute of the allocator, in bytes."""


def bytes_of(size: str) -> int:
    """Return 10 MiB less 512 bytes of ``10-512``."""
    mib, more = re.fullmatch(r"([\d.]+)([+-]\d+)?", size).groups()
    return int(float(mib) * MIB) + int(more or 0)


class Steps:
    """Calls of the allocator, one a word; tensors are 0, 1, ... in the order in which they were allocated.

    12  0+100  9@1  24!  allocates MiB, and bytes more; on stream 1; and finds no memory for it
    -3                   frees tensor 3
    use3@1               notes that stream 1 uses tensor 3
    record0  wait0       records an event in a queue; lets the host wait for it
    launch32             launches operators
    complete             the next event has happened
    empty                empties the cache
    reserved=20          is a check in MiB (of retries: their number)
    at4=3+10             checks where tensor 4 is: 10 MiB behind where tensor 3 was
    """

    def __init__(self, allocator: CachingAllocator) -> None:
        self.allocator = allocator
        self.addresses: list[int] = []

    def run(self, words: str) -> None:
        for word in words.split():
            name, _, value = word.partition("=")
            if name.startswith("at"):
                before, more = re.fullmatch(r"(\d+)(?:\+(\d+))?", value).groups()
                expected = self.addresses[int(before)] + int(more or 0) * MIB
                assert self.addresses[int(name[2:])] == expected, word
            elif value:
                found = COUNTERS[name](self.allocator) if name in COUNTERS else getattr(self.allocator, name)
                assert found == bytes_of(value), f"{word}, found {found / MIB}, after {words}"
            else:
                self._call(word)

    def _call(self, word: str) -> None:
        name, number, stream = re.fullmatch(
            r"(-|use|record|wait|complete|empty|launch|)([\d.+-]*!?)(?:@(\d))?", word
        ).groups()
        if name == "-":
            self.allocator.free(int(number))
        elif name == "use":
            self.allocator.record_stream(int(number), int(stream))
        elif name in ("record", "wait"):
            wait(self.allocator, Kind.RECORD_EVENT if name == "record" else Kind.HOST_WAIT, int(number))
        elif name == "launch":
            wait(self.allocator, Kind.KERNEL, int(number))
        elif name == "complete":
            self.allocator.num_completed += 1
        elif name == "empty":
            self.allocator.release_cached_blocks()
        else:
            tensor, size = len(self.addresses), rounded(bytes_of(number.rstrip("!")))
            fits = self.allocator.allocate(tensor, size, pool_of(size, int(stream or 0)))
            assert fits == (not number.endswith("!")), word
            if fits:
                self.addresses.append(self.allocator.blocks[tensor].address)


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        ("0+1", "0+512", 2),
        ("0+512", "0+512", 2),
        ("0+513", "0+1024", 2),
        ("1", "1", 2),  # the largest small one
        ("1+1", "1+512", 20),  # large, split: 19 MiB - 512 are more than 1 MiB
        ("10-512", "10-512", 20),
        ("10", "10", 10),  # from kMinLargeAlloc on: a multiple of 2 MiB
        ("10+1", "10+512", 12),  # the rest is 2 MiB - 512, more than 1 MiB: split
        ("11-512", "11-512", 12),  # the rest is 1 MiB + 512: split
        ("11", "12", 12),  # the rest is exactly 1 MiB: not split, the block is the segment
        ("100", "100", 100),
    ],
)
def test_the_first_allocation_is_rounded_and_its_segment_sized_by_the_pool(
    size: str, allocated: str, reserved: int
) -> None:
    words = f"{size} allocated={allocated} active={allocated} reserved={reserved}"
    words += f" -0 allocated=0 active=0 reserved={reserved} empty reserved=0"
    words += f" peak_allocated={allocated} peak_reserved={reserved} retries=0"
    Steps(CachingAllocator()).run(words)


def test_freeing_what_is_not_alive_is_an_error() -> None:
    with pytest.raises(KeyError):
        CachingAllocator().free(7)


FIXED = {
    "an empty tensor has no memory": "0 use0@1 -0 peak_reserved=0",  # NativeCachingAllocator::allocate, recordStream
    "small tensors share a segment until it is full": f"{'0+100 ' * 4096} allocated=2 reserved=2 0+100 reserved=4",
    "small and large blocks do not share": "20 -0 1 reserved=22 -1 20 1+1 reserved=42",
    # first fit would put 14 into 30 and need a fourth segment
    "best fit takes the smallest block that holds it": "12 30 20 -0 -1 -2 14 30 12 allocated=56 reserved=62",
    "the lowest of equal blocks is taken": "20 20 -1 -0 13 at2=0",  # BlockComparatorSize: size, then address
    # 7 fits neither the hole of 6 nor the 2 at the end
    "a hole between live blocks is fragmentation": "6 6 6 reserved=20 -1 7 allocated=19 reserved=40",
    # 6+6+2 merge into 14; 13 takes it whole, because the rest of 1 MiB is not split
    "freed neighbours merge with what is before": "6 6 6 -1 -2 13 allocated=20 reserved=20",
    "freed neighbours merge with what is behind": "6 6 6 -2 -1 13 allocated=20 reserved=20",
    "a stream does not reuse another one's block": "20 -0 20@1 reserved=40 20 reserved=40",
    # recordStream, insert_events, process_events
    "a use on its own stream defers nothing": "20 use0@0 -0 active=0 20 reserved=20",
    "a freed block stays active until the other stream is known to be past it": (
        "20 use0@1 -0 allocated=0 active=20 20 reserved=40 peak_active=40 peak_allocated=20"
    ),
    "waiting for a later event frees it": "20 use0@1 -0 record0 wait0 20 reserved=20",
    "waiting for an event recorded before the free does not": "20 use0@1 record0 -0 wait0 20 reserved=40",
    "an older event takes nothing back": "20 20 use0@1 -0 record0 use1@1 -1 record1 wait1 wait0 20 20 reserved=40",
    "1,024 launches later it has happened": "20 use0@1 launch40 -0 launch1023 20 reserved=40 launch1 20 reserved=40",
    "two uses of one block are two events": "20 use0@1 use0@2 -0 complete 20 reserved=40 complete 20 reserved=40",
    # try_merge_blocks leaves a neighbour with event_count > 0: of 6+6+8 in a segment 14 merge, too few for 15
    "a deferred block does not merge": "6 6 use0@1 -0 -1 15 reserved=36",
    "a segment whose end is free is not returned": "6 6 -0 empty reserved=20",
    "a segment whose beginning is free is not returned": "6 6 -1 empty reserved=20",
    # where expandable ones need 60 and 100
    "a segment does not grow": "30 -0 50 reserved=80",
    "blocks do not tile across segments": f"{'12+512 ' * 7} reserved=98",
}
ON_40_MIB = {
    # alloc_block, release_cached_blocks (synchronize_and_free_events), alloc_block again
    "a retry waits for deferred frees": "20 use0@1 -0 30 retries=1 active=30 reserved=30",
    "a retry returns cached segments and is counted once": "30 -0 36 retries=1 reserved=36 peak_reserved=36",
    # all of release_blocks' unsplit segments, not only enough: 12 + 12 + 2
    "a retry returns every cached segment of every stream and pool": (
        "12 1 12@1 -0 -1 -2 reserved=26 16 retries=1 reserved=16"
    ),
    # 6 in a segment of 20 keep 14 that 24 cannot use
    "a segment in use is not returned": "6 24! retries=1 allocated=6 20 reserved=40",
    "the last byte of the card can be had": "30 10 retries=0",
}
EXPANDABLE = {
    # find_expandable_block, map_block, unmap_block; pages of 20 MiB (large pool) and 2 MiB (small pool)
    # 30: two pages; after its free 50 needs 10 more than these 40: one page
    "a segment grows": "30 reserved=40 -0 50 reserved=60",
    "blocks of 30 MiB tile across pages": f"{'30 ' * 7} reserved=220",  # 210 MiB: 11 pages
    "other blocks do, too": f"{'12+512 ' * 7} reserved=100",  # 84 MiB and 3.5 KiB: 5 pages
    "small pages are two MiB": "1 0.5 0.5 0.25 reserved=4",
    "any rest is split off": "11 9-512 allocated=20-512 reserved=20",  # should_split: 512 bytes are left
    # get_free_block compares expandable sizes: of 8, 10, 13 in two pages 9 are left at the end, and a freed 10; 9 goes
    # into 10 although 9 fits better, so that a following 10 has to map a third page
    "the block that could expand is taken last": "8 10 13 reserved=40 -1 9 10 reserved=60",
    "the lowest of equal blocks that cannot expand is taken": "10 10 10 10 10 -3 -1 10 at5=1",
    **{
        # unmap_block merges what it unmaps with the gaps beside it: 60 before the fourth page
        f"pages unmapped in the order {first} {second} {third} become one gap": (
            f"20 20 20 20 -{first} empty -{second} empty -{third} empty reserved=20 60 at4=0 reserved=80"
            " -4 -3 empty reserved=0"
        )
        for first, second, third in permutations(range(3))
    },
}
ON_60_MIB = {
    # the 40 is freed: the second and third page are empty, the first is not; another flush, then both again
    "a retry unmaps empty pages only and grows again from the gap": (
        "10 40 reserved=60 -1 40@1 retries=1 reserved=60 10 2! -2 40 retries=3 at4=3+10 allocated=60 reserved=60"
    )
}
HOLES = f"{'13 ' * 20} {' '.join(f'-{tensor}' for tensor in range(0, 20, 2))}"
"""Every second of 20 blocks of 13 MiB is freed."""


@pytest.mark.parametrize(
    ("allocator", "mib", "words"),
    [
        pytest.param(allocator, mib, words, id=f"{allocator.__name__}-{name}")
        for allocator, mib, cases in (
            (CachingAllocator, None, FIXED),
            (CachingAllocator, 40, ON_40_MIB),
            (ExpandableAllocator, None, EXPANDABLE),
            (ExpandableAllocator, 60, ON_60_MIB),
            # 60 + 56 is too much for fixed segments; 62 in pages are 80
            (CachingAllocator, 100, {"fixed segments run out": "60 -0 6 56!"}),
            (ExpandableAllocator, 100, {"where expandable ones do not": "60 -0 6 56"}),
            # fixed: 20 segments of 14 without a split, ten go back, 140 + 280 fit
            (CachingAllocator, 420, {"fixed segments do not run out": f"{HOLES} 280"}),
            # 13 pages of 20, none of which lies in a hole of 13, so that 260 stay
            (ExpandableAllocator, 420, {"where expandable ones do": f"{HOLES} 280!"}),
        )
        for name, words in cases.items()
    ],
)
def test_steps_allocate_and_reserve_what_the_rules_say(
    allocator: type[CachingAllocator], mib: int | None, words: str
) -> None:
    Steps(allocator(None if mib is None else mib * MIB)).run(words)


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

    def later(*held: list[Event], further_steps: int = 2) -> tuple[int, int | None, int]:
        begin, end = (Event(Kind.MARK, -1, label=label) for label in ("forward", "optimizer"))
        steps = [[begin, *each, end, *hold(1)] for each in held]
        events = [event for one in steps for event in one]
        ranges = [range(sum(map(len, steps[:index])), sum(map(len, steps[: index + 1]))) for index in range(len(steps))]
        reading = replay(Log(events, ranges, 0, 0, further_steps=further_steps), 64 * MIB)
        return reading.num_alloc_retries, reading.num_retries_later, reading.retried_bytes_later // MIB

    assert later(hold(40), hold(40)) == (0, 0, 0)
    assert later(hold(30), hold(40)) == (1, 0, 0)  # 40 takes the place of 30, and stays
    both = [*hold(40), *hold(40, Stream.ALL_GATHER)]  # each sends the other's back to CUDA, in every step
    # ... with the 2 of the small pool at the first of each step
    assert later(both, both) == (1 + 3 * 2, 2, 40 + 2 + 40)
    assert later(both, both, further_steps=0) == (1 + 2, None, 0)  # nothing says that a third is like the second


SIZES = st.one_of(
    st.integers(0, 4096), st.integers(MIB - 600, MIB + 600), st.integers(MIB, 40 * MIB), st.sampled_from([9, 13, 20])
)
STEPS = st.lists(st.tuples(st.integers(0, 9), SIZES, st.integers(0, 2)), max_size=80)


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


@given(STEPS, st.sampled_from([CachingAllocator, ExpandableAllocator]))
def test_bytes_add_up_after_every_event(steps: list[tuple[int, int, int]], kind: type[CachingAllocator]) -> None:
    """Requested are within allocated, active and reserved; blocks tile their segments; all freed, nothing is left."""
    allocator, found, requested = kind(), program(log_of(events_from(steps))), dict[int, int]()
    for instruction in chain(*found.instructions):
        assert execute(allocator, [instruction], 0) is None
        event = found.events[instruction[-1]]
        if event.kind is Kind.ALLOCATE:
            requested[instruction[1]] = event.num_bytes
        elif event.kind is Kind.FREE:
            del requested[instruction[1]]
        active = allocator.allocated + allocator.deferred_bytes
        assert sum(requested.values()) <= allocator.allocated <= active <= allocator.reserved <= allocator.peak_reserved
        assert allocator.reserved % (2 * MIB) == 0
    assert allocator.peak_allocated <= allocator.peak_active <= allocator.peak_reserved
    assert allocator.num_retries == 0
    assert_tiled(allocator)
    for tensor in requested:
        allocator.free(tensor)
    allocator.release_cached_blocks()
    assert (allocator.allocated, allocator.deferred_bytes, allocator.reserved) == (0, 0, 0)


def assert_tiled(allocator: CachingAllocator) -> None:
    """Check that blocks fill each segment, and that no two free or unmapped ones touch."""
    blocks = {block.address: block for block, _ in allocator.pieces() if block.size}
    assert sum(block.size for block in blocks.values() if not block.is_unmapped) == allocator.reserved
    for block in blocks.values():
        behind = blocks.get(block.address + block.size)
        if block.after is not None:
            assert block.after is behind
            assert behind.before is block
            assert not (block.is_free and behind.is_free)
            assert not (block.is_unmapped and behind.is_unmapped)
        elif behind is not None:
            assert behind.before is None


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
