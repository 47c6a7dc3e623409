"""The event vocabulary: one training step of one rank, in the order in which its Python thread issues it.

Events for the allocator:

    ALLOCATE tensor bytes      a storage comes to life on the device
    FREE tensor                its last reference is gone
    RECORD_STREAM tensor       Tensor.record_stream: the storage is also used on ``stream``

Events that are issued to a stream, each with its Work:

    KERNEL                     an operator
    COLLECTIVE                 a collective; ``stream`` waits for it
    START_COLLECTIVE           a collective that nobody waits for yet (``async_op=True``)
    COPY                       bytes to or from the host

Events that order streams and the host:

    WAIT_STREAM                ``stream`` waits for all that stream ``number`` has been given
    RECORD_EVENT               an event behind all that ``stream`` has been given; ``number`` is its Queue
    WAIT_EVENT                 ``stream`` waits for the next event of Queue ``number`` that nobody waited for
    HOST_WAIT                  the host waits for that event (Event.synchronize)
    SYNCHRONIZE                the host waits for all that ``stream`` has been given
    WAIT_COLLECTIVES           ``stream`` waits for all collectives that were started, or for the one with ``number``

Events beside the device:

    HOST_WORK                  the host itself works: hooks of a wrapper, an optimizer in host memory
    MARK                       a phase begins, or a block's part of it
    REPEAT                     what follows, up to the next of these, runs ``number`` times

The readers of these events are in replay/. Sizes are bytes.
"""

from enum import IntEnum, StrEnum

import msgspec


class Kind(IntEnum):
    """The kinds of events; the module's docstring explains each."""

    __hash__ = int.__hash__  # Enum's own is a function in Python

    ALLOCATE = 0
    FREE = 1
    RECORD_STREAM = 2
    KERNEL = 3
    COLLECTIVE = 4
    START_COLLECTIVE = 5
    COPY = 6
    WAIT_STREAM = 7
    RECORD_EVENT = 8
    WAIT_EVENT = 9
    HOST_WAIT = 10
    SYNCHRONIZE = 11
    WAIT_COLLECTIVES = 12
    HOST_WORK = 13
    MARK = 14
    REPEAT = 15


class Category(StrEnum):
    """The kind of data in a storage; the keys of the breakdown in ``predict --json``."""

    __hash__ = str.__hash__  # Enum's own is a function in Python

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
    OPTIMIZER_OFFLOAD = 5
    """torchao's CPUOffloadOptimizer.stream."""


class Queue(IntEnum):
    """Queues of CUDA events, which are waited for in the order in which they were recorded; RESHARD in the reverse."""

    FREE = 0
    """FSDP1's _FreeEventQueue, which limits how far all-gathers run ahead."""
    ALL_GATHER = 1
    """fully_shard's AllGatherResult.all_gather_event."""
    COPY_OUT = 2
    """fully_shard's AllGatherState.event: the gathered parameters were copied out of the buffer."""
    REDUCE_SCATTER = 3
    """fully_shard's ReduceScatterState.event."""
    RESHARD = 4
    """fully_shard's _reshard_after_forward_event: a unit was resharded to fewer ranks. Backward visits units in the
    reverse order of forward."""
    GRADIENTS = 5
    """autograd's InputBuffer: the gradients that a node of another stream takes have been computed."""
    GRADIENTS_BEFORE = 6
    """The same of nodes that run before those of GRADIENTS although these were ready first (autograd.py)."""


IN_HOST_MEMORY = "optimizer "
"""The beginning of the names of what the host computes on large tensors: an optimizer's step, and what is as slow."""


FAST_ACCUMULATION = "-fast"
"""In the layout of a product in float8: its kernel accumulates in the tensor cores' own precision (use_fast_accum)."""
SCALES_OF_ROWS = "-rows"
"""The same: each row of the one factor and each column of the other has a scale of its own."""


class Work(msgspec.Struct, frozen=True, gc=False, cache_hash=True):
    """The sizes of an operator, a collective or a copy, from which its time is computed."""

    name: str
    """The operator of torch, the kind of collective, ``to_device`` or ``to_host``, or the name of work on the host."""
    num_bytes: int = 0
    """Bytes that are read and written; of a collective, the whole message."""
    dims: tuple[int, ...] = ()
    """m, n, k of a matrix product; batch, heads, key-value heads, length, head size of attention; tensors and elements
    of an optimizer step; of messages the other ranks."""
    itemsize: int = 0
    group: str = ""
    """The process group of a collective: ``shard``, ``replicate``, ``world`` or ``post_forward``; of a rehearsed script
    its own name. A copy of activations has ``activations``."""
    path: str = ""
    """The kernel of a pointwise operator, where it reads no vectors: ``strided``, ``casting`` (spec/pointwise.py)."""
    elements: int = 0
    """Elements that such a kernel computes."""

    @property
    def is_product(self) -> bool:
        """A matrix product; its layout is the end of its name."""
        return self.name.startswith("aten::mm ")

    @property
    def is_attention(self) -> bool:
        """Attention, or its backward."""
        is_torchs = self.name.startswith("aten::scaled_dot_product_attention") or self.is_efficient_attention
        return is_torchs or self.is_flash_attn

    @property
    def is_efficient_attention(self) -> bool:
        """Attention by the memory-efficient kernel, which torch takes for masks, or its backward."""
        return self.name.startswith("aten::scaled_dot_product_efficient_attention")

    @property
    def is_flash_attn(self) -> bool:
        """Attention of the flash-attn package, which is FlashAttention-2, or its backward."""
        return self.name.startswith("flash_attn::")

    @property
    def is_backward(self) -> bool:
        """The gradient of an operator."""
        return self.name.endswith("_backward")


class Event(msgspec.Struct, frozen=True, gc=False):
    """One event. Thousands are made for a question: a msgspec.Struct is made in half the time of a tuple with names."""

    kind: Kind
    number: int
    """The tensor's number, unique among those alive; of the other kinds see the module."""
    num_bytes: int = 0
    """Size of the storage, for ALLOCATE and FREE."""
    category: Category = Category.TEMPORARY
    stream: Stream = Stream.COMPUTE
    label: str = ""
    """The operator or symbol of torch that allocates; of a MARK the phase, whose ``number`` is the block or -1."""
    work: Work | None = None
    """The operator, collective or copy; None for other events."""
