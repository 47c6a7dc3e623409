"""Scripts that start their own processes with torch.multiprocessing.spawn: one of them runs, in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.multiprocessing


class _Ended:
    """The result of spawn with ``join=False``: processes that have ended."""

    processes: Sequence[Any] = ()

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Return that all have ended."""
        return True

    def pids(self) -> list[int]:
        """Return no process."""
        return []


def run_one_process(local_rank: int) -> None:
    """Replace torch.multiprocessing.spawn by a call of the function, as this rank of the node."""

    def spawn(
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        nprocs: int = 1,
        join: bool = True,
        daemon: bool = False,
        start_method: str = "spawn",
    ) -> _Ended | None:
        """Run one process of several."""
        if local_rank >= nprocs:
            raise ValueError(
                f"torch.multiprocessing.spawn starts {nprocs} processes, and rank {local_rank} is none of them"
            )
        fn(local_rank, *args)
        return None if join else _Ended()

    torch.multiprocessing.spawn = spawn
