"""Which candidate to try next, in a search for the largest that fits (or runs) with real trials.

First the predicted one and its neighbour: two trials confirm a prediction that is right. Where it is wrong, ever
larger strides away from it, until candidates on both sides of the answer are known; then the middle between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Bracket:
    """One search for the index of the largest candidate that fits (or runs), -1 when none does."""

    num_candidates: int
    predicted: int | None
    """The index that is predicted, -1 for none; None without a prediction: then the search begins in the middle."""

    @property
    def most_trials(self) -> int:
        """The trials of a bisection: both ends, then the halvings."""
        return 2 + (self.num_candidates - 1).bit_length()

    def bounds(self, answers: Mapping[int, bool]) -> tuple[int, int]:
        """Return the largest index that is known to fit, and the smallest that is known not to.

        A success above a failure does not count.
        """
        high = min((index for index, fits in answers.items() if not fits), default=self.num_candidates)
        low = max((index for index, fits in answers.items() if fits and index < high), default=-1)
        return low, high

    def next_index(self, answers: Mapping[int, bool]) -> int | None:
        """Return the index to try next; None when the answer is known."""
        low, high = self.bounds(answers)
        if high - low <= 1:
            return None
        wanted = None
        if self.predicted is not None and low < self.predicted < high:
            wanted = self.predicted
        elif self.predicted is not None and low >= self.predicted and high == self.num_candidates:
            wanted = 2 * low - self.predicted + 1
        elif self.predicted is not None and high <= self.predicted and low == -1:
            wanted = 2 * high - self.predicted - 1
        return wanted if wanted is not None and low < wanted < high else (low + high) // 2
