"""The state of the caching allocator in one array of integers, and where each number is in it.

It is one array because numba compiles that well (compiled.py). Its sections:

    totals, and numbers by pool or stream    at the indexes named below
    rows                                     arrays of CAPACITY entries each, for a pool or a stream: row()
    a record for each block                  heap[block + SIZE] and so on; a block is the index of its record
    the block of each tensor                 from the index heap[BLOCKS_OF] on
"""

from __future__ import annotations

from array import array
from collections.abc import MutableSequence

from fsdp_bench.simulate.events import Queue, Stream

Heap = MutableSequence[int]

NUM_STREAMS = len(Stream)
NUM_QUEUES = len(Queue)
MAX_EVENTS = 4096
"""The most CUDA events of one queue that are recorded and not waited for yet."""
NUM_POOLS = 2 * NUM_STREAMS
"""Each stream has a pool for large blocks, ``2 * stream``, and one for small blocks, ``2 * stream + 1``."""

UNLIMITED = 1 << 58
"""GPU_BYTES of a GPU without limit."""

GPU_BYTES = 0
"""Bytes that cudaMalloc and cuMemCreate can give this process."""
IS_EXPANDABLE = 1
LAUNCH = 2
"""Nanoseconds that the host needs to issue an operator or a collective."""
HOST = 3
"""The host's clock, in nanoseconds."""
CAPACITY = 4
"""The number of blocks for which there is space."""
BLOCKS_OF = 5
"""Index of the first tensor's entry, its block: 0 for a freed tensor, NO_MEMORY for one without bytes."""
DEVICE = 6
"""When the device will have done all work that was issued to it."""
ALLOCATED, PEAK_ALLOCATED = 7, 8
ACTIVE, PEAK_ACTIVE = 9, 10
RESERVED, PEAK_RESERVED = 11, 12
NUM_RETRIES, NUM_OOMS = 13, 14
NEXT_ADDRESS = 15
"""New addresses only grow, while the driver uses old ones again. They decide only between free blocks of equal size, of
which the one with the lowest address is taken."""
NEXT_BLOCK = 16
NUM_SPARE = 17
NEXT_READY = 18
"""The earliest time at which a deferred free can complete; malloc need not look for any before that."""
MOST_BLOCKS = 19
"""The number of blocks above which an allocation could exceed CAPACITY. It makes up to three; with expandable segments
a flush can also split each free block in three."""

NUM_FREE = 20
"""[pool]: its number of free blocks."""
NUM_UNMAPPED = NUM_FREE + NUM_POOLS
FIRST_QUEUED = NUM_UNMAPPED + NUM_POOLS
"""[stream]: the head of its queue of deferred frees, a ring buffer."""
NUM_QUEUED = FIRST_QUEUED + NUM_STREAMS
FIRST_EVENT = NUM_QUEUED + NUM_STREAMS
"""[queue]: the head of its recorded events, a ring buffer of MAX_EVENTS."""
NUM_PENDING = FIRST_EVENT + NUM_QUEUES
EVENT_TIMES = NUM_PENDING + NUM_QUEUES
ROWS = EVENT_TIMES + NUM_QUEUES * MAX_EVENTS

FREE_ROW = 0
"""[pool]: its free blocks by size, of equal ones by address."""
UNMAPPED_ROW = FREE_ROW + NUM_POOLS
"""[pool]: by address."""
READY_ROW = UNMAPPED_ROW + NUM_POOLS
"""[stream]: when each of its deferred frees may complete; the blocks are in BLOCK_ROW."""
BLOCK_ROW = READY_ROW + NUM_STREAMS
SPARE_ROW = BLOCK_ROW + NUM_STREAMS
"""Records of merged or released blocks, to be used again."""
NUM_ROWS = SPARE_ROW + 1

ADDRESS, SIZE = 0, 1
BEFORE, AFTER = 2, 3
"""The neighbours below and above in the segment; 0 is none."""
POOL = 4
STATE = 5
USES = 6
"""Other streams that use it (stream_uses): a bit for each."""
NUM_EVENTS = 7
"""Outstanding events that defer its release (event_count)."""
BLOCK_FIELDS = 8

IN_USE, FREE, UNMAPPED = 0, 1, 2
"""States of a block. One whose free is deferred is still IN_USE; FREE blocks are in their pool's set; UNMAPPED ones are
addresses of an expandable segment without physical memory."""

NO_MEMORY = -1

NEVER = 1 << 62

FIRST_ADDRESS = 20 << 20

_ZEROS = array("q", bytes(8 * 1024))


