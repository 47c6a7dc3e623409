"""Further steps like the last one that was simulated: what each one uses up, and what it leaves in its place.

Reserved memory can grow beyond the second step, because each step cuts other blocks from what the steps before have
freed. Of the 146 settings of sweeps/h200.toml that fit, replayed for ten steps, it stopped growing after step 1 in 69,
after 2 in 61, after 3 in 13 and after 4 in 3 (predicted events through allocator.py); in PyTorch's own allocator, eight
steps of one trial, after step 4.

A step that ends with as many live tensors as it began with can be replayed: each tensor that it left is renamed to the
one that it replaces. Nothing is simulated or written out twice.
"""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_bench.simulate.events import Event, Kind, Queue

_ALLOCATE, _FREE, _RECORD_EVENT = Kind.ALLOCATE, Kind.FREE, Kind.RECORD_EVENT
_WAITS = Kind.HOST_WAIT, Kind.WAIT_EVENT


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
