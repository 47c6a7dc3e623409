"""The event vocabulary: one training step of one rank, in the order in which its Python thread issues it.

    ALLOCATE tensor bytes      a storage comes to life on the device
    FREE tensor                its last reference is gone
    RECORD_STREAM tensor       Tensor.record_stream: the storage is also used on ``stream``
    RECORD_EVENT               ``number`` names an event recorded on ``stream``
    HOST_WAIT                  the host waits until the event ``number`` has happened (Event.synchronize)
    SYNCHRONIZE                the host waits for all that ``stream`` has been given
    MARK                       a new phase or a new unit begins; nothing happens

Replays read them: memory.py the peaks, allocator.py the segments of the CUDA caching allocator. Sizes are bytes.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import NamedTuple


class Kind(IntEnum):
    """What happens."""

    ALLOCATE = 0
    FREE = 1
    RECORD_STREAM = 2
    RECORD_EVENT = 3
    HOST_WAIT = 4
    SYNCHRONIZE = 5
    MARK = 6


class Category(StrEnum):
    """What a storage holds: the words of the breakdown in ``predict --json``."""

    PARAMETERS = "parameters"
    UNSHARDED_PARAMETERS = "unsharded_parameters"
    GRADIENTS = "gradients"
    REDUCTION_BUFFERS = "reduction_buffers"
    OPTIMIZER_STATE = "optimizer_state"
    ACTIVATIONS = "activations"
    LOGITS = "logits"
    TEMPORARY = "temporary"


class Stream(IntEnum):
    """The CUDA streams of a step. The caching allocator keeps a pool for each."""

    COMPUTE = 0
    ALL_GATHER = 1
    REDUCE_SCATTER = 2
    ALL_GATHER_COPY_IN = 3
    """FSDP1's pre_unshard_stream, too."""
    ALL_REDUCE = 4


class Event(NamedTuple):
    """One event."""

    kind: Kind
    number: int
    """The tensor's number, unique among those alive; the event's number for RECORD_EVENT and HOST_WAIT."""
    num_bytes: int = 0
    """Size of the storage, for ALLOCATE and FREE."""
    category: Category = Category.TEMPORARY
    stream: Stream = Stream.COMPUTE
    label: str = ""
    """The operator or symbol of torch that does it; for MARK the phase."""
