"""The rendezvous of ranks on one machine: a file in the trial's scratch folder. Nothing listens on a network."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from torch._C._distributed_c10d import FileStore, Store


def plain_path(folder: Path) -> str:
    """Return a path of a folder that torch accepts, whatever characters the folder's name has. Keeps a descriptor open.

    torch reads paths as UTF-8, and some as URLs. Paths in /proc/self/fd are plain ASCII.
    """
    if sys.platform != "linux":
        return str(folder)
    return f"/proc/self/fd/{os.open(folder, os.O_RDONLY | os.O_DIRECTORY)}"


def meet(scratch: Path, trial_id: str, world_size: int) -> Store:
    """Return the store by which a trial's ranks find each other.

    The file has the trial's ID in its name, so that a store of an earlier trial, deleted late in a shared process, does
    not touch the file of the next trial.
    """
    return FileStore(f"{plain_path(scratch)}/ranks-{trial_id}", world_size)
