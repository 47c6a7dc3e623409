"""Logs run by replay/streams.py and by a second scheduler, which goes from event to event.

Random ones, and small ones whose spans are worked out by hand. The second scheduler has one clock for the host and all
streams, and at each moment starts whatever may run: slow, without the order in which Streams times things. No line of
it comes from there. An operator takes as many seconds as it has bytes, and twice as long for each collective that runs
beside it.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_bench.replay.schedule import run
from fsdp_bench.simulate.events import Category, Event, Kind, Queue, Stream, Work
from fsdp_bench.simulate.tape import Tape
from tests.replay.test_schedule import Halved

_COLLECTIVES = (Kind.COLLECTIVE, Kind.START_COLLECTIVE)


@dataclass(eq=False)
class Piece:
    """Work: ``left`` seconds of it remain."""

    event: Event
    left: float
    begin: float | None = None
    end: float | None = None


@dataclass
class ByEvent:
    """One rank; ``spans`` has the begin and the end of all work in the order of issue."""

    launch_seconds: float
    hook_seconds: float
    now: float = 0.0
    pieces: list[Piece] = field(default_factory=list)
    streams: dict[Stream, deque[Any]] = field(default_factory=lambda: {stream: deque() for stream in Stream})
    """The remaining entries: work, a mark to set (``[True, mark]``), or marks to wait for (``[False, mark]``)."""
    running: dict[Stream, Piece | None] = field(default_factory=lambda: dict.fromkeys(Stream))
    started: list[Piece] = field(default_factory=list)
    """Collectives without a stream that waits for them, in the order of issue."""
    communicators: dict[str, list[Piece]] = field(default_factory=lambda: defaultdict(list))
    marks: dict[int, deque[list[bool]]] = field(default_factory=lambda: defaultdict(deque))
    host_until: float = 0.0
    issuing: Piece | None = None
    host_waits: list[bool] | None = None

    def run(self, log: Sequence[Event]) -> list[tuple[float, float]]:
        """Run a log to its end."""
        events = iter(log)
        while True:
            while self._host(events) or any(self._stream(stream) for stream in Stream) or self._starts():
                pass
            ends = [piece.left / self._speed(piece) for piece in self._all_running()]
            ends += [self.host_until - self.now] if self.host_until > self.now else []
            if not ends:
                return [(piece.begin, piece.end) for piece in self.pieces if piece.begin is not None]  # type: ignore[misc]
            self._pass(min(ends))

    def _pass(self, seconds: float) -> None:
        speeds = [(piece, self._speed(piece)) for piece in self._all_running()]
        for piece, speed in speeds:
            piece.left -= seconds * speed
        until = self.host_until
        self.now = until if until > self.now and until - self.now <= seconds else self.now + seconds

    def _all_running(self) -> list[Piece]:
        begun = [piece for piece in self.started if piece.begin is not None and piece.end is None]
        return [piece for piece in self.running.values() if piece is not None] + begun

    def _speed(self, piece: Piece) -> float:
        if piece.event.kind is not Kind.KERNEL or piece.event.stream is not Stream.COMPUTE:
            return 1.0
        return 0.5 ** sum(one.event.kind in _COLLECTIVES for one in self._all_running())

    def _end(self, piece: Piece) -> None:
        piece.end = self.now
        if piece.event.kind in _COLLECTIVES:
            self.communicators[piece.event.work.group].remove(piece)

    def _host(self, events: Iterator[Event]) -> bool:
        """Let the host do one thing."""
        if self.host_until > self.now:
            return False
        if self.issuing is not None:
            self._issue(self.issuing)
            self.issuing = None
            return True
        if self.host_waits is not None and not self.host_waits[0]:
            return False
        self.host_waits = None
        event = next(events, None)
        if event is None:
            return False
        if event.work is None:
            self._order(event)
            return True
        self.issuing = Piece(event, float(event.work.num_bytes))
        self.pieces.append(self.issuing)
        is_host = event.kind is Kind.HOST_WORK
        self.issuing.begin = self.now if is_host else None
        self.host_until = self.now + (self.hook_seconds if is_host else self.launch_seconds)
        return True

    def _issue(self, piece: Piece) -> None:
        kind = piece.event.kind
        if kind is Kind.HOST_WORK:
            piece.end = self.now
            return
        if kind in _COLLECTIVES:
            self.communicators[piece.event.work.group].append(piece)
        self.streams[piece.event.stream].append(piece)

    def _order(self, event: Event) -> None:
        own, mark = self.streams[event.stream], [False]
        if event.kind is Kind.WAIT_STREAM:
            self.streams[Stream(event.number)].append([True, mark])
            own.append([False, mark])
        elif event.kind is Kind.RECORD_EVENT:
            own.append([True, mark])
            self.marks[event.number].append(mark)
        elif event.kind is Kind.SYNCHRONIZE:
            own.append([True, mark])
            self.host_waits = mark
        elif event.kind is Kind.WAIT_COLLECTIVES:
            own.append([piece for piece in self.pieces if piece.event.kind is Kind.START_COLLECTIVE])
        elif event.kind is Kind.HOST_WAIT:
            self.host_waits = self.marks[event.number].popleft()
        elif event.kind is Kind.WAIT_EVENT:
            marks = self.marks[event.number]
            own.append([False, marks.pop() if event.number == Queue.RESHARD else marks.popleft()])

    def _stream(self, stream: Stream) -> bool:
        """Let a stream do one thing."""
        running, queue = self.running[stream], self.streams[stream]
        if running is not None:
            if running.left > 1e-9:
                return False
            self._end(running)
            self.running[stream] = None
            return True
        if not queue:
            return False
        first = queue[0]
        if isinstance(first, Piece):
            return self._begin(first, stream)
        if first and isinstance(first[0], bool):
            if first[0]:
                first[1][0] = True
            elif not first[1][0]:
                return False
        elif any(piece.end is None for piece in first):
            return False
        queue.popleft()
        return True

    def _begin(self, piece: Piece, stream: Stream) -> bool:
        if piece.event.kind is Kind.START_COLLECTIVE:
            self.started.append(piece)
        else:
            if piece.event.kind is Kind.COLLECTIVE and self.communicators[piece.event.work.group][0] is not piece:
                return False
            piece.begin = self.now
            self.running[stream] = piece
        self.streams[stream].popleft()
        return True

    def _starts(self) -> bool:
        """Begin and end the collectives for which no stream waits."""
        changed = False
        for piece in self.started:
            if piece.begin is None and self.communicators[piece.event.work.group][0] is piece:
                piece.begin, changed = self.now, True
            if piece.begin is not None and piece.end is None and piece.left <= 1e-9:
                self._end(piece)
                changed = True
        return changed


SECONDS = st.sampled_from((0, 1, 2, 3, 5, 7))
STREAMS = st.one_of(st.just(Stream.COMPUTE), st.sampled_from(list(Stream)))
GROUPS = st.sampled_from(("shard", "replicate", "world"))
QUEUES = st.sampled_from([queue for queue in Queue if queue != Queue.RESHARD])


@st.composite
def logs(draw: st.DrawFn) -> list[Event]:
    """Draw a log in which every wait has something to wait for."""
    tape, recorded = Tape(), Counter[Queue]()
    for _ in range(draw(st.integers(1, 40))):
        what, stream = draw(st.sampled_from(list(Kind))), draw(STREAMS)
        if what in (Kind.COLLECTIVE, Kind.START_COLLECTIVE):
            tape._issue(what, Work("all_reduce", draw(SECONDS), group=draw(GROUPS)), stream)
        elif what is Kind.RECORD_EVENT:
            queue = draw(QUEUES)
            tape.record_event(stream, queue)
            recorded[queue] += 1
        elif what in (Kind.WAIT_EVENT, Kind.HOST_WAIT):
            if left := [queue for queue in recorded if recorded[queue]]:
                queue = draw(st.sampled_from(left))
                recorded[queue] -= 1
                tape.events.append(Event(what, queue, 0, Category.TEMPORARY, stream))
        else:
            _note(tape, what, stream, draw(SECONDS), draw(STREAMS))
    return tape.events


def _note(tape: Tape, what: Kind, stream: Stream, seconds: int, other: Stream) -> None:
    """Add what refers to no event before it."""
    if what is Kind.KERNEL:
        tape.kernel("aten::mul", seconds, 4, stream)
    elif what is Kind.COPY:
        tape.copy("to_host", seconds, stream)
    elif what is Kind.HOST_WORK:
        tape.host_work("hook")
    elif what is Kind.WAIT_COLLECTIVES:
        tape.events.append(Event(what, -1, 0, Category.TEMPORARY, stream))
    elif what is Kind.WAIT_STREAM:
        tape.wait_stream(stream, other)
    elif what is Kind.SYNCHRONIZE:
        tape.synchronize(stream)


@settings(max_examples=300, deadline=None)
@given(logs(), st.sampled_from((0.0, 0.5)))
def test_both_schedulers_agree(events: list[Event], launch: float) -> None:
    rates = Halved(memory=1.0, network=1.0, launch_seconds=launch, hook_seconds=0.25)
    spans = [(span.begin, span.end) for span in run(events, rates, with_spans=True).spans]
    assert spans == [pytest.approx(span, abs=1e-6) for span in ByEvent(launch, 0.25).run(events)]


CALLS: dict[str, Callable[[Tape, int], object]] = {
    "mul": lambda tape, seconds: tape.kernel("aten::mul", seconds, 4),
    "mul@reduce": lambda tape, seconds: tape.kernel("aten::mul", seconds, 4, Stream.ALL_REDUCE),
    "copy": lambda tape, seconds: tape.copy("to_host", seconds, Stream.COMPUTE),
    "copy@reduce": lambda tape, seconds: tape.copy("to_host", seconds, Stream.ALL_REDUCE),
    "gather": lambda tape, seconds: tape.collective("all_gather", "shard", seconds, Stream.ALL_GATHER),
    "gather@reduce": lambda tape, seconds: tape.collective("all_gather", "shard", seconds, Stream.ALL_REDUCE),
    "replicate": lambda tape, seconds: tape.collective("all_reduce", "replicate", seconds, Stream.ALL_REDUCE),
    "start": lambda tape, seconds: tape.start_collective("all_reduce", "world", seconds),
    "start@reduce": lambda tape, seconds: _start(tape, seconds, "world", Stream.ALL_REDUCE),
    "start@gather": lambda tape, seconds: _start(tape, seconds, "shard", Stream.ALL_GATHER),
    "gather<mul": lambda tape, _: tape.wait_stream(Stream.ALL_GATHER, Stream.COMPUTE),
    "replicate<mul": lambda tape, _: tape.wait_stream(Stream.ALL_REDUCE, Stream.COMPUTE),
    "mul<gather": lambda tape, _: tape.wait_stream(Stream.COMPUTE, Stream.ALL_GATHER),
    "mul<started": lambda tape, _: tape.wait_for_collectives(),
    "free": lambda tape, _: tape.record_event(Stream.COMPUTE, Queue.FREE),
    "reshard": lambda tape, _: tape.record_event(Stream.COMPUTE, Queue.RESHARD),
    "gather<reshard": lambda tape, _: tape.wait_event(Stream.ALL_GATHER, Queue.RESHARD),
    "host<free": lambda tape, _: tape.host_wait(Queue.FREE),
}
"""By name with the seconds behind it; ``<`` is a wait for what stands right of it."""


def _start(tape: Tape, seconds: int, group: str, stream: Stream) -> None:
    tape._issue(Kind.START_COLLECTIVE, Work("all_reduce", seconds, group=group), stream)


UNIT = "gather:1 mul<gather mul:10 free"
BY_HAND: dict[str, tuple[str, list[tuple[float, float]]]] = {
    # two of its ten seconds in the four of the all-gather
    "an operator is slow only while a collective runs": ("mul:1 gather<mul gather:4 mul:10", [(0, 1), (1, 5), (1, 13)]),
    "an operator that was issued before a collective is slowed down, too": ("mul:10 gather:4", [(0, 12), (0, 4)]),
    # from 1 on: 1 s beside one, 2 s beside both, 2 s beside the other: 0.5 + 0.5 + 1 s of the 10 are done at 6
    "two collectives at once slow down twice": (
        "mul:1 gather<mul gather:3 mul@reduce:2 replicate<mul replicate:4 mul:10",
        [(0, 1), (1, 4), (0, 2), (2, 6), (1, 14)],
    ),
    "a copy is not slowed down: a copy engine needs no multiprocessor": ("gather:4 copy:5", [(0, 4), (0, 5)]),
    "a communicator runs one collective at a time": ("gather:1 gather@reduce:1", [(0, 1), (1, 2)]),
    "two communicators run at once": ("gather:1 replicate:1", [(0, 1), (0, 1)]),
    "a collective that nobody waits for lets the stream go on, as DDP's": (
        "start:3 start:3 mul:1 mul<started mul:1",
        [(0, 3), (3, 6), (0, 2), (6, 7)],
    ),
    # the first of two starts behind a copy and ends last
    "a wait is for the collectives that were started before it": (
        "copy@reduce:5 start@reduce:2 mul<started start@gather:2 mul:1",
        [(0, 5), (5, 7), (0, 2), (7, 8)],
    ),
    # fully_shard keeps the event with the parameter group (FSDPParamGroup._reshard_after_forward_event)
    "backward waits for the last unit that forward resharded to fewer ranks": (
        "mul:1 reshard mul:1 reshard gather<reshard gather:1",
        [(0, 1), (1, 2), (2, 3)],
    ),
    # the third all-gather is issued when the first unit has computed, half a second late beside the second all-gather
    "the rate limiter keeps the host two units ahead": (
        f"{UNIT} {UNIT} host<free {UNIT}",
        [(0, 1), (1, 11.5), (1, 2), (11.5, 22), (11.5, 12.5), (22, 32)],
    ),
}


@pytest.mark.parametrize(("words", "spans"), BY_HAND.values(), ids=BY_HAND)
def test_both_schedulers_time_a_log_as_by_hand(words: str, spans: list[tuple[float, float]]) -> None:
    tape = Tape()
    for word in words.split():
        name, _, seconds = word.partition(":")
        CALLS[name](tape, int(seconds or 0))
    found = run(tape.events, Halved(memory=1.0, network=1.0), with_spans=True).spans
    assert [(span.begin, span.end) for span in found] == spans
    assert ByEvent(0.0, 0.0).run(tape.events) == spans
