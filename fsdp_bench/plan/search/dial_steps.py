"""The steps of one dial with what is known of them, and the two searches for the last one that holds.

Live bytes are cheap to predict, what the allocator reserves is not. So a search begins where live bytes say that it
ends, and each replay says where the next one is worth its time.
"""

from __future__ import annotations

import math
from bisect import bisect
from dataclasses import dataclass

from fsdp_bench.plan.estimate import Estimate
from fsdp_bench.plan.search.dials import Dial
from fsdp_bench.plan.search.judge import Judge
from fsdp_bench.replay.allocator import AllocatorReading, Replay
from fsdp_bench.simulate.repeat import Program

MORE_GROWTH = 0.05
"""How much more of what the first two steps reserve later ones may add at one step of a dial than at another. No bound
is proven; the scans of test_ladder_scan.py, which replay all steps everywhere, would show where it is too little."""

WORSE = 0.75
"""Of the smallest share of live bytes seen: how much smaller another step's may be. What is reserved falls mostly where
a wider model begins with fewer layers. With 0.85 the answers for ten sizes of cards were those of a scan of every step
of the ladder in 158 of 160 setups drawn at random, with 0.75 in the other two as well: 4 x 8192 tokens without
checkpointing, where 30 layers of width 128 reserve more than 10 of width 768. test_ladder_scan.py draws others."""

WORSE_WITHIN = 0.95
"""The same for steps between two of one width, where it falls seldom: when two steps were replayed, 0.98 was enough in
1858 such answers, 1 in all but three without ALWAYS_BELOW."""

ALWAYS_BELOW = 2
"""Steps below that are tried whatever they need: on a coarse dial one step is more than WORSE."""

CLOSE = 0.006
"""How near a guess of the live bytes has to come, relative: less than a step of the ladder."""

MOST_BELOW = 64
"""Steps below that are tried at most, on dials with fine steps."""

USUAL_SHARE = 0.85
"""Of the live bytes in what is reserved, at the last step that fits: where a search begins. No answer depends on it."""

FULL = 0.97
"""Of a card that live bytes fill at the last step that runs: where that search begins. Always there, so that one
question has one answer, though memory may fall beyond it."""


@dataclass(frozen=True)
class Hint:
    """Where a search ended."""

    index: int | None = None
    share: float = USUAL_SHARE


