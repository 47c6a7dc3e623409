"""What the host issues in a step, and to which stream: operators, collectives, copies, and who waits for whom.

The same simulation that records what is allocated (tape.py) records this when it is asked to. timing.py says when each
of them runs. A stream here is a queue of a device: what is put into it runs in order, and does not keep the host.
Waiting is what torch does: a stream waits for all that another one has been given (``wait_stream``), or for an event
that was recorded there; events are waited for in the order in which they were recorded.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from fsdp_bench.simulate.events import Stream


class Do(IntEnum):
    """What is issued."""

    RUN = 0
    """An operator."""
    SEND = 1
    """A collective; the stream that it is issued on waits for it."""
    START = 2
    """A collective that nobody waits for yet (``async_op=True``), after what the stream was given so far."""
    COPY = 3
    """Bytes to or from the host."""
    WAIT = 4
    """``stream`` waits for all that ``other`` has been given."""
    RECORD = 5
    """An event behind all that ``stream`` has been given; ``name`` says whose."""
    WAIT_EVENT = 6
    """``stream`` waits for the oldest event of ``name`` that was not waited for."""
    HOST_WAIT = 7
    """The host waits for that event."""
    SYNCHRONIZE = 8
    """The host waits for all that ``stream`` has been given."""
    FINISH = 9
    """``stream`` waits for all collectives that were started."""
    HOST = 10
    """The host itself works: hooks of a wrapper, an optimizer in host memory."""
    MARK = 11
    """A phase or a block begins."""
    REPEAT = 12
    """What follows, up to the next of these, runs ``block`` times: a micro-batch that stands for others."""


class Work(NamedTuple):
    """What one action is about: enough to say how long it takes."""

    name: str
    """The operator of torch; a collective's kind; ``to_device`` or ``to_host``; a host's work."""
    num_bytes: int = 0
    """Read and written; of a collective the whole message."""
    dims: tuple[int, ...] = ()
    """Of a matrix product m, n, k; of attention batch, heads, key-value heads, length, head size; of an optimizer
    tensors and elements."""
    itemsize: int = 0
    group: str = ""
    """Of a collective: ``shard``, ``replicate`` or ``world``."""

    @property
    def is_product(self) -> bool:
        """A matrix product; its layout is the end of its name."""
        return self.name.startswith("aten::mm ")

    @property
    def is_attention(self) -> bool:
        """Attention, or its backward."""
        return self.name.startswith("aten::scaled_dot_product_attention")

    @property
    def is_backward(self) -> bool:
        """The gradient of an operator."""
        return self.name.endswith("_backward")


class Action(NamedTuple):
    """One thing that the host issues."""

    do: Do
    stream: Stream
    work: Work | None = None
    other: Stream = Stream.COMPUTE
    name: str = ""
    """Of events; of a MARK the phase."""
    block: int = -1
    """Of a MARK; of a REPEAT how often."""


class Timeline:
    """Records actions."""

    is_on = True

    def __init__(self) -> None:
        self.actions: list[Action] = []

    def run(self, name: str, num_bytes: int, itemsize: int, stream: Stream = Stream.COMPUTE) -> None:
        """Issue an operator that is bound by memory: what it reads and writes, and the size of an element it reads."""
        self.actions.append(Action(Do.RUN, stream, Work(name, num_bytes, itemsize=itemsize)))

    def product(self, layout: str, m: int, n: int, k: int, itemsize: int) -> None:
        """Issue a matrix product, m x k by k x n; ``layout`` says which of them are transposed: nt, nn, tn."""
        num_bytes = (m * k + k * n + m * n) * itemsize
        self.actions.append(Action(Do.RUN, Stream.COMPUTE, Work(f"aten::mm {layout}", num_bytes, (m, n, k), itemsize)))

    def attention(self, name: str, dims: tuple[int, ...], num_bytes: int, itemsize: int) -> None:
        """Issue causal attention or its backward."""
        self.actions.append(Action(Do.RUN, Stream.COMPUTE, Work(name, num_bytes, dims, itemsize)))

    def update(self, name: str, num_bytes: int, dims: tuple[int, ...]) -> None:
        """Issue an optimizer's step on so many tensors of so many elements."""
        self.actions.append(Action(Do.RUN, Stream.COMPUTE, Work(name, num_bytes, dims)))

    def send(self, kind: str, group: str, num_bytes: int, stream: Stream, starts: bool = False) -> None:
        """Issue a collective."""
        work = Work(kind, num_bytes, group=group)
        self.actions.append(Action(Do.START if starts else Do.SEND, stream, work))

    def copy(self, name: str, num_bytes: int, stream: Stream) -> None:
        """Issue a copy ``to_device`` or ``to_host``."""
        self.actions.append(Action(Do.COPY, stream, Work(name, num_bytes)))

    def host(self, name: str, num_bytes: int = 0, dims: tuple[int, ...] = ()) -> None:
        """Let the host itself work."""
        self.actions.append(Action(Do.HOST, Stream.COMPUTE, Work(name, num_bytes, dims)))

    def wait(self, stream: Stream, other: Stream) -> None:
        """``stream.wait_stream(other)``."""
        self.actions.append(Action(Do.WAIT, stream, other=other))

    def record(self, stream: Stream, name: str) -> None:
        """``stream.record_event()``."""
        self.actions.append(Action(Do.RECORD, stream, name=name))

    def wait_event(self, stream: Stream, name: str) -> None:
        """``stream.wait_event(event)``: the oldest of that name."""
        self.actions.append(Action(Do.WAIT_EVENT, stream, name=name))

    def host_wait(self, name: str) -> None:
        """``event.synchronize()``."""
        self.actions.append(Action(Do.HOST_WAIT, Stream.COMPUTE, name=name))

    def synchronize(self, stream: Stream) -> None:
        """``stream.synchronize()``."""
        self.actions.append(Action(Do.SYNCHRONIZE, stream))

    def finish(self, stream: Stream = Stream.COMPUTE) -> None:
        """``work.wait()`` for every collective that was started."""
        self.actions.append(Action(Do.FINISH, stream))

    def repeat(self, times: int) -> None:
        """Let what follows run so often."""
        self.actions.append(Action(Do.REPEAT, Stream.COMPUTE, block=times))

    def mark(self, phase: str, block: int) -> None:
        """Begin a phase, or a block's part of it."""
        self.actions.append(Action(Do.MARK, Stream.COMPUTE, name=phase, block=block))


def _nothing(*_args: object, **_words: object) -> None:
    pass


class Untimed(Timeline):
    """Records nothing: for who only asks for memory."""

    is_on = False
    run = product = attention = update = send = copy = host = _nothing
    wait = record = wait_event = host_wait = synchronize = finish = mark = repeat = _nothing
