"""The memory of one device as its caching allocator sees it, in one array of integers, and how that is laid out.

One array, because that is what numba compiles well (compiled.py), and a search over many models needs it.

    totals, then one number for each pool or stream      at the places that are named below
    rows of as many places as there may be blocks        row()
    a record for each block                              heap[block + SIZE]: a block is the place of its record
    for each tensor its block                            heap[BLOCKS_OF]: where they begin
"""

from __future__ import annotations

from array import array
from collections.abc import MutableSequence

Heap = MutableSequence[int]

NUM_STREAMS = 5
"""events.Stream."""
NUM_QUEUES = 4
"""events.Queue."""
MAX_EVENTS = 4096
"""CUDA events of one queue that nobody has waited for."""
NUM_POOLS = 2 * NUM_STREAMS
"""A stream has two: ``2 * stream`` for large blocks, and the next one for small ones."""

UNLIMITED = 1 << 58
"""GPU_BYTES of a GPU without limit; an expandable segment of each of the pools has as many addresses."""

GPU_BYTES = 0
"""What cudaMalloc and cuMemCreate may hand out to this process."""
IS_EXPANDABLE = 1
LAUNCH = 2
"""Nanoseconds that the host needs to issue an operator or a collective."""
HOST = 3
"""The host's clock, in nanoseconds."""
CAPACITY = 4
"""How many blocks there may be."""
BLOCKS_OF = 5
"""Where the tensors' blocks begin: 0 for a tensor that is not alive, NO_MEMORY for one without bytes."""
DEVICE = 6
"""When the device is done with all that it was given."""
ALLOCATED, PEAK_ALLOCATED = 7, 8
ACTIVE, PEAK_ACTIVE = 9, 10
RESERVED, PEAK_RESERVED = 11, 12
NUM_RETRIES, NUM_OOMS = 13, 14
NEXT_ADDRESS = 15
"""Addresses only grow and are not used twice. The driver does use them again; they matter only between free blocks of
one size, of which the lowest is taken."""
NEXT_BLOCK = 16
NUM_SPARE = 17
NEXT_READY = 18
"""No deferred free happens before; malloc need not look again until then."""
MOST_BLOCKS = 19
"""With which there is room for those that an allocation makes: three, growing and splitting; in expandable segments a
flush can also cut each free block in three."""

NUM_FREE = 20
"""[pool]."""
NUM_UNMAPPED = NUM_FREE + NUM_POOLS
FIRST_QUEUED = NUM_UNMAPPED + NUM_POOLS
"""[stream]: where its queue of deferred frees begins; queues are rings."""
NUM_QUEUED = FIRST_QUEUED + NUM_STREAMS
FIRST_EVENT = NUM_QUEUED + NUM_STREAMS
"""[queue]: where its recorded events begin; rings of MAX_EVENTS."""
NUM_WAITING = FIRST_EVENT + NUM_QUEUES
EVENT_TIMES = NUM_WAITING + NUM_QUEUES
ROWS = EVENT_TIMES + NUM_QUEUES * MAX_EVENTS

FREE_ROW = 0
"""[pool]: its free blocks by size, of equal ones by address."""
UNMAPPED_ROW = FREE_ROW + NUM_POOLS
"""[pool]: by address."""
READY_ROW = UNMAPPED_ROW + NUM_POOLS
"""[stream]: when each of its deferred frees may happen; in BLOCK_ROW the blocks."""
BLOCK_ROW = READY_ROW + NUM_STREAMS
SPARE_ROW = BLOCK_ROW + NUM_STREAMS
"""Records of blocks that are no more."""
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
"""States. In use is also what was freed while another stream may use it. FREE ones are in their pool's set. UNMAPPED is
what is left of an expandable segment's addresses: no physical memory stands behind it."""

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
    """Return a heap with room for so many blocks and tensors; no ``gpu_bytes`` is a GPU without limit."""
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
    """Put a value into a row of ``count``."""
    for place in range(begin + count, begin + at, -1):
        heap[place] = heap[place - 1]
    heap[begin + at] = value


def delete(heap: Heap, begin: int, count: int, at: int) -> None:
    """Take a value out of a row of ``count``."""
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
    """Forget a block that became a part of another one."""
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
    """Take physical memory; False where the GPU has no more (cudaErrorMemoryAllocation)."""
    reserved = heap[RESERVED] + num_bytes
    if reserved > heap[GPU_BYTES]:
        return False
    heap[RESERVED] = reserved
    if reserved > heap[PEAK_RESERVED]:
        heap[PEAK_RESERVED] = reserved
    return True


def fresh_addresses(heap: Heap, num_bytes: int, alignment: int) -> int:
    """Return the first of so many addresses."""
    address = -(-heap[NEXT_ADDRESS] // alignment) * alignment
    heap[NEXT_ADDRESS] = address + num_bytes
    return address
