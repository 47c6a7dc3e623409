"""Chooses the next candidate to try, in a search with real trials for the largest that fits (or runs).

First it tries the predicted candidate and the next larger one: two trials confirm a correct prediction. If the
prediction is wrong, it takes ever larger strides away from it until there is a candidate that fits and a larger one
that does not; then it bisects between the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Bracket:
    """One search for the index of the largest candidate that fits (or runs). -1 if none does."""

    num_candidates: int
    predicted: int | None
    """The predicted index; -1 if none is predicted to fit. None: no prediction, the search begins in the middle."""

    @property
    def most_trials(self) -> int:
        """The number of trials of a bisection: both ends, then the halvings."""
        return 2 + (self.num_candidates - 1).bit_length()

    def bounds(self, answers: Mapping[int, bool]) -> tuple[int, int]:
        """Return the largest index that is known to fit, and the smallest index that is known not to fit.

        An index that fits above one that does not is ignored.
        """
        high = min((index for index, fits in answers.items() if not fits), default=self.num_candidates)
        low = max((index for index, fits in answers.items() if fits and index < high), default=-1)
        return low, high

    def next_index(self, answers: Mapping[int, bool]) -> int | None:
        """Return the index to try next. None if the answer is known."""
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
