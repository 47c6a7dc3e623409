"""Landlock: the kernel refuses this process, and all that it starts, to change files outside of some folders.

Linux 5.19 and newer; without it, nothing is refused. Permissions, owners, times and attributes of files can be changed
nevertheless. See man 7 landlock.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable

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
    """Let only files in these folders be changed, by this thread and what it starts. Return whether the kernel does."""
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
