"""The recorder of a simulated step, and the storages and tensors whose lives it records.

A storage is freed when Python's own reference counts say that nobody holds it any more, as in torch (CPython only).
"""

from typing import Any

import msgspec

from fsdp_bench.simulate.events import Category, Event, Kind, Queue, Stream, Work
from fsdp_bench.spec.pointwise import copy_path

_ALLOCATE, _FREE, _COMPUTE, _TEMPORARY = Kind.ALLOCATE, Kind.FREE, Stream.COMPUTE, Category.TEMPORARY
_KERNEL = Kind.KERNEL

CUDA_BLOCK_BYTES = 512
"""c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize: what torch.cuda.memory_allocated counts in."""


class Tape:
    """Records the events of one rank, and holds what is global in torch: the current stream, grad mode, hooks."""

    __slots__ = (
        "category",
        "events",
        "grad_enabled",
        "has_peers",
        "hooks",
        "in_backward",
        "kept",
        "next_number",
        "next_sequence",
        "phase",
        "rounding",
        "stream",
    )

    def __init__(self, rounding: int = 1, has_peers: bool = True) -> None:
        self.rounding = rounding
        """Bytes that an allocation is a multiple of: 512 for CUDA's caching allocator (kMinBlockSize)."""
        self.has_peers = has_peers
        """Whether collectives have anything to send: not in a world of one."""
        self.events: list[Event] = []
        self.category = Category.ACTIVATIONS
        """The category of storages that name none."""
        self.grad_enabled = True
        self.in_backward = False
        """Whether autograd's thread runs."""
        self.hooks: list[Any] = []
        """Saved-tensor hooks in force (torch.autograd.graph.saved_tensors_hooks): objects with pack and unpack."""
        self.kept: Any = None
        """Where selective checkpointing keeps outputs of costly operators: see models/activation_checkpointing.py."""
        self.phase = "load"
        self.stream = _COMPUTE
        """The current stream (torch.cuda.current_stream): what is allocated comes from its pool."""
        self.next_number = 0
        self.next_sequence = 0

    # -- memory --------------------------------------------------------------------------------------------------

    def storage(
        self, num_bytes: int, label: str, category: Category | None = None, stream: Stream | None = None
    ) -> "Storage":
        """Allocate, on the current stream unless another one is named."""
        num_bytes += -num_bytes % self.rounding
        category = category or self.category
        stream = self.stream if stream is None else stream
        self.next_number = number = self.next_number + 1
        self.events.append(Event(_ALLOCATE, number, num_bytes, category, stream, label))
        return Storage(self, number, num_bytes, category, stream)

    def tensor(self, numel: int, itemsize: int, label: str, category: Category | None = None) -> "Tensor":
        """Allocate a tensor that needs no gradient."""
        num_bytes = numel * itemsize
        num_bytes += -num_bytes % self.rounding
        category, stream = category or self.category, self.stream
        self.next_number = number = self.next_number + 1
        self.events.append(Event(_ALLOCATE, number, num_bytes, category, stream, label))
        return Tensor(Storage(self, number, num_bytes, category, stream), numel, itemsize)

    def record_stream(self, storage: "Storage", stream: Stream) -> None:
        """Tensor.record_stream: nothing where it is the storage's own stream."""
        if stream is not storage.stream:
            self.events.append(Event(Kind.RECORD_STREAM, storage.number, 0, storage.category, stream))

    # -- work ----------------------------------------------------------------------------------------------------

    def kernel(
        self, name: str, num_bytes: int, itemsize: int, stream: Stream = _COMPUTE, path: str = "", elements: int = 0
    ) -> None:
        """Issue an operator that computes hardly anything: what it reads and writes, and the size of an element.

        ``path`` and ``elements``: why a pointwise kernel reads no vectors, and how many elements it computes.
        """
        work = Work(name, num_bytes, (), itemsize, path=path, elements=elements)
        self.events.append(Event(_KERNEL, -1, 0, _TEMPORARY, stream, name, work))

    def cast(self, numel: int, itemsize: int, into: int, stream: Stream = _COMPUTE) -> None:
        """Issue aten::_to_copy of contiguous elements to a dtype of another size."""
        path = copy_path(itemsize, into)
        self.kernel("aten::_to_copy", numel * (itemsize + into), itemsize, stream, path, numel if path else 0)

    def product(self, layout: str, m: int, n: int, k: int, itemsize: int, added_to_itemsize: int = 0) -> None:
        """Issue a matrix product, m x k by k x n; ``layout`` says which of them are transposed: nt, nn, tn.

        With ``added_to_itemsize`` it is added to a matrix of such elements, which is read and written (aten::addmm).
        """
        num_bytes = (m * k + k * n) * itemsize + m * n * (2 * added_to_itemsize or itemsize)
        self._issue(_KERNEL, Work(f"aten::mm {layout}", num_bytes, (m, n, k), itemsize))

    def attention(self, name: str, dims: tuple[int, ...], num_bytes: int, itemsize: int) -> None:
        """Issue causal attention or its backward."""
        self._issue(_KERNEL, Work(name, num_bytes, dims, itemsize))

    def update(self, name: str, num_bytes: int, dims: tuple[int, ...]) -> None:
        """Issue an optimizer's step on so many tensors of so many elements, on the current stream."""
        self._issue(_KERNEL, Work(name, num_bytes, dims), self.stream)

    def collective(self, kind: str, group: str, num_bytes: int, stream: Stream = _COMPUTE) -> None:
        """Issue a collective that ``stream`` waits for; the size is that of the whole message."""
        if self.has_peers:
            self._issue(Kind.COLLECTIVE, Work(kind, num_bytes, group=group), stream)

    def start_collective(self, kind: str, group: str, num_bytes: int) -> None:
        """Issue a collective that nobody waits for yet."""
        if self.has_peers:
            self._issue(Kind.START_COLLECTIVE, Work(kind, num_bytes, group=group))

    def copy(self, name: str, num_bytes: int, stream: Stream, of: str = "") -> None:
        """Issue a copy ``to_device`` or ``to_host``; ``of`` says of what, where somebody adds them up."""
        self._issue(Kind.COPY, Work(name, num_bytes, group=of), stream)

    def host_work(self, name: str, num_bytes: int = 0, dims: tuple[int, ...] = ()) -> None:
        """Let the host itself work."""
        self._issue(Kind.HOST_WORK, Work(name, num_bytes, dims))

    def _issue(self, kind: Kind, work: Work, stream: Stream = _COMPUTE) -> None:
        self.events.append(Event(kind, -1, 0, _TEMPORARY, stream, work.name, work))

    # -- order ---------------------------------------------------------------------------------------------------

    def wait_stream(self, stream: Stream, other: Stream) -> None:
        """``stream.wait_stream(other)``."""
        self.events.append(Event(Kind.WAIT_STREAM, other, 0, _TEMPORARY, stream))

    def record_event(self, stream: Stream, queue: Queue) -> None:
        """``stream.record_event()``; ``wait_event`` waits for the events of a queue in their order."""
        self.events.append(Event(Kind.RECORD_EVENT, queue, 0, _TEMPORARY, stream))

    def wait_event(self, stream: Stream, queue: Queue) -> None:
        """``stream.wait_event(event)``: the next of that queue."""
        self.events.append(Event(Kind.WAIT_EVENT, queue, 0, _TEMPORARY, stream))

    def host_wait(self, queue: Queue) -> None:
        """``event.synchronize()``: the oldest of that queue."""
        self.events.append(Event(Kind.HOST_WAIT, queue))

    def synchronize(self, stream: Stream) -> None:
        """``stream.synchronize()``, which is also what copies to pageable host memory do."""
        self.events.append(Event(Kind.SYNCHRONIZE, -1, 0, _TEMPORARY, stream))

    def synchronize_device(self) -> None:
        """torch.cuda.synchronize."""
        for stream in Stream:
            self.synchronize(stream)

    def wait_for_collectives(self) -> None:
        """``work.wait()`` for every collective that was started."""
        self.events.append(Event(Kind.WAIT_COLLECTIVES, -1))

    # -- where in the step ---------------------------------------------------------------------------------------

    def mark(self, phase: str, block: int = -1) -> None:
        """Begin a phase, or, with a number, that block's part of it."""
        self.phase = phase
        self.events.append(Event(Kind.MARK, block, 0, _TEMPORARY, _COMPUTE, phase))

    def mark_block(self, block: int) -> None:
        """Begin a block's part of the phase that runs; -1 ends it."""
        self.mark(self.phase, block)

    def repeat(self, times: int) -> None:
        """Let what follows run so often: a micro-batch that stands for others."""
        self.events.append(Event(Kind.REPEAT, times))