def fresh_heap(
    gpu_bytes: int | None,
    is_expandable: bool,
    launch_nanoseconds: int,
    capacity: int,
    num_tensors: int,
) -> array[int]:
    """Return an empty heap for ``capacity`` blocks and ``num_tensors`` tensors; ``gpu_bytes`` of None is no limit."""
    records = ROWS + NUM_ROWS * capacity
    tensors = records + BLOCK_FIELDS * capacity
    heap = _ZEROS * ((tensors + num_tensors) // len(_ZEROS) + 1)
    heap[GPU_BYTES] = UNLIMITED if gpu_bytes is None else gpu_bytes
    heap[IS_EXPANDABLE] = is_expandable
    heap[LAUNCH] = launch_nanoseconds
    heap[CAPACITY] = capacity
    heap[MOST_BLOCKS] = capacity // 3 - 1 if is_expandable else capacity - 3
    heap[BLOCKS_OF] = tensors
    heap[NEXT_READY] = NEVER
    heap[NEXT_ADDRESS] = FIRST_ADDRESS
    heap[NEXT_BLOCK] = records
    return heap


def row(heap: Heap, number: int) -> int:
    """Return where a row begins."""
    return ROWS + number * heap[CAPACITY]


def insert(heap: Heap, begin: int, count: int, at: int, value: int) -> None:
    """Insert a value into a row of ``count`` entries."""
    for place in range(begin + count, begin + at, -1):
        heap[place] = heap[place - 1]
    heap[begin + at] = value


def delete(heap: Heap, begin: int, count: int, at: int) -> None:
    """Remove a value from a row of ``count`` entries."""
    for place in range(begin + at, begin + count - 1):
        heap[place] = heap[place + 1]


def num_blocks(heap: Heap) -> int:
    """Return how many blocks there are."""
    return (heap[NEXT_BLOCK] - row(heap, NUM_ROWS)) // BLOCK_FIELDS - heap[NUM_SPARE]


def new_block(heap: Heap, address: int, size: int, pool: int) -> int:
    """Return a block without neighbours."""
    if heap[NUM_SPARE] > 0:
        heap[NUM_SPARE] -= 1
        block = heap[row(heap, SPARE_ROW) + heap[NUM_SPARE]]
    else:
        block = heap[NEXT_BLOCK]
        heap[NEXT_BLOCK] += BLOCK_FIELDS
    heap[block + ADDRESS] = address
    heap[block + SIZE] = size
    heap[block + BEFORE] = 0
    heap[block + AFTER] = 0
    heap[block + POOL] = pool
    heap[block + STATE] = IN_USE
    heap[block + USES] = 0
    heap[block + NUM_EVENTS] = 0
    return block


def drop_block(heap: Heap, block: int) -> None:
    """Drop a block that became part of another one, or was released."""
    heap[row(heap, SPARE_ROW) + heap[NUM_SPARE]] = block
    heap[NUM_SPARE] += 1


def link(heap: Heap, block: int, before: int, after: int) -> None:
    """Put a block between two neighbours; Block::splice."""
    heap[block + BEFORE] = before
    heap[block + AFTER] = after
    if before:
        heap[before + AFTER] = block
    if after:
        heap[after + BEFORE] = block


def absorb_before(heap: Heap, block: int, before: int) -> None:
    """Make the neighbour below a part of a block."""
    heap[block + ADDRESS] = heap[before + ADDRESS]
    heap[block + SIZE] += heap[before + SIZE]
    link(heap, block, heap[before + BEFORE], heap[block + AFTER])
    drop_block(heap, before)


def absorb_after(heap: Heap, block: int, after: int) -> None:
    """Make the neighbour above a part of a block."""
    heap[block + SIZE] += heap[after + SIZE]
    link(heap, block, heap[block + BEFORE], heap[after + AFTER])
    drop_block(heap, after)


def reserve(heap: Heap, num_bytes: int) -> bool:
    """Reserve physical memory; return False where the GPU has none left (cudaErrorMemoryAllocation)."""
    reserved = heap[RESERVED] + num_bytes
    if reserved > heap[GPU_BYTES]:
        return False
    heap[RESERVED] = reserved
    if reserved > heap[PEAK_RESERVED]:
        heap[PEAK_RESERVED] = reserved
    return True


def fresh_addresses(heap: Heap, num_bytes: int, alignment: int) -> int:
    """Reserve a new range of addresses, and return its start."""
    address = -(-heap[NEXT_ADDRESS] // alignment) * alignment
    heap[NEXT_ADDRESS] = address + num_bytes
    return address
