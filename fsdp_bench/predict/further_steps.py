"""Writes out further steps like the last one that was simulated: the same events, with names of their own.

What a caching allocator has reserved grows beyond the second step, where step by step other blocks are cut from what
the steps before left. Simulating a step costs more than replaying it, so only the first ones are simulated.
"""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_bench.predict.events import Event, Kind

_ALLOCATE, _FREE, _RECORD_EVENT, _HOST_WAIT = Kind.ALLOCATE, Kind.FREE, Kind.RECORD_EVENT, Kind.HOST_WAIT
_MAKES = {Kind.ALLOCATE, Kind.RECORD_EVENT}
"""What gives a name."""
_new = tuple.__new__


def repeat(events: Sequence[Event], begin: int, times: int) -> list[Event] | None:
    """Return what ``times`` more steps like ``events[begin:]`` do.

    None where that step does not leave behind what it found: then it is not like the ones that follow it.
    """
    step = events[begin:]
    handed_on = _handed_on(events, begin)
    if handed_on is None:
        return None
    made = [event[1] for event in step if event[0] in _MAKES]
    unused = 1 + max([event[1] for event in events], default=0)
    rest = [event[2:] for event in step]
    further: list[Event] = []
    names: dict[int, int] = {}
    for _ in range(times):
        found = {old: names.get(new, new) for old, new in handed_on.items()}
        names = found | dict(zip(made, range(unused, unused + len(made)), strict=True))
        unused += len(made)
        name = names.get
        further += [
            _new(Event, (event[0], name(event[1], event[1]), *others)) for event, others in zip(step, rest, strict=True)
        ]
    return further


def _handed_on(events: Sequence[Event], begin: int) -> dict[int, int] | None:
    """Map what a step found and used up to what it left in its place; None where that is not as much."""
    labels: tuple[dict[int, str], dict[int, str]] = {}, {}  # of what is alive: made before the step, and in it
    queue: dict[int, None] = {}  # what was recorded and not waited for, in its order
    used_up: set[int] = set()
    queued: list[int] = []
    alive = labels[0]
    for index, event in enumerate(events):
        if index == begin:
            alive, queued = labels[1], list(queue)
        kind, number = event[0], event[1]
        if kind == _ALLOCATE:
            alive[number] = event[5]
        elif kind == _FREE:
            if number in alive:
                del alive[number]
            else:
                used_up.add(number)
        elif kind == _RECORD_EVENT:
            queue[number] = None
        elif kind == _HOST_WAIT:
            del queue[number]
    found = [number for number in labels[0] if number in used_up]
    if [labels[0][number] for number in found] != list(labels[1].values()) or len(queued) != len(queue):
        return None
    return dict(zip([*found, *queued], [*labels[1], *queue], strict=True))
