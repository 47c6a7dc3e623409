"""Where the ranks of one machine meet: a file in the trial's scratch folder. Nothing listens on a network for it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from torch._C._distributed_c10d import FileStore, Store


def plain_path(folder: Path) -> str:
    """Return a path of a folder that torch can take, whatever characters its own has; it holds a descriptor open.

    torch reads paths as UTF-8, some as URLs; those of /proc/self/fd are plain.
    """
    if sys.platform != "linux":
        return str(folder)
    return f"/proc/self/fd/{os.open(folder, os.O_RDONLY | os.O_DIRECTORY)}"


def meet(scratch: Path, trial_id: str, world_size: int) -> Store:
    """Return the store by which a trial's ranks find each other.

    The file has the trial's ID in its name: a store that goes late, in a process that trials share, finds its own.
    """
    return FileStore(f"{plain_path(scratch)}/ranks-{trial_id}", world_size)