class Steps:
    """The steps of a dial with what is known of them; each question is asked once."""

    def __init__(self, dial: Dial, judge: Judge, hint: Hint) -> None:
        self.dial = dial
        self.judge = judge
        for index in {0, len(dial) - 1}:  # a larger model can have units inside its blocks where a small one has none
            judge.refuse(dial[index])
        self.size = judge.size_bytes(dial[0])
        """What the first step has; where a dial turns the number of GPUs, NCCL leaves others a little less."""
        self._hint = hint
        self._live: dict[int, int] = {}
        self._needed: dict[int, AllocatorReading] = {}
        self._at_first: dict[int, AllocatorReading] = {}
        self._on_card: dict[int, AllocatorReading] = {}
        self._programs: dict[int, Program] = {}
        """The last one."""
        self._replays: dict[int, Replay] = {}
        """The last one, too."""
        self.end = self._host_end()
        """The first step that needs more host memory than there is."""

    def fits(self, index: int) -> bool:
        """Whether a step needs neither a retry nor more host memory than there is."""
        if index >= self.end or self.live(index) > self.room(index):
            return False
        if self.judge.budget_bytes is not None:
            return True
        room = self.room(index)
        if index not in self._needed:
            at_first = self.at_first(index).peak_reserved_bytes
            if not room / (self._growth() + MORE_GROWTH) < at_first <= room:
                return at_first <= room
        return self.needed(index).peak_reserved_bytes <= room

    def fits_at_first(self, index: int) -> bool:
        """Whether it does in the first two steps, which takes half the time to tell."""
        if index >= self.end or self.live(index) > self.room(index):
            return False
        return self.judge.budget_bytes is not None or self.at_first(index).peak_reserved_bytes <= self.room(index)

    def runs(self, index: int) -> bool:
        """Whether a step ends without running out of memory."""
        if index >= self.end or self.live(index) > self.room(index):
            return False
        return self.judge.budget_bytes is not None or self.on_card(index).out_of_memory is None

    def room(self, index: int) -> int:
        """Return what there is for a step: of a card, or of a budget."""
        return self.size if self.dial.name != "world_size" else self.judge.size_bytes(self.dial[index])

    def needs(self, index: int) -> int:
        """Return what a step needs of the card: what is reserved without retries; of a budget the live bytes."""
        return self.live(index) if self.judge.budget_bytes is not None else self.needed(index).peak_reserved_bytes

    def live(self, index: int) -> int:
        """Return a step's peak of live bytes."""
        if index not in self._live:
            self._live[index] = self.judge.live_bytes(self.dial[index])
        return self._live[index]

    def needed(self, index: int) -> AllocatorReading:
        """Return the allocator's reading on a card without limit."""
        if index not in self._needed:
            self._needed[index] = self._replay(index).until()
        return self._needed[index]

    def at_first(self, index: int) -> AllocatorReading:
        """Return the same after two steps, in which nearly all of it is reserved."""
        if index not in self._at_first:
            self._at_first[index] = self._replay(index).until(2)
        return self._at_first[index]

    def _growth(self) -> float:
        """Return the most that later steps reserve of what the first two do, of all that is known."""
        at_first = self._at_first
        known = (
            r.peak_reserved_bytes / at_first[i].peak_reserved_bytes for i, r in self._needed.items() if i in at_first
        )
        return max(known, default=2.0)

    def on_card(self, index: int) -> AllocatorReading:
        """Return the reading on the card; where it needs no more than there is, the one without limit is the same."""
        needed = self._needed.get(index)
        if needed is not None and needed.peak_reserved_bytes <= self.room(index):
            return needed
        if index not in self._on_card:
            self._on_card[index] = self.judge.replay(self._program(index), self.room(index)).until()
        return self._on_card[index]

    def _program(self, index: int) -> Program:
        if index not in self._programs:
            self._programs = {index: self.judge.program(self.dial[index])}
        return self._programs[index]

    def _replay(self, index: int) -> Replay:
        """Return the replay on a card without limit, as far as it was needed before."""
        if index not in self._replays:
            self._replays = {index: self.judge.replay(self._program(index))}
        return self._replays[index]

    def estimate(self, index: int) -> Estimate:
        """Return everything that is predicted of a step."""
        reading = self.on_card(index) if self.judge.budget_bytes is None else None
        return self.judge.estimate(self.dial[index], reading)

    def share(self, fits: int) -> float:
        """Return the part of live bytes in what is reserved at the last step that fits."""
        if fits < 0 or self.judge.budget_bytes is not None:
            return USUAL_SHARE
        return self.live(fits) / self.needed(fits).peak_reserved_bytes

    def share_that_fits(self) -> float:
        """Return the part of live bytes in what is reserved, at the step nearest to the card's size that was tried."""
        if self.judge.budget_bytes is not None:
            return 1.0
        tried = self._at_first
        if not tried:
            return self._hint.share
        nearest = min(tried, key=lambda index: abs(tried[index].peak_reserved_bytes - self.size))
        return self.live(nearest) / tried[nearest].peak_reserved_bytes

    def guess(self, share: float, low: int, high: int, close: float) -> int:
        """Return an index between two whose live bytes are a share of the card, or within a part ``close`` of it.

        False position on logarithms: live bytes grow about as a power of most dials.
        """
        room = self.size * share
        index = len(self.dial) // 2 if self._hint.index is None else self._hint.index
        if self._at_first:
            index = min(self._at_first, key=lambda tried: abs(math.log(self.live(tried) / room)))
        within, beyond = low, high
        while beyond - within > 1:
            index = min(max(index, within + 1), beyond - 1)
            if abs(math.log(self.live(index) / room)) < close:
                return index
            within, beyond = (index, beyond) if self.live(index) <= room else (within, index)
            if within == low:
                index = beyond - max(round(self._steps_to(beyond, room)), 1)
            elif beyond == high:
                index = within + max(round(self._steps_to(within, room)), 1)
            else:
                index = within + round((beyond - within) * self._part(within, beyond, room))
        return max(within, low + 1)

    def _steps_to(self, index: int, room: float) -> float:
        """Return about how many steps away ``room`` is, if live bytes grow as what is turned."""
        value = self.dial.values[index]
        target = value * room / self.live(index)
        return (
            abs(bisect(self.dial.values, target) - index) if self.dial.values[-1] > self.dial.values[0] else index / 2
        )

    def _part(self, within: int, beyond: int, room: float) -> float:
        """Return how far it is to ``room`` between two steps."""
        below, above = self.live(within), self.live(beyond)
        return math.log(room / below) / math.log(above / below) if above > below else 0.5

    def ends_a_width(self, index: int) -> bool:
        """Whether no step before this one is likely to need more: the last depth of a width, or any step elsewhere."""
        model, following = self.dial[index].model, self.dial[index + 1].model
        return model.hidden_size != following.hidden_size or model.num_parameters == following.num_parameters

    def smallest_share(self) -> float:
        """Return the smallest part of live bytes in what is reserved, at any step that was tried."""
        shares = (self.live(index) / reading.peak_reserved_bytes for index, reading in self._at_first.items())
        return min(shares, default=1.0)

    def _host_end(self) -> int:
        """Halve, then look at all below that need more than half: pinned tensors take powers of two."""
        low, high = -1, len(self.dial)
        if self._host_share(high - 1) > 1:
            high -= 1
        while high < len(self.dial) and high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._host_share(middle) > 1 else (middle, high)
        for index in range(high - 1, -1, -1):
            share = self._host_share(index)
            if share <= 0.5:
                break
            high = index if share > 1 else high
        return high

    def _host_share(self, index: int) -> float:
        return self.judge.host_share(self.dial[index])


