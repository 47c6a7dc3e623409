"""Protects the user's files by overlays, or else by Python's functions; counts the files that the script changed."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import overlay
from .guard import Guard
from .places import ENTERED, is_below, protected_folders


class Protection:
    """The protection of the user's files in a rehearsal."""

    def __init__(self, scratch: Path, words: Sequence[str]) -> None:
        """Continue what enter.py began in ``scratch``, while the process has one thread.

        Files that ``words``, the command, names are protected even in a temporary folder.
        """
        entered = scratch / ENTERED
        said = json.loads(entered.read_text()) if entered.exists() else {"overlays": []}  # a test's plan has no scratch
        self._overlays: list[overlay.Layers] | None = said.get("overlays")
        self._guard: Guard | None = None
        self._protected: list[str] = said.get("protected", [])
        """Folders of files that the command names: what is written there stays off the disk."""
        self._edited: list[str] = []
        self._limits = [
            f"{place} is read-only: its file system can have no overlay." for place in said.get("read_only", ())
        ]
        self._limits += [f"{place} does not answer, and has no overlay." for place in said.get("silent", ())]
        if self._overlays:
            overlay.rename_folders_by_copying()
        elif self._overlays is None:
            folders = self._protected = protected_folders(words)
            if (guard := Guard.installed) is None:
                guard = Guard(str(scratch), folders)
            else:
                guard.begin_anew(str(scratch), folders)
            self._guard = guard
            refuses = refuse_writes_outside(guard.writable)
            is_writable = any(is_below(folder, one) for folder in folders for one in guard.writable)
            others = "are refused" if refuses and not is_writable else "REACH THE DISK"
            self._limits.append(
                f"This machine allows no overlay ({said['error']}): files that Python writes stay off the disk;"
                f" those that C++, Rust or another program writes by itself {others}."
            )
        for limit in self._limits:
            print(f"fsdp-bench: {limit}", file=sys.stderr, flush=True)

    def edit(self, texts: Mapping[str, str]) -> None:
        """Write files that the script sees instead of the disk's. Raises OSError for one that would reach the disk."""
        for file, text in texts.items():
            if not any(is_below(os.path.dirname(os.path.realpath(file)), folder) for folder in self._protected):
                raise OSError(f"--edit: {file} cannot be kept as it is here; copy it beside the script")
            with open(file, "w") as writable:
                writable.write(text)
        self._edited = list(texts)

    def seen(self, path: Any) -> Any:
        """Return the path that a library which does not open files by Python has to read."""
        return path if self._guard is None else self._guard.seen(path)

    def notes(self) -> list[str]:
        """Say how many files the script wrote and removed, if any, and what the protection does not cover."""
        written, removed = self._guard.changes() if self._guard else overlay.changes(self._overlays or [])
        written = max(written - len(self._edited), 0)
        notes = [f"The script found {file} as --edit changes it; the disk's is as it was." for file in self._edited]
        if written or removed:
            files = f"{written} file{'s' * (written != 1)}"
            notes.append(f"The script wrote {files} and removed {removed}, which the disk does not show.")
        return notes + self._limits


_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""System calls, with the same numbers on all architectures."""
_VERSION, _PATH_BENEATH, _NO_NEW_PRIVILEGES = 1, 1, 38
_WITH_REFER = 2
"""The version of the interface with which files can be moved between folders that may be written."""
_WITH_TRUNCATE = 3

_WRITE_FILE, _TRUNCATE = 1 << 1, 1 << 14
_CHANGES = sum(1 << bit for bit in (1, *range(4, 14)))
"""LANDLOCK_ACCESS_FS_WRITE_FILE, REMOVE_DIR to MAKE_SYM, and REFER."""


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def refuse_writes_outside(folders: Iterable[str]) -> bool:
    """Let only files in these folders be changed, by this thread and what it starts. Return whether the kernel does.

    Landlock (man 7 landlock) of Linux 5.19 and newer; without it, nothing is refused. Permissions, owners, times and
    attributes of files can be changed nevertheless.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(_CREATE_RULESET, None, 0, _VERSION)
    if version < _WITH_REFER:
        return False
    changes = _CHANGES | (_TRUNCATE if version >= _WITH_TRUNCATE else 0)
    handled = ctypes.c_uint64(changes)
    rules = libc.syscall(_CREATE_RULESET, ctypes.byref(handled), ctypes.sizeof(handled), 0)
    if rules < 0:
        return False
    for folder in folders:
        place = os.open(folder, os.O_PATH)
        rule = _PathBeneath(changes, place)
        libc.syscall(_ADD_RULE, rules, _PATH_BENEATH, ctypes.byref(rule), 0)
        os.close(place)
    refuses = libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0 and libc.syscall(_RESTRICT_SELF, rules, 0) == 0
    os.close(rules)
    return refuses
