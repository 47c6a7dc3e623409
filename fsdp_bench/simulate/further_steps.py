"""Further steps like the last one that was simulated: what each one uses up, and what it leaves in its place.

What a caching allocator has reserved grows beyond the second step, where step by step other blocks are cut from what
the steps before left. How far: of the 146 settings of sweeps/h200.toml that fit, replayed for ten steps, what was
reserved grew last in the first step in 69, in the second in 61, in the third in 13, in the fourth in 3, and in none
later (predicted events through allocator.py); PyTorch's own allocator, eight steps of one trial, last in the fourth.

A step that leaves as much as it found does the same again to other tensors. So it is run again
as it stands, once what it left has been given the names of what it found: nothing is simulated or written out twice.
"""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_bench.simulate.events import Event, Kind, Queue

_ALLOCATE, _FREE, _RECORD_EVENT = Kind.ALLOCATE, Kind.FREE, Kind.RECORD_EVENT
_WAITS = Kind.HOST_WAIT, Kind.WAIT_EVENT


def handed_on(events: Sequence[Event], begin: int) -> list[tuple[int, int]] | None:
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
        kind, number = event[0], event[1]
        if kind == _ALLOCATE:
            alive[number] = event[5]
        elif kind == _FREE:
            if number in alive:
                del alive[number]
            else:
                used_up.add(number)
        elif kind == _RECORD_EVENT:
            queued[number] += 1
        elif kind in _WAITS:
            queued[number] -= 1
    found = [number for number in labels[0] if number in used_up]
    if [labels[0][number] for number in found] != list(labels[1].values()) or queued != queued_before:
        return None
    return list(zip(found, labels[1], strict=True))
