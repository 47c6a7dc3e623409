"""The host, the streams and the communicators of one rank: when each piece of work runs.

The host issues work in the order of the log and stops only where it waits for the GPU. Each stream runs its work in the
order of issue, and a communicator its collectives. A collective, a copy and work on other streams take the same time
whatever runs beside them, so their begin and end follow once those of everything that they wait for are known. An
operator on the compute stream makes slower progress beside collectives (rates/datasheet.py; a calibration knows no such
effect). It is timed only when nothing else can go on: whatever comes later then begins after it has ended, and all
collectives beside it are known.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable

from fsdp_bench.rates.collectives import MESSAGES
from fsdp_bench.rates.datasheet import Rates
from fsdp_bench.simulate.events import Event, Kind, Queue, Stream, Work

_COMPUTE, _KERNEL = Stream.COMPUTE, Kind.KERNEL
_STREAMS = tuple(Stream)


class EventMark:
    """A place in a stream, as a CUDA event marks it: ``time`` is when the stream gets there, None until it is known."""

    __slots__ = ("time",)

    def __init__(self) -> None:
        self.time: float | None = None


class OperatorRun:
    """Consecutive operators of the compute stream, which are timed together where only their end matters."""

    __slots__ = ("works",)

    def __init__(self, works: list[Work]) -> None:
        self.works = works


def without_single_operators(events: Iterable[Event]) -> list[Event | OperatorRun]:
    """Return the events that streams follow, with consecutive operators of the compute stream as one."""
    found: list[Event | OperatorRun] = []
    for event in events:
        if event.kind is _KERNEL and event.stream is _COMPUTE and event.work is not None:
            if not found or not isinstance(last := found[-1], OperatorRun):
                found.append(last := OperatorRun([]))
            last.works.append(event.work)
        elif event.kind > Kind.RECORD_STREAM and event.kind is not Kind.MARK:
            found.append(event)
    return found


def _negative_seconds(rest: tuple[float, float]) -> float:
    return -rest[0]


_RUN, _OPERATORS, _COLLECTIVE, _START, _RECORD, _WAIT, _WAIT_FOR_STARTED = range(7)
"""The kinds of items: RUN is an operator or a copy, START a collective for which the stream does not wait,
WAIT_FOR_STARTED waits for collectives that were started."""


class Ran:
    """One piece of work, with when it begins and ends, in seconds."""

    __slots__ = ("begin", "end", "event", "seconds", "work")

    def __init__(self, event: Event, work: Work, seconds: float) -> None:
        self.event, self.work = event, work
        self.seconds = seconds
        """The time that it takes alone."""
        self.begin = self.end = 0.0


class Item:
    """One item of a stream's queue."""

    __slots__ = ("count", "issued", "mark", "number", "operators", "ran", "step")

    def __init__(self, step: int, issued: float = 0.0, ran: Ran | None = None, mark: EventMark | None = None) -> None:
        self.step = step
        self.issued = issued
        """When the host has issued it."""
        self.ran, self.mark = ran, mark
        self.operators: OperatorRun | None = None
        self.count = 0
        """A collective's number in its process group; for WAIT_FOR_STARTED, the number after the last one."""
        self.number = 0
        """A START's number among all of them; for WAIT_FOR_STARTED, the first one's."""


EndOfCollective = Callable[[Ran, float], float | None]
"""Returns when a collective ends that this rank could begin at a time; None if that is not known yet."""


