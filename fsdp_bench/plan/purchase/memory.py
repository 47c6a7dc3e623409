"""Whether a setting may fit a number of ranks, from the simulation of few.

What a rank holds falls with the number of ranks over which it is sharded. So what fits some ranks fits more, and only
the numbers between two powers of two of which one fits are simulated themselves. What a plan offers is simulated as it
is in the end, with PyTorch's caching allocator.
"""

from __future__ import annotations

from collections.abc import Callable


class LiveBytes:
    """The peak of live bytes of one setting and micro-batch, by the number of ranks."""

    def __init__(self, simulate: Callable[[int], int], smallest: int, largest: int) -> None:
        """Take a function that simulates a number of ranks, and the smallest and largest numbers that are asked for."""
        self._simulate = simulate
        self._smallest, self._largest = smallest, largest
        self.known: dict[int, int] = {}
        """The simulations, by the number of ranks."""

    def at(self, ranks: int) -> int:
        """Return the live bytes on so many ranks."""
        if ranks not in self.known:
            self.known[ranks] = self._simulate(ranks)
        return self.known[ranks]

    @property
    def least(self) -> int:
        """The live bytes on the most ranks."""
        return self.at(self._largest)

    def may_fit(self, ranks: int, available_bytes: int) -> bool:
        """Return whether the live bytes on so many ranks are within a GPU's available memory."""
        if self.least > available_bytes:
            return False
        below = self._smallest
        if self.at(below) <= available_bytes:
            return True
        while 2 * below <= ranks:
            below *= 2
        if below > self._smallest and self.at(below) <= available_bytes:
            return True
        if (above := 2 * below) < self._largest and self.at(above) > available_bytes:
            return False
        return self.at(ranks) <= available_bytes