def last_that_fits(steps: Steps) -> int:
    """Return the last step below the first that does not fit."""
    last = _fitting(steps, -1, steps.end)
    answer = last if last < 0 or steps.fits(last) else last - 1
    for index in range(last - 1, max(last - MOST_BELOW, 0) - 1, -1):
        ends_a_width, is_below_a_failure = steps.ends_a_width(index), index == answer != last
        worse = WORSE if ends_a_width else WORSE_WITHIN
        is_safe = steps.live(index) <= worse * steps.smallest_share() * steps.size and index < last - ALWAYS_BELOW
        if is_safe and ends_a_width and not is_below_a_failure:
            break
        if (is_below_a_failure or not is_safe) and not steps.fits(index):
            answer = index - 1
    return answer


def _fitting(steps: Steps, low: int, high: int) -> int:
    """Return a step that fits and whose next one does not: what one step reserves says where to look next."""
    close = 0.0 if steps.judge.budget_bytes is not None else CLOSE
    while high - low > 1:
        index = steps.guess(steps.share_that_fits(), low, high, close)
        low, high = (index, high) if steps.fits_at_first(index) else (low, index)
    return low


def last_that_runs(steps: Steps, fits: int) -> int:
    """Return a step that runs and whose next one does not: gallop until both sides are known, then halve."""
    low, high = fits, steps.end
    if high - low < 2:
        return low
    index, stride = steps.guess(FULL, low, high, close=0.0), 1
    has_low = has_high = False
    while high - low > 1:
        index = min(max(index, low + 1), high - 1)
        if steps.runs(index):
            low, has_low, index = index, True, index + stride
        else:
            high, has_high, index = index, True, index - stride
        if has_low and has_high:
            index = (low + high) // 2
        stride *= 2
    return low
