"""Times a function on all ranks at once, repeated often enough to be measured.

The mean counts, not the median: ranks that share cores take turns, and a round in which a rank has a core for itself
is not like training.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

ROUNDS = 4


class Stopwatch:
    """Times functions on one device. All ranks call it in the same order, with the same limits."""

    def __init__(
        self,
        device: torch.device,
        round_seconds: float,
        rounds: int = ROUNDS,
        average: Callable[[list[float]], float] = statistics.fmean,
    ) -> None:
        self.device = device
        self.round_seconds = round_seconds
        """The duration of a round."""
        self.rounds = rounds
        self._average = average

    def seconds(self, call: Callable[[], object], together: bool = False) -> float:
        """Return the seconds of one call, as the mean over ranks.

        Args:
            call: the function to time. Its result is dropped.
            together: whether the call is a collective, so that every rank must make the same number of calls.
        """
        call()
        once = self._round(call, 1)
        if together:
            once = self._over_ranks(once, dist.ReduceOp.MAX)
        times = max(int(self.round_seconds / max(once, 1e-7)), 1)
        dist.barrier()
        rounds = [self._round(call, times) for _ in range(self.rounds)]
        mean = self._average(rounds)
        if dist.get_backend() == "fake":  # its collectives add nothing up
            return mean
        return self._over_ranks(mean, dist.ReduceOp.SUM) / dist.get_world_size()

    def _round(self, call: Callable[[], object], times: int) -> float:
        self._synchronize()
        begin = time.perf_counter()
        for _ in range(times):
            call()
        self._synchronize()
        return (time.perf_counter() - begin) / times

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _over_ranks(self, value: float, operation: dist.ReduceOp.RedOpType) -> float:
        reduced = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(reduced, operation)
        return float(reduced)
