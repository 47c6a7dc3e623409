"""Border: which values to rehearse next, until one fits and the next one does not.

Values stand in the order of increasing memory. A straight line through the reserved bytes of two that fit says where
the limit is reached. Whatever the line says, both sides of the border are rehearsed. A value that runs out of memory
says no more than that it is too large, so without a line the interval is halved.
"""

from bisect import bisect_right
from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple

MOST_REFUSED = 8
"""The search ends after so many values of which it is unknown whether they fit, such as odd ones if a script takes even
ones alone."""

GROWTH = 4.0
"""The factor to the next value where no line says one. A line says nothing beyond so many times what fits."""


class Tried(NamedTuple):
    """The answer to one value."""

    fits: bool | None
    """None: unknown, such as of a script that fails."""
    reserved_bytes: int = 0
    """The peak reserved memory, if it fits."""


class Border:
    """A search of the largest value that fits. Values are indices of ``sizes``."""

    def __init__(self, sizes: Sequence[float], start: Sequence[int]) -> None:
        """``sizes``: what memory grows with, rising. ``start``: the values to ask first."""
        self._sizes, self._start = sizes, list(start)
        self.tried: dict[int, Tried] = {}

    @property
    def largest(self) -> int | None:
        """The largest that fits, of those that were asked."""
        return max((index for index, one in self.tried.items() if one.fits), default=None)

    @property
    def next(self) -> int | None:
        """The smallest that does not fit and is larger than all that fit."""
        least = -1 if self.largest is None else self.largest
        return min((index for index, one in self.tried.items() if one.fits is False and index > least), default=None)

    @property
    def is_uneven(self) -> bool:
        """Whether something fits that is larger than something that does not."""
        largest = self.largest
        return largest is not None and any(index < largest for index, one in self.tried.items() if one.fits is False)

    @property
    def between(self) -> range:
        """All indices between the largest that fits and the next that does not, or up to the ends."""
        low, high = self.largest, self.next
        return range(0 if low is None else low + 1, len(self._sizes) if high is None else high)

    @property
    def is_found(self) -> bool:
        """Whether all between the two sides was asked."""
        return all(index in self.tried for index in self.between)

    def wanted(self, limit_bytes: int) -> list[int]:
        """Return the values to ask next, or none at the end; ``limit_bytes`` is the most that may be reserved."""
        if not self.tried:
            return self._start
        num_refused = sum(one.fits is None for one in self.tried.values())
        if self.is_found or num_refused == len(self.tried) or num_refused >= MOST_REFUSED:
            return []
        return list(dict.fromkeys(map(self._nearest_unasked, self._guesses(limit_bytes))))

    def _guesses(self, limit_bytes: int) -> list[int]:
        low, high, last = self.largest, self.next, len(self._sizes) - 1
        reached = self._where_reached(limit_bytes)
        if low is None or (high is None and reached is None):
            edge = self._sizes[high or 0] if low is None else self._sizes[low]
            factor = 1 / GROWTH if low is None else GROWTH
            return [self._index(edge * factor), self._index(edge * factor**2)]
        middle = self._index(sqrt(self._sizes[low] * self._sizes[last if high is None else high]))
        if reached is None or (high is not None and reached >= high):
            return [middle]
        if reached <= low:
            return [low + 1, middle]
        if self._sizes[reached] > GROWTH * self._sizes[low]:
            return [self._index(sqrt(self._sizes[low] * self._sizes[reached])), reached]
        return [reached, reached + 1]

    def _where_reached(self, limit_bytes: int) -> int | None:
        """Return where a line reaches the limit, through the largest that fits and the one nearest to half its size.

        If what the line says was refuted, as where memory grows faster than the value, it goes through the two largest.
        None if fewer than two fit, or if the line does not rise.
        """
        fitting = {index: one.reserved_bytes for index, one in self.tried.items() if one.fits}
        if len(fitting) < 2:
            return None
        *smaller, top = sorted(fitting)
        reached = None
        for other in (min(smaller, key=lambda index: abs(self._sizes[index] - self._sizes[top] / 2)), smaller[-1]):
            slope = (fitting[top] - fitting[other]) / (self._sizes[top] - self._sizes[other])
            reached = self._index(self._sizes[top] + (limit_bytes - fitting[top]) / slope) if slope > 0 else None
            if reached is None or self.next is None or reached < self.next:
                break
        return reached

    def _index(self, size: float) -> int:
        """Return the largest value of at most a size, or the first."""
        return max(bisect_right(self._sizes, size) - 1, 0)

    def _nearest_unasked(self, guess: int) -> int:
        return min((index for index in self.between if index not in self.tried), key=lambda index: abs(index - guess))
