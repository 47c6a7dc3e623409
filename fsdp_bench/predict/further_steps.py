"""Writes out further steps like the last one that was simulated: the same events, with names of their own.

What a caching allocator has reserved grows beyond the second step, where step by step other blocks are cut from what
the steps before left. Simulating a step costs more than replaying it, so only the first ones are simulated.
"""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_bench.predict.events import Event, Kind

_MAKES = (Kind.ALLOCATE, Kind.RECORD_EVENT)
"""What gives a name."""
_new = tuple.__new__


def repeat(events: Sequence[Event], begin: int, times: int) -> list[Event] | None:
    """Return what ``times`` more steps like ``events[begin:]`` do.

    None where that step does not leave behind what it found: then it is not like the ones that follow it.
    """
    step = events[begin:]
    handed_on = _handed_on(events[:begin], step)
    if handed_on is None:
        return None
    made = [event.number for event in step if event.kind in _MAKES]
    unused = 1 + max((event.number for event in events), default=0)
    further: list[Event] = []
    names: dict[int, int] = {}
    for _ in range(times):
        found = {old: names.get(new, new) for old, new in handed_on.items()}
        names = found | dict(zip(made, range(unused, unused + len(made)), strict=True))
        unused += len(made)
        further += [_new(Event, (event[0], names.get(event[1], event[1]), *event[2:])) for event in step]
    return further


def _handed_on(before: Sequence[Event], step: Sequence[Event]) -> dict[int, int] | None:
    """Map what a step found and used up to what it left in its place; None where that is not as much."""
    freed = {event.number for event in step if event.kind is Kind.FREE}
    found = {e.number: e.label for e in before if e.kind is Kind.ALLOCATE and e.number in freed}
    left = {e.number: e.label for e in step if e.kind is Kind.ALLOCATE and e.number not in freed}
    queued, queued_after = _queue(before), _queue([*before, *step])
    if list(found.values()) != list(left.values()) or len(queued) != len(queued_after):
        return None
    return dict(zip([*found, *queued], [*left, *queued_after], strict=True))


def _queue(events: Sequence[Event]) -> list[int]:
    """Return the events that were recorded and not waited for, in their order."""
    waited = {event.number for event in events if event.kind is Kind.HOST_WAIT}
    return [e.number for e in events if e.kind is Kind.RECORD_EVENT and e.number not in waited]
