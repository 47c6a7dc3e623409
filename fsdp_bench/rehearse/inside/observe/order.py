"""Puts what PyTorch called and what the stand-in saw of it into one order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .trace import (
    HOST_WAITS_DEVICE,
    HOST_WAITS_EVENT,
    HOST_WAITS_STREAM,
    LAUNCH,
    RECORD,
    STREAM_WAIT,
    TO_DEVICE,
    TO_HOST,
    Entry,
)

_COPIES = {TO_DEVICE: "to_device", TO_HOST: "to_host"}


@dataclass(frozen=True)
class Note:
    """An operator that PyTorch called, and the stand-in's entries that it led to."""

    begin: int
    end: int
    """Index of the first entry, and of the one after the last."""
    document: dict[str, Any]
    is_alone: bool = False
    """Whether its entries are no work of their own."""


def in_order(notes: Sequence[Note], entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Return the events of a step.

    An operator stands where it launched first, on that stream. What it launched besides belongs to it; its copies from
    or to the host, and who waits for whom, stand for themselves. A launch within no operator is an event of its own.
    """
    owners = _owners(notes, len(entries))
    waiting = sorted((note for note in notes if note.is_alone or note.begin == note.end), key=lambda note: note.begin)
    found: list[dict[str, Any]] = []
    done, position = set[int](), 0
    for index, entry in enumerate(entries):
        while position < len(waiting) and waiting[position].begin <= index:
            found.append(waiting[position].document)
            position += 1
        owner = owners[index]
        if owner is None or not owner.is_alone:
            found += _event(entry, owner, done)
    return found + [note.document for note in waiting[position:]]


def _owners(notes: Sequence[Note], count: int) -> list[Note | None]:
    """Return the note that each entry belongs to: of several a collective, or the one with the fewest entries."""
    owners: list[Note | None] = [None] * count
    for note in sorted(notes, key=lambda note: (note.is_alone, note.begin - note.end)):
        owners[note.begin : note.end] = [note] * (note.end - note.begin)
    return owners


def _event(entry: Entry, owner: Note | None, done: set[int]) -> list[dict[str, Any]]:
    if entry.kind == LAUNCH:
        if owner is None:
            return [{"kind": "kernel", "name": entry.name, "stream": entry.stream}]
        if id(owner) in done:
            return []
        done.add(id(owner))
        return [{**owner.document, "stream": entry.stream}]
    if entry.kind in _COPIES:
        return [{"kind": "copy", "name": _COPIES[entry.kind], "num_bytes": entry.value, "stream": entry.stream}]
    if entry.kind in (RECORD, STREAM_WAIT):
        kind = "record" if entry.kind == RECORD else "wait"
        return [{"kind": kind, "event": entry.value, "stream": entry.stream}]
    assert entry.kind in (HOST_WAITS_EVENT, HOST_WAITS_STREAM, HOST_WAITS_DEVICE)
    event = entry.value if entry.kind == HOST_WAITS_EVENT else None
    stream = entry.stream if entry.kind == HOST_WAITS_STREAM else None
    return [{"kind": "host_wait", "event": event, "stream": stream}]