class Streams:
    """One rank that runs a log; ``ran`` has all work, in the order of issue."""

    def __init__(self, rates: Rates, end_of: EndOfCollective | None = None) -> None:
        """``end_of``: says when a collective ends of which other ranks have a part that is looked at (together.py)."""
        self.rates = rates
        self._end_of_collective = end_of
        self.waits: list[tuple[float, float]] = []
        """When the compute stream waits for collectives in which other ranks that are looked at take part."""
        self.ran: list[Ran] = []
        self._alone: dict[tuple[Kind, Work], float | None] = {}
        """The seconds of work, for which the rates are asked once."""
        self._with_collectives: dict[tuple[Work, tuple[Work, ...]], float] = {}
        self._rests: dict[tuple[OperatorRun, tuple[Work, ...]], list[tuple[float, float]]] = {}
        self._host = 0.0
        self._host_waits: EventMark | None = None
        self._queues: list[deque[Item]] = [deque() for _ in Stream]
        self._free = [0.0] * len(Stream)
        """When each stream has done what was timed."""
        self._marks: dict[int, deque[EventMark]] = {}
        self._issued: dict[str, int] = {}
        self._done: dict[str, int] = {}
        self._group_free: dict[str, float] = {}
        self._pending: dict[tuple[str, int], tuple[Item, float]] = {}
        """Started collectives whose communicator is not free yet, with when they could begin."""
        self._num_started = 0
        self._started_ends: dict[int, float] = {}
        """When the started collectives end, by their number."""
        self._beside: list[Ran] = []
        """Collectives that end after the compute stream's last operator."""

    def run(self, events: Iterable[Event | OperatorRun]) -> float:
        """Run a log; return when all is done."""
        log = iter(events)
        while self.advance(log) or self.run_operators():
            pass
        assert self.is_done
        return self.end

    @property
    def is_done(self) -> bool:
        """Whether nothing that was issued still waits."""
        return not any(self._queues) and not self._pending and self._host_waits is None

    @property
    def end(self) -> float:
        """When all is done that was timed so far."""
        return max(self._host, *self._free, *self._started_ends.values())

    def advance(self, log: Iterable[Event | OperatorRun]) -> bool:
        """Issue and time what can go on, but for operators of the compute stream; return whether there was any."""
        going = self._issue(log)
        if self._end_of_collective is not None:
            for group in {group for group, _ in self._pending}:
                going |= self._start_pending(group)
        for stream in _STREAMS:
            if self._queues[stream]:
                going |= self._advance(stream)
        return going

    @property
    def unknown(self) -> list[tuple[Kind, Work]]:
        """The work whose duration was asked for and is not known, in the order of asking."""
        return [key for key, seconds in self._alone.items() if seconds is None]

    def _seconds(self, kind: Kind, work: Work) -> float:
        """Return how long a piece of work takes; 0 where nobody knows."""
        key = (kind, work)
        if key not in self._alone:
            ask = {Kind.KERNEL: self.rates.run, Kind.COPY: self.rates.copy, Kind.HOST_WORK: self.rates.host}
            self._alone[key] = ask.get(kind, self.rates.collective)(work)
        return self._alone[key] or 0.0

    def _seconds_beside(self, work: Work, collectives: tuple[Work, ...]) -> float:
        """Return how long an operator takes while collectives run all the time."""
        key = (work, collectives)
        if key not in self._with_collectives:
            self._with_collectives[key] = self.rates.run(work, collectives) or 0.0
        return self._with_collectives[key]

    # -- the host ------------------------------------------------------------------------------------------------------

    def _issue(self, log: Iterable[Event | OperatorRun]) -> bool:
        """Issue events until the host waits; return whether it issued or stopped waiting."""
        if self._host_waits is not None:
            if self._host_waits.time is None:
                return False
            self._host = max(self._host, self._host_waits.time)
            self._host_waits = None
        issued = False
        for event in log:
            if isinstance(event, OperatorRun):
                self._rests_of(event, ())
                item = Item(_OPERATORS, self._host)
                item.operators = event
                self._queues[_COMPUTE].append(item)
                self._host += len(event.works) * self.rates.launch_seconds
                issued = True
            elif event.work is not None:
                self._issue_work(event, event.work)
                issued = True
            elif event.kind > Kind.RECORD_STREAM:  # the others are what the allocator alone sees
                self._order(event)
                if self._host_waits is not None:
                    return True
        return issued

    def _issue_work(self, event: Event, work: Work) -> None:
        kind = event.kind
        ran = Ran(event, work, self._seconds(kind, work))
        self.ran.append(ran)
        if kind is Kind.HOST_WORK:
            ran.begin, self._host = self._host, self._host + ran.seconds
            ran.end = self._host
            return
        self._host += self.rates.launch_seconds
        if self.rates.blocks_host:  # a CPU does everything itself, one after the other
            ran.begin, self._host = self._host, self._host + ran.seconds
            ran.end = self._free[event.stream] = self._host
            return
        item = Item(_RUN, self._host, ran)
        if kind in (Kind.COLLECTIVE, Kind.START_COLLECTIVE):
            item.step = _COLLECTIVE if kind is Kind.COLLECTIVE else _START
            item.count = self._issued.get(work.group, 0)
            self._issued[work.group] = item.count + 1
            if kind is Kind.START_COLLECTIVE:
                item.number, self._num_started = self._num_started, self._num_started + 1
        self._queues[event.stream].append(item)

    def _order(self, event: Event) -> None:
        """Follow an event that only orders others."""
        kind, stream = event.kind, event.stream
        if kind is Kind.WAIT_STREAM:
            self._queues[stream].append(Item(_WAIT, 0.0, None, self._mark(event.number)))
        elif kind is Kind.RECORD_EVENT:
            self._marks.setdefault(event.number, deque()).append(self._mark(stream))
        elif kind in (Kind.WAIT_EVENT, Kind.HOST_WAIT):
            marks = self._marks[event.number]
            mark = marks.pop() if event.number == Queue.RESHARD else marks.popleft()
            if kind is Kind.HOST_WAIT:
                self._host_waits = mark
            else:
                self._queues[stream].append(Item(_WAIT, 0.0, None, mark))
        elif kind is Kind.SYNCHRONIZE:
            self._host_waits = self._mark(stream)
        elif kind is Kind.WAIT_COLLECTIVES:
            is_one = event.number >= 0
            count = event.number + 1 if is_one else self._num_started
            first = event.number if is_one else 0
            item = Item(_WAIT_FOR_STARTED, self._host)
            item.count, item.number = count, first
            self._queues[stream].append(item)

    def _mark(self, stream: int) -> EventMark:
        """Mark the place behind all that a stream was given."""
        mark = EventMark()
        if self._queues[stream]:
            self._queues[stream].append(Item(_RECORD, 0.0, None, mark))
        else:
            mark.time = self._free[stream]
        return mark

    # -- the device ----------------------------------------------------------------------------------------------------

    def _advance(self, stream: Stream) -> bool:
        """Time what a stream can do now, but for operators of the compute stream; return whether there was any."""
        queue, moved = self._queues[stream], False
        while queue:
            item = queue[0]
            if item.step == _OPERATORS:
                return moved
            if item.step == _RUN and item.ran is not None:
                if stream == _COMPUTE and item.ran.event.kind is _KERNEL:
                    return moved
                item.ran.begin = max(item.issued, self._free[stream])
                self._free[stream] = item.ran.end = item.ran.begin + item.ran.seconds
            elif not self._pass(item, stream):
                return moved
            queue.popleft()
            moved = True
        return moved

    def _pass(self, item: Item, stream: Stream) -> bool:
        """Time an item that is no operator and no copy; return False where it has to wait."""
        if item.step == _RECORD and item.mark is not None:
            item.mark.time = self._free[stream]
        elif item.step == _WAIT and item.mark is not None:
            if item.mark.time is None:
                return False
            self._free[stream] = max(self._free[stream], item.mark.time)
        elif item.step == _WAIT_FOR_STARTED:
            ends = [self._started_ends.get(number) for number in range(item.number, item.count)]
            known = [one for one in ends if one is not None]
            if len(known) < len(ends):
                return False
            end = max(self._free[stream], max(known, default=0.0))
            self._wait_for_ranks(stream, max(self._free[stream], item.issued), end)
            self._free[stream] = end
        elif item.ran is not None:
            ready, group = max(item.issued, self._free[stream]), item.ran.work.group
            if item.step == _START:
                self._pending[group, item.count] = item, ready
                self._start_pending(group)
            elif self._done.get(group, 0) < item.count or not self._collect(item.ran, ready, stream):
                return False
            else:
                self._start_pending(group)
        return True

    def _collect(self, ran: Ran, ready: float, stream: Stream | None) -> bool:
        """Time a collective, and keep it for the operators beside it; return False if other ranks' part is not known.

        Messages are not kept: nobody documents how much of a GPU they take.
        """
        group = ran.work.group
        ready = max(ready, self._group_free.get(group, 0.0))
        end = ready + ran.seconds if self._end_of_collective is None else self._end_of_collective(ran, ready)
        if end is None:
            return False
        ran.begin, ran.end = end - ran.seconds, end
        self._group_free[group] = end
        if stream is not None:
            self._wait_for_ranks(stream, ready, ran.begin)
        self._done[group] = self._done.get(group, 0) + 1
        if stream is not None:
            self._free[stream] = end
        if ran.seconds > 0 and ran.work.name != MESSAGES:
            self._beside.append(ran)
        return True

    def _wait_for_ranks(self, stream: Stream, begin: float, end: float) -> None:
        if self._end_of_collective is not None and stream == _COMPUTE and begin < end:
            self.waits.append((begin, end))

    def _start_pending(self, group: str) -> bool:
        """Time the started collectives whose communicator is free; return whether there was any."""
        moved = False
        while (found := self._pending.get(key := (group, self._done.get(group, 0)))) is not None:
            item, ready = found
            assert item.ran is not None
            if not self._collect(item.ran, ready, None):
                break
            del self._pending[key]
            self._started_ends[item.number] = item.ran.end
            moved = True
        return moved

    def run_operators(self) -> bool:
        """Time the operators at the head of the compute stream; return whether there was one."""
        queue, moved = self._queues[_COMPUTE], False
        while queue:
            item = queue[0]
            if item.operators is not None:
                self._free[_COMPUTE] = self._end_of(item.operators, item.issued)
            elif item.ran is not None and item.ran.event.kind is _KERNEL:
                item.ran.begin = max(item.issued, self._free[_COMPUTE])
                self._free[_COMPUTE] = item.ran.end = self._end_beside(item.ran.work, item.ran.begin)
            else:
                break
            queue.popleft()
            moved = True
        return moved

    def _end_of(self, operators: OperatorRun, issued: float) -> float:
        """Return when the last of consecutive operators ends. The host begins to issue the first at ``issued``."""
        end, launch = self._free[_COMPUTE], self.rates.launch_seconds
        all_issued, index = issued + len(operators.works) * launch, 0
        while index < len(operators.works):
            begin = max(end, issued + (index + 1) * launch)
            self._beside = [one for one in self._beside if one.end > begin] if self._beside else self._beside
            running = tuple([one.work for one in self._beside if one.begin <= begin])
            rests = self._rests_of(operators, running)
            last = max(end + rests[index][0], issued + rests[index][1])
            change = min([one.end if one.begin <= begin else one.begin for one in self._beside], default=last)
            if last <= change:
                return last
            if all_issued <= end:  # operators follow each other: those that end before the change at once
                ahead = bisect_right(rests, change - end - rests[index][0], index + 1, key=_negative_seconds) - 1
                end, index = end + rests[index][0] - rests[ahead][0], ahead
            end = self._end_beside(operators.works[index], max(end, issued + (index + 1) * launch))
            index += 1
        return end

    def _rests_of(self, operators: OperatorRun, beside: tuple[Work, ...]) -> list[tuple[float, float]]:
        """Return, from each operator on, how long the rest takes while the same collectives run.

        Once when the operator before has ended, and once from the time when the host begins to issue the first one: an
        operator waits for both.
        """
        key = operators, beside
        if key not in self._rests:
            rests, seconds, from_issue = list[tuple[float, float]](), 0.0, 0.0
            for index, work in reversed(list(enumerate(operators.works))):
                seconds += self._seconds_beside(work, beside) if beside else self._seconds(Kind.KERNEL, work)
                from_issue = max(from_issue, (index + 1) * self.rates.launch_seconds + seconds)
                rests.append((seconds, from_issue))
            self._rests[key] = rests[::-1]
        return self._rests[key]

    def _end_beside(self, work: Work, begin: float) -> float:
        """Return when an operator ends, of which collectives may run beside some part."""
        self._beside = [one for one in self._beside if one.end > begin] if self._beside else self._beside
        now, left, alone = begin, 1.0, self._seconds(Kind.KERNEL, work)
        while self._beside:
            running = tuple([one.work for one in self._beside if one.begin <= now < one.end])
            changes = [one.begin for one in self._beside if one.begin > now]
            changes += [one.end for one in self._beside if one.begin <= now < one.end]
            seconds = self._seconds_beside(work, running) if running else alone
            change = min(changes, default=now)
            if not changes or now + left * seconds <= change:
                return now + left * seconds
            left -= (change - now) / seconds
            now = change
        return now + alone
