"""Further steps like the last one that was simulated: what each one uses up, and what it leaves in its place.

And what remains of a first step in the log of a later one (first_forward_alone).

Reserved memory can grow beyond the second step, because each step cuts other blocks from what the steps before have
freed. In the 146 settings of sweeps/h200.toml that fit, replayed for ten steps, it stopped growing after step 1 in 69,
after 2 in 61, after 3 in 13 and after 4 in 3 (predicted events); in PyTorch's own allocator, eight steps of one trial,
after step 4.

A step that ends with as many live tensors as it began with can be replayed: each tensor that it left is renamed to the
one that it replaces. Nothing is simulated or written out twice.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from fsdp_bench.simulate.events import Event, Kind, Queue

_ALLOCATE, _FREE, _RECORD_EVENT, _MARK = Kind.ALLOCATE, Kind.FREE, Kind.RECORD_EVENT, Kind.MARK
_WAITS = Kind.HOST_WAIT, Kind.WAIT_EVENT
_OF_QUEUES = (*_WAITS, _RECORD_EVENT)


def first_forward_alone(events: Sequence[Event], label: str) -> list[Event]:
    """Return a first step of which the first forward is whole, and what follows it happens at once, under ``label``.

    For readers of a later step: of the first one they want the peak of its forward, and what it leaves. What follows
    frees what forward has left alive, and allocates what stays, each in its block's part.
    """
    cut = next(index for index, event in enumerate(events) if event.kind is _MARK and event.label == "loss")
    made = {event.number for event in events[cut:] if event.kind is _ALLOCATE}
    passing = made & {event.number for event in events[cut:] if event.kind is _FREE}
    found = [event for event in events[:cut] if event.kind is not Kind.REPEAT]
    for event in events[cut:]:
        if event.kind is _MARK:
            found.append(replace(event, label=label))
        elif event.kind in _OF_QUEUES or (event.kind in (_ALLOCATE, _FREE) and event.number not in passing):
            found.append(event)
    return found


def replaced_tensors(events: Sequence[Event], begin: int) -> list[tuple[int, int]] | None:
    """Return the tensors that the step ``events[begin:]`` uses up, each with the one that it leaves in its place.

    None where it does not leave as much as it found: tensors with the same labels, made in the same order, and as many
    recorded events of each queue that nobody waited for.
    """
    labels: tuple[dict[int, str], dict[int, str]] = {}, {}  # of what is alive: made before the step, and in it
    used_up: set[int] = set()
    queued, queued_before = [0] * len(Queue), [0] * len(Queue)
    alive = labels[0]
    for index, event in enumerate(events):
        if index == begin:
            alive, queued_before = labels[1], queued.copy()
        kind, number = event.kind, event.number
        if kind is _ALLOCATE:
            alive[number] = event.label
        elif kind is _FREE:
            if number in alive:
                del alive[number]
            else:
                used_up.add(number)
        elif kind is _RECORD_EVENT:
            queued[number] += 1
        elif kind in _WAITS:
            queued[number] -= 1
    found = [number for number in labels[0] if number in used_up]
    if [labels[0][number] for number in found] != list(labels[1].values()) or queued != queued_before:
        return None
    return list(zip(found, labels[1], strict=True))
