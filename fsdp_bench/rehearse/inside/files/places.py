"""Shared by the protections of files: the folders that are temporary or protected, and counts of files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

ENTERED = "entered.json"
"""The file beside the plan in which rehearse/enter.py says how the overlays went."""

_TEMPORARY = ("/tmp", "/var/tmp", "/dev/shm")


Changes = tuple[int, int]
"""The numbers of files that the script wrote and removed, without Python's caches."""


def temporary_folders() -> list[str]:
    """Return the folders that are written as usual: those in which processes meet, and our own caches."""
    caches = (os.environ[name] for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR") if name in os.environ)
    places = (tempfile.gettempdir(), *_TEMPORARY, *caches)
    return sorted({os.path.realpath(place) for place in places if os.path.isdir(place)})


def protected_folders(words: Sequence[str]) -> list[str]:
    """Return the working directory and the folders of files that a command names, which may be in a temporary one."""
    named = {os.path.dirname(os.path.abspath(word)) for word in words if os.path.isfile(word)}
    return sorted({os.path.realpath(folder) for folder in (os.getcwd(), *named)})


def named_by(plan: Mapping[str, Any]) -> list[str]:
    """Return the words of a plan that may name files: the command's, and the files that it finds edited."""
    return [*plan["words"], *plan["edited"]]


def is_below(path: str, folder: str) -> bool:
    """Whether a path is a folder, or in it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def num_files(path: str) -> int:
    """Return how many files are at a path: those in a folder, else one."""
    if os.path.islink(path) or not os.path.isdir(path):
        return 1
    return sum(len(files) for _, _, files in os.walk(path))