class Storage(msgspec.Struct, eq=False):
    """Bytes on the device, from its creation by Tape.storage until its last reference is gone."""

    tape: Tape
    number: int
    num_bytes: int
    category: Category
    stream: Stream

    def __del__(self) -> None:
        self.tape.events.append(Event(_FREE, self.number, self.num_bytes, self.category, self.stream))


class Tensor(msgspec.Struct, eq=False):
    """A size, a storage, and the node that made it when a gradient is needed."""

    storage: Storage | None
    """None for parameters: their wrapper owns the bytes."""
    numel: int
    itemsize: int
    node: Any = None
    output: int = 0
    """The index among the node's outputs."""
    is_view: bool = False
    is_strided: bool = False
    """Whether its elements do not follow each other in memory. Known of what blocks save, not of everything."""
    is_on_host: bool = False
    """Whether it is in host memory anyway: attention's seeds. Known of what blocks of recorded models save."""

    def detach(self) -> "Tensor":
        """Return the same storage without its history."""
        return Tensor(self.storage, self.numel, self.itemsize, None, 0, True, self.is_strided)

    def view(self, numel: int | None = None) -> "Tensor":
        """Return a view of the first ``numel`` elements, or of all."""
        return Tensor(self.storage, self.numel if numel is None else numel, self.itemsize, self.node, self.output, True)
