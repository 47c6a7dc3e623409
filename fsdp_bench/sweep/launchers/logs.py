"""The ranks' log files, limited in size: only the end of a long log is kept and read."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import IO

MOST_LOG_BYTES = 16 * 1024**2
"""A log that grows beyond this while a trial runs is cut to its last TAIL_BYTES."""
TAIL_BYTES = 64 * 1024
MOST_LINE_CHARACTERS = 500


def last_lines(path: Path, count: int) -> list[str]:
    """Return the last lines of a log, long lines shortened. Without a log, return no lines."""
    try:
        with open(path, "rb") as file:
            return last_lines_of(file, count)
    except OSError:
        return []


def last_lines_of(file: IO[bytes], count: int) -> list[str]:
    """Return the last lines of an open log, long lines shortened."""
    lines = _tail(file).decode(errors="replace").strip().splitlines()[-count:]
    return [line if len(line) <= MOST_LINE_CHARACTERS else line[:MOST_LINE_CHARACTERS] + " [...]" for line in lines]


def cut_down(folder: Path) -> None:
    """Cut each log of a folder that is too large to its last part. Ranks append, so they go on writing after it."""
    with contextlib.suppress(OSError):
        for path in folder.glob("*.log"):
            if path.stat().st_size > MOST_LOG_BYTES:
                with open(path, "a+b") as file:
                    tail = _tail(file)
                    os.truncate(path, 0)
                    file.write(b"[what came before was too much to keep]\n" + tail)


def _tail(file: IO[bytes]) -> bytes:
    file.seek(max(os.fstat(file.fileno()).st_size - TAIL_BYTES, 0))
    return file.read(TAIL_BYTES)
