"""The inverse questions: how far a dial can be turned before a setup no longer fits.

Two limits are found: ``fits``, the last step below the first one that needs an allocation retry or more host memory
than a node has; and ``runs``, the last step below the first one that runs out of memory, retries or not.

Memory does not grow at every step of every dial: on the size ladder a wider model begins with fewer layers, and what
the caching allocator reserves jumps with the sizes. So the answer is the largest step below the *first* failure, and a
larger one may fit again. Within one width memory grows with every layer; so, to find that first failure, the last
depths of the two widths below the answer are tried too. Other dials are taken to be monotonic.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

from fsdp_bench.predict.dials import Dial
from fsdp_bench.predict.estimate import Estimate
from fsdp_bench.predict.judge import Judge, Limit, Verdict

__all__ = ["Judge", "Limit", "Reach", "reach", "reach_all"]

WIDTHS_BELOW = 2
"""Widths below the answer whose last depth is tried: what is reserved was seen to jump by up to 13 % from one width
to the next, which is what two or three widths of the ladder differ by."""

USUAL_SHARES = (0.85, 0.97)
"""Of the live bytes in what is reserved, at the last step that fits and at the last that runs: where a search begins.
Nothing else depends on them."""


Holds = Callable[[Verdict], bool]


@dataclass(frozen=True)
class Reach:
    """How far a dial can be turned."""

    dial: Dial
    fits: int
    """Index of the last step that fits, below the first that does not; -1 where none does."""
    runs: int
    """The same for steps that end without running out of memory, retries allowed; at least ``fits``."""
    limited_by: Limit | None
    """Of the step after ``fits``; None where the dial ends."""
    at: Estimate | None
    """The step that ``fits``."""
    beyond: Estimate | None
    """The step after it."""


def reach(dial: Dial, judge: Judge) -> Reach:
    """Find how far a dial can be turned.

    Raises:
        SpecError: when the card's memory is not known, and for models that cannot be predicted.
    """
    return _reach(dial, judge, _Hint())


def reach_all(dials: Sequence[Dial], judge: Judge, progress: Callable[[int], None] = lambda done: None) -> list[Reach]:
    """Find how far each dial can be turned, on all processors; ``progress`` is told how many are done.

    Raises:
        SpecError: as ``reach``.
    """
    workers = min(len(dials), os.cpu_count() or 1)
    found: list[Reach] = []
    hint = _Hint()
    if workers < 2:
        for dial in dials:
            found.append(_reach(dial, judge, hint))
            progress(len(found))
        return found
    with ProcessPoolExecutor(workers, get_context("fork"), _share, (dials, judge)) as pool:
        for fits, runs, limit, at, beyond in pool.map(_reach_shared, range(len(dials))):
            found.append(Reach(dials[len(found)], fits, runs, limit, at, beyond))
            progress(len(found))
    return found


class _Hint:
    """Where the last search ended: the next dial often differs in one setting only."""

    def __init__(self) -> None:
        self.index: int | None = None
        self.shares = list(USUAL_SHARES)


_shared: tuple[Sequence[Dial], Judge, _Hint] | None = None


def _share(dials: Sequence[Dial], judge: Judge) -> None:
    """Keep what a forked worker works on: dials hold functions, which cannot be sent."""
    global _shared
    _shared = dials, judge, _Hint()


def _reach_shared(index: int) -> tuple[int, int, Limit | None, Estimate | None, Estimate | None]:
    assert _shared is not None
    dials, judge, hint = _shared
    found = _reach(dials[index], judge, hint)
    return found.fits, found.runs, found.limited_by, found.at, found.beyond


def _reach(dial: Dial, judge: Judge, hint: _Hint) -> Reach:
    steps = _Steps(dial, judge, hint.index)
    fits = _below_first_failure(steps, _fits, -1, hint.shares[0])
    runs = _below_first_failure(steps, _runs, fits, hint.shares[1])
    hint.index = max(fits, 0)
    if fits >= 0:
        hint.shares = [steps.share(fits), max(steps.live(runs) / steps.size, steps.share(fits))]
    beyond = fits + 1 if fits + 1 < len(dial) else None
    return Reach(
        dial=dial,
        fits=fits,
        runs=runs,
        limited_by=None if beyond is None else judge.limit(dial[beyond], steps.estimate(beyond)),
        at=steps.estimate(fits) if fits >= 0 else None,
        beyond=None if beyond is None else steps.estimate(beyond),
    )


def _fits(verdict: Verdict) -> bool:
    return verdict.fits


def _runs(verdict: Verdict) -> bool:
    return verdict.runs


class _Steps:
    """The steps of a dial with what is known of them; each question is asked once."""

    def __init__(self, dial: Dial, judge: Judge, start: int | None) -> None:
        self.dial = dial
        self.judge = judge
        self.size = judge.size_bytes(dial[0])
        self._start = min(len(dial) // 2 if start is None else start, len(dial) - 1)
        self._live: dict[int, int] = {}
        self._verdicts: dict[int, Verdict] = {}
        self.end = self._host_end()
        """The first step that needs more host memory than there is."""

    def live(self, index: int) -> int:
        if index not in self._live:
            self._live[index] = self.judge.live_bytes(self.dial[index])
        return self._live[index]

    def verdict(self, index: int) -> Verdict:
        if index not in self._verdicts:
            fails = self.live(index) > self.size
            self._verdicts[index] = Verdict(False, False, None) if fails else self.judge.verdict(self.dial[index])
        return self._verdicts[index]

    def estimate(self, index: int) -> Estimate:
        return self.judge.estimate(self.dial[index], self.verdict(index).reading)

    def share(self, index: int) -> float:
        """Return the part of live bytes in what is reserved at a step that fits."""
        reading = self.verdict(index).reading
        return 1.0 if reading is None else self.live(index) / reading.peak_reserved_bytes

    def guess(self, room: float, low: int, high: int) -> int:
        """Return an index between two whose live bytes come to about ``room``: false position on logarithms."""
        known = {index: math.log(live / room) for index, live in self._live.items()}
        index = min(max(self._start, low + 1), high - 1)
        for _ in range(6):
            known[index] = math.log(self.live(index) / room)
            below = max((i for i, over in known.items() if over <= 0), default=None)
            above = min((i for i, over in known.items() if over > 0), default=None)
            if below is not None and above is not None:
                if above - below <= 1:
                    break
                part = known[below] / (known[below] - known[above])
                index = min(max(below + round(part * (above - below)), below + 1), above - 1)
            else:
                index = min(index * 2 + 1, high - 1) if above is None else max(index // 2, low + 1)
            if index in known or not low < index < high:
                break
        return low + 1 if below is None else below

    def width_below(self, index: int) -> int:
        """Return the last step that is less wide; -1 where there is none."""
        width = self.dial[index].model.hidden_size if index >= 0 else 0
        while index >= 0 and self.dial[index].model.hidden_size == width:
            index -= 1
        return index

    def _host_end(self) -> int:
        low, high = -1, len(self.dial)
        if self.judge.host_fits(self.dial[high - 1]):
            return high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.judge.host_fits(self.dial[middle]) else (low, middle)
        return high


def _below_first_failure(steps: _Steps, holds: Holds, known: int, share: float) -> int:
    """Return the last step below the first that does not hold; all up to ``known`` are known to."""
    high = steps.end
    while True:
        last = _bracket(steps, holds, known, high, share)
        failure = _failure_below(steps, holds, last, known)
        if failure is None:
            return last
        high = failure


def _bracket(steps: _Steps, holds: Holds, low: int, high: int, share: float) -> int:
    """Return a step that holds and whose next one does not, between one that holds and one that does not."""
    up = down = 1
    index = steps.guess(steps.size * share, low, high) if high - low > 1 else low
    while high - low > 1:
        index = min(max(index, low + 1), high - 1)
        if holds(steps.verdict(index)):
            low = index
            index = low + up
            if holds is _fits:
                index = max(index, steps.guess(steps.size * steps.share(low), low, high))
            up *= 2
        else:
            high = index
            index = high - down
            down *= 2
    return low


def _failure_below(steps: _Steps, holds: Holds, last: int, known: int) -> int | None:
    """Return the first of the widths' last steps below ``last`` that does not hold."""
    failure, index = None, last
    for _ in range(WIDTHS_BELOW):
        index = steps.width_below(index)
        if index <= known:
            break
        if not holds(steps.verdict(index)):
            failure = index
    return failure
