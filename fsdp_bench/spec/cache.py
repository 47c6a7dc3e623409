"""The folder of what can be made again: recordings, compiled code. Losing it costs time, never an answer."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def cache_folder() -> Path | None:
    """Return ``$XDG_CACHE_HOME/fsdp-bench``, else ``~/.cache/fsdp-bench``; None for a user without a home."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / "fsdp-bench"
    except RuntimeError:  # no HOME, and a user without an entry in passwd, as containers have
        return None


def private_folder(name: str) -> Path | None:
    """Return a folder of the cache for code that will run, which only this user may write; made where it is missing.

    In a cache that others may write to, or that is another user's, nothing is taken, changed or removed: the folder is
    then in ``fsdp-bench-UID`` beside it. The answer is None where there can be no private folder: no home, a disk that
    is full or read-only. Then the caller does without.
    """
    for base in _bases():
        folder = base / name
        with suppress(OSError):
            base.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
        if _is_private(base) and _is_private(folder) and os.access(folder, os.W_OK):
            return folder
    return None


def _bases() -> tuple[Path, ...]:
    base = cache_folder()
    return () if base is None else (base, base.with_name(f"{base.name}-{os.geteuid()}"))


def _is_private(folder: Path) -> bool:
    """Return whether a folder is there in which nobody else may write. Root's is as this user's: root writes in all."""
    try:
        found = folder.stat()
    except OSError:
        return False
    return found.st_uid in (os.geteuid(), 0) and not found.st_mode & _WRITABLE_BY_OTHERS
