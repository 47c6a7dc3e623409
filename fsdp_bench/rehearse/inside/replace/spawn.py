"""Scripts that start their own processes with torch.multiprocessing.spawn: one of them runs, in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.multiprocessing


def run_one_process(local_rank: int) -> None:
    """Replace torch.multiprocessing.spawn by a call of the function, as this rank of the node."""

    def spawn(
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        nprocs: int = 1,
        join: bool = True,
        daemon: bool = False,
        start_method: str = "spawn",
    ) -> None:
        fn(min(local_rank, nprocs - 1), *args)

    torch.multiprocessing.spawn = spawn
    torch.multiprocessing.spawn.__doc__ = "Runs one process of several."
