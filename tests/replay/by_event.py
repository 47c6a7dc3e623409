"""A second scheduler that goes from one event to the next: what replay/streams.py has to agree with.

It has one clock for the host and all streams, and at each moment starts whatever may run: slow, without the order in
which Streams times things. No line of it comes from there. An operator takes as many seconds as it has bytes, and twice
as long for each collective that runs beside it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdp_bench.simulate.events import Event, Kind, Stream

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
            own.append([False, self.marks[event.number].popleft()])

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
