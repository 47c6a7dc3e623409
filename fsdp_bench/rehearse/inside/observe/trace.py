"""The stand-in's own notes of what was issued: which kernel or copy on which stream, and who waits for which event.

``in_order`` puts them and the operators that PyTorch called into one order.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

LAUNCH, TO_DEVICE, TO_HOST, RECORD, STREAM_WAIT, HOST_WAITS_EVENT, HOST_WAITS_STREAM, HOST_WAITS_DEVICE = range(8)
"""Kinds of entries: stand_in/stand_in.h, enum traced."""


class Entry(NamedTuple):
    """One entry."""

    kind: int
    stream: int
    """The stand-in's index of the stream; -1 where there is none."""
    value: int
    """Bytes of a copy, the address of an event."""
    name: str
    """The kernel or function that was launched."""


class _Raw(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int), ("stream", ctypes.c_int), ("value", ctypes.c_uint64), ("name", ctypes.c_char_p)]


class Trace:
    """Switches the stand-in's notes on and off, and reads them."""

    def __init__(self) -> None:
        library = ctypes.PyDLL(None)  # it keeps the interpreter's lock: these calls take no time
        self.exists = hasattr(library, "stand_in_trace")
        """Whether this process runs on the stand-in."""
        if not self.exists:
            return
        self.count: Any = library.stand_in_traced
        """Returns how many entries there are by now."""
        self.hide_mode: Any = library.stand_in_trace_by_mode
        """Lets torch's C++ decide as if one TorchDispatchMode, which notes operators, were not there."""
        self._switch, self._entries = library.stand_in_trace, library.stand_in_trace_entries
        self._stream_index = library.stand_in_stream_index
        self.count.restype, self._entries.restype = ctypes.c_size_t, ctypes.c_void_p
        self._stream_index.argtypes = [ctypes.c_void_p]

    def begin(self) -> None:
        """Forget what was noted and note anew."""
        self._switch(1)

    def stop(self) -> bytes:
        """Note nothing more; return what was noted, for ``entries``."""
        self._switch(0)
        address, size = self._entries(), self.count() * ctypes.sizeof(_Raw)
        return ctypes.string_at(address, size) if size else b""

    def entries(self, noted: bytes) -> list[Entry]:
        """Return what was noted."""
        raw = (_Raw * (len(noted) // ctypes.sizeof(_Raw))).from_buffer_copy(noted)
        return [Entry(one.kind, one.stream, one.value, _plain_name(one.name)) for one in raw]

    def stream_index(self, handle: int) -> int:
        """Return the stand-in's index of a CUDA stream."""
        return int(self._stream_index(handle))


@functools.cache
def _plain_name(name: bytes | None) -> str:
    """Return ``at::native::kernel`` of a kernel that C++ has as ``void at::native::kernel<4, float>(int, float*)``."""
    if name is None:
        return "a kernel without a name"
    text, library = name.decode(), ctypes.PyDLL(None)
    demangle = getattr(library, "__cxa_demangle", None)  # libstdc++'s, which torch has loaded
    if demangle is not None:
        demangle.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
        if found := demangle(name, None, None, None):
            text = ctypes.string_at(found).decode()
            library.free(found)
    return text.removeprefix("void ").replace("(anonymous namespace)::", "").partition("<")[0].partition("(")[0]


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

    An operator stands where it launched first, on that stream. Its other launches belong to it; its copies from or to
    the host, and who waits for whom, stand for themselves. A launch within no operator is an event of its own.
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
