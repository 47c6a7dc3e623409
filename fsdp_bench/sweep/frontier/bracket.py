"""The search for the largest step of a dial that holds, as a pure function of the answers so far.

It begins at a prediction and keeps two promises for every truth that is monotone:

- never more trials than bisection takes: one for each end, then ceil(log2(steps)) halvings;
- at most NEAR_TRIALS when the prediction is within NEAR of the truth, by the dial's value.

An index is allowed only when, whatever its answer, the answers that remain possible can still be told apart within
these promises. Of the allowed indices the one is tried that is nearest to what would confirm the prediction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

NEAR_TRIALS = 4
NEAR = 0.05
"""A prediction this close to the truth, of the larger of the two values, is near."""


@dataclass(frozen=True)
class Bracket:
    """One search. The truth is the index of the largest step that holds; -1 when none does."""

    values: Sequence[int]
    """The dial's values, increasing."""
    predicted: int | None
    """The index that is predicted, -1 for none; None without a prediction, which begins in the middle."""

    @property
    def most_trials(self) -> int:
        """What bisection takes."""
        return 2 + (len(self.values) - 1).bit_length()

    def bounds(self, answers: Mapping[int, bool]) -> tuple[int, int]:
        """Return the truth's lower bound, and the smallest index that is known not to hold.

        What held above something that did not hold counts for nothing.
        """
        high = min((index for index, holds in answers.items() if not holds), default=len(self.values))
        low = max((index for index, holds in answers.items() if holds and index < high), default=-1)
        return low, high

    def next_index(self, answers: Mapping[int, bool]) -> int | None:
        """Return the index to try next; None when the answer is known."""
        low, high = self.bounds(answers)
        if high - low <= 1:
            return None
        middle = (low + high) // 2
        wanted = self._wanted(low, high)
        if wanted is None:
            return middle
        near = self._near()
        for truths in (near, range(0)):  # where both promises cannot be kept, the first one is
            deadlines = [self._deadline(truth, truths) - len(answers) for truth in range(low, high)]
            for index in sorted(range(low + 1, high), key=lambda index: abs(index - wanted)):
                split = index - low
                if _can_tell_apart(deadlines[:split]) and _can_tell_apart(deadlines[split:]):
                    return index
        return middle

    def _wanted(self, low: int, high: int) -> int | None:
        """Return what would confirm the prediction; where it was wrong, ever larger strides away from it."""
        if self.predicted is None:
            return None
        if low < self.predicted < high:
            return self.predicted
        too_low = low >= self.predicted
        stride = low + (low - self.predicted) + 1 if too_low else high - (self.predicted - high) - 1
        return stride if low < stride < high else (low + high) // 2

    def _near(self) -> range:
        """Return the truths from which the prediction is within NEAR."""
        if self.predicted is None:
            return range(0)
        if self.predicted < 0:
            return range(-1, 0)
        value = self.values[self.predicted]
        near = [i for i, other in enumerate(self.values) if abs(other - value) <= NEAR * max(other, value)]
        return range(near[0], near[-1] + 1)

    def _deadline(self, truth: int, near: range) -> int:
        return min(NEAR_TRIALS, self.most_trials) if truth in near else self.most_trials


def _can_tell_apart(deadlines: Iterable[int]) -> bool:
    """Whether, after one more trial, each of these truths in a row can be found within its number of trials.

    R. W. Yeung, "Alphabetic codes revisited", IEEE Trans. Inf. Theory 37 (1991): place the code words from left to
    right, each at the next multiple of its own size; they fit when the end is not passed.
    """
    left = [deadline - 1 for deadline in deadlines]
    if not left or min(left) < 0:
        return False
    longest, position = max(left), 0
    for length in left:
        size = 1 << (longest - length)
        position = -(-position // size) * size + size
    return position <= 1 << longest
