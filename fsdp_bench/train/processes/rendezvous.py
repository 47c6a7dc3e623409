"""The way the ranks of a trial find each other, and which node they are on.

On one machine a file in the trial's scratch folder is the rendezvous, and nothing listens on a network. On several
nodes it is the store of torchrun's rendezvous (torchrun.py): a TCPStore on the first node.
"""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

from torch._C._distributed_c10d import FileStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

STORE = "FSDP_BENCH_STORE"
"""The environment variable that says where the ranks' store is: ``env://``, torchrun's; without it, in a file."""

NODE = "FSDP_BENCH_NODE"
"""The environment variable with the node's name, where several nodes may have the same host name."""


def plain_path(folder: Path) -> str:
    """Return a path of a folder that torch accepts, whatever characters the folder's name has. Keeps a descriptor open.

    torch reads paths as UTF-8, and some as URLs. Paths in /proc/self/fd are plain ASCII.
    """
    if sys.platform != "linux":
        return str(folder)
    return f"/proc/self/fd/{os.open(folder, os.O_RDONLY | os.O_DIRECTORY)}"


def meet(scratch: Path, trial_id: str, world_size: int) -> Store:
    """Return the store by which a trial's ranks find each other."""
    if is_on_several_nodes():
        store, _, _ = next(iter(rendezvous(os.environ[STORE])))
        return PrefixStore(trial_id, store)
    return FileStore(f"{plain_path(scratch)}/ranks-{trial_id}", world_size)


def is_on_several_nodes() -> bool:
    """Whether this rank has peers on other nodes."""
    return STORE in os.environ


def node_name() -> str:
    """Return the name of the node that this process is on: the launcher's, Slurm's, or the host's."""
    return os.environ.get(NODE) or os.environ.get("SLURMD_NODENAME") or platform.node()
