"""The folder of what can be made again: recordings, compiled code. Losing it costs time, never an answer."""

from __future__ import annotations

import os
import shutil
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

    A folder of this user's that others could have written to is emptied. The answer is None where there can be no
    private folder: no home, another owner, a disk that is full or read-only. Then the caller does without.
    """
    base = cache_folder()
    if base is None:
        return None
    with suppress(OSError):
        base.mkdir(parents=True, exist_ok=True)
        if _is_own(base) and not _is_private(base):
            base.chmod(base.stat().st_mode & ~_WRITABLE_BY_OTHERS)
        folder = base / name
        if folder.exists() and _is_own(folder) and not _is_private(folder):
            shutil.rmtree(folder)
        folder.mkdir(mode=0o700, exist_ok=True)
        if _is_private(base) and _is_private(folder) and os.access(folder, os.W_OK):
            return folder
    return None


def _is_own(folder: Path) -> bool:
    return folder.stat().st_uid == os.geteuid()


def _is_private(folder: Path) -> bool:
    """Return whether nobody else may write in a folder. Root's count as this user's: root may write in all."""
    found = folder.stat()
    return found.st_uid in (os.geteuid(), 0) and not found.st_mode & _WRITABLE_BY_OTHERS
