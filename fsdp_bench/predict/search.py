"""The inverse questions: how far a dial can be turned before a setup no longer fits.

Two limits are found: ``fits``, the last step below the first one that needs an allocation retry or more host memory
than a node has; and ``runs``, a step that ends without running out of memory, retries or not, while the next one does
run out.

Memory does not grow at every step of every dial: on the size ladder a wider model begins with fewer layers, and what
the caching allocator reserves jumps with the sizes. So ``fits`` is the largest step below the *first* failure, and a
larger one may fit again. To find that first failure, steps below are tried that could fail if a smaller share of what
is reserved were live than at any step tried so far (WORSE says how much smaller). ``runs`` is taken to be monotonic.
"""

from __future__ import annotations

import gc
import math
import os
from bisect import bisect
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

from fsdp_bench.predict.allocator import AllocatorReading
from fsdp_bench.predict.dials import Dial, model_dial
from fsdp_bench.predict.estimate import Estimate
from fsdp_bench.predict.judge import Judge, Limit
from fsdp_bench.predict.program import Program
from fsdp_bench.spec.hardware import Cluster, Gpu
from fsdp_bench.spec.model import Family
from fsdp_bench.spec.setup import Offload, TrainSetup

__all__ = ["Judge", "Limit", "Reach", "largest_model", "reach", "reach_all"]

WORSE = {Offload.NONE: 0.95, Offload.PARAMS: 0.85}
"""Of the smallest share of live bytes seen: how much smaller another step's may be. Over 400 steps of 30 setups, what
is reserved fell by at most 2.5 % from one step to the next, and only where a wider model begins; with offload, where a
layer adds little, by up to 10 % anywhere."""

ALWAYS_BELOW = 2
"""Steps below that are tried whatever they need: on a coarse dial one step is more than WORSE."""

CLOSE = 0.006
"""How near a guess of the live bytes has to come, relative: less than a step of the ladder."""

GARBAGE_THRESHOLD = 50_000
"""Objects between two collections in a worker: blocks name their neighbours, so thousands are made and dropped."""

MOST_BELOW = 64
"""Steps below that are tried at most, on dials with fine steps."""

USUAL_SHARES = (0.85, 0.97)
"""Of the live bytes in what is reserved, at the last step that fits and at the last that runs: where a search begins.
Nothing else depends on them."""


@dataclass(frozen=True)
class Reach:
    """How far a dial can be turned."""

    dial: Dial
    fits: int
    """Index of the last step that fits, below the first that does not; -1 where none does."""
    runs: int
    """Index of a step that ends without running out of memory, retries allowed, while the next one does run out; at
    least ``fits``."""
    limited_by: Limit | None
    """Of the step after ``fits``; None where the dial ends."""
    at: Estimate | None
    """The step that ``fits``."""
    beyond: Estimate | None
    """The step after it."""
    beyond_bytes: int | None
    """What that step would reserve without retries, on a card that has as much; None where the card is not what is
    short."""


def reach(dial: Dial, judge: Judge) -> Reach:
    """Find how far a dial can be turned.

    Raises:
        SpecError: when the card's memory is not known, for setups that cannot run there, and for models that cannot be
            predicted.
    """
    return _reach(dial, judge, _Hints())


def largest_model(
    setup: TrainSetup, hardware: Cluster | Gpu, family: Family = Family.LLAMA, judge: Judge | None = None
) -> Reach:
    """Find the largest model of the size ladder that trains under a setup: ``found.at.model``, None where none does.

    Raises:
        SpecError: as ``reach``.
    """
    return reach(model_dial(Family(family), setup, hardware), judge or Judge())


def reach_all(dials: Sequence[Dial], judge: Judge, progress: Callable[[int], None] = lambda done: None) -> list[Reach]:
    """Find how far each dial can be turned, on all processors; ``progress`` is told how many are done.

    Raises:
        SpecError: as ``reach``.
    """
    workers = min(len(dials), os.cpu_count() or 1)
    found: list[Reach] = []
    hints = _Hints()
    if workers < 2:
        for dial in dials:
            found.append(_reach(dial, judge, hints))
            progress(len(found))
        return found
    with ProcessPoolExecutor(workers, get_context("fork"), _share, (dials, judge)) as pool:
        for answer in pool.map(_reach_shared, range(len(dials))):
            found.append(Reach(dials[len(found)], *answer))
            progress(len(found))
    return found


@dataclass(frozen=True)
class _Hint:
    """Where a search ended."""

    index: int | None = None
    shares: tuple[float, float] = USUAL_SHARES


class _Hints:
    """Where searches ended, by setup: the next one begins where the most similar one did."""

    def __init__(self) -> None:
        self._ended: list[tuple[TrainSetup, _Hint]] = []

    def add(self, setup: TrainSetup, hint: _Hint) -> None:
        self._ended.append((setup, hint))

    def nearest(self, setup: TrainSetup) -> _Hint:
        if not self._ended:
            return _Hint()
        return max(self._ended, key=lambda ended: _similarity(ended[0], setup))[1]


def _similarity(one: TrainSetup, other: TrainSetup) -> int:
    """Return how much two setups have in common of what decides how large a model fits."""
    return (
        8 * (one.offload == other.offload)
        + 4 * (one.strategy == other.strategy)
        + 4 * (one.checkpointing == other.checkpointing)
        + 2 * (one.precision.store == other.precision.store)
        + (one.precision.compute == other.precision.compute)
        + (one.api == other.api)
    )


_shared: tuple[Sequence[Dial], Judge, _Hints] | None = None


def _share(dials: Sequence[Dial], judge: Judge) -> None:
    """Keep what a forked worker works on: dials hold functions, which cannot be sent."""
    global _shared
    _shared = dials, judge, _Hints()
    gc.freeze()
    gc.set_threshold(GARBAGE_THRESHOLD)


Answer = tuple[int, int, Limit | None, Estimate | None, Estimate | None, int | None]
"""A Reach without its dial."""


def _reach_shared(index: int) -> Answer:
    assert _shared is not None
    dials, judge, hints = _shared
    found = _reach(dials[index], judge, hints)
    return found.fits, found.runs, found.limited_by, found.at, found.beyond, found.beyond_bytes


def _reach(dial: Dial, judge: Judge, hints: _Hints) -> Reach:
    setup = dial[0].setup
    steps = _Steps(dial, judge, hints.nearest(setup))
    fits = _fitting_below_first_failure(steps)
    runs = fits if judge.budget_bytes is not None else _running(steps, fits, steps.end)
    hints.add(setup, _Hint(max(fits, 0), steps.shares(fits, runs)))
    beyond = fits + 1 if fits + 1 < len(dial) else None
    limit = None if beyond is None else judge.limit(dial[beyond], steps.estimate(beyond))
    return Reach(
        dial=dial,
        fits=fits,
        runs=runs,
        limited_by=limit,
        at=steps.estimate(fits) if fits >= 0 else None,
        beyond=None if beyond is None else steps.estimate(beyond),
        beyond_bytes=None if beyond is None or limit is None or limit.place == "host" else steps.needs(beyond),
    )


class _Steps:
    """The steps of a dial with what is known of them; each question is asked once."""

    def __init__(self, dial: Dial, judge: Judge, hint: _Hint) -> None:
        self.dial = dial
        self.judge = judge
        judge.refuse(dial[0])
        self.size = judge.size_bytes(dial[0])
        self._hint = hint
        self._close = 0.0 if judge.budget_bytes is not None else CLOSE
        self._live: dict[int, int] = {}
        self._needed: dict[int, AllocatorReading] = {}
        self._on_card: dict[int, AllocatorReading] = {}
        self._programs: dict[int, Program] = {}
        """The last one."""
        self.end = self._host_end()
        """The first step that needs more host memory than there is."""

    def fits(self, index: int) -> bool:
        """Whether a step needs neither a retry nor more host memory than there is."""
        if index >= self.end or self.live(index) > self.size:
            return False
        return self.judge.budget_bytes is not None or self.needed(index).peak_reserved_bytes <= self.size

    def runs(self, index: int) -> bool:
        """Whether a step ends without running out of memory."""
        if index >= self.end or self.live(index) > self.size:
            return False
        return self.judge.budget_bytes is not None or self.on_card(index).out_of_memory is None

    def needs(self, index: int) -> int:
        """Return what a step needs of the card: what is reserved without retries; of a budget the live bytes."""
        return self.live(index) if self.judge.budget_bytes is not None else self.needed(index).peak_reserved_bytes

    def live(self, index: int) -> int:
        if index not in self._live:
            self._live[index] = self.judge.live_bytes(self.dial[index])
        return self._live[index]

    def needed(self, index: int) -> AllocatorReading:
        if index not in self._needed:
            self._needed[index] = self.judge.needed(self._program(index))
        return self._needed[index]

    def on_card(self, index: int) -> AllocatorReading:
        """Return the reading on the card; where it needs no more than there is, the one without limit is the same."""
        needed = self._needed.get(index)
        if needed is not None and needed.peak_reserved_bytes <= self.size:
            return needed
        if index not in self._on_card:
            self._on_card[index] = self.judge.on_card(self._program(index), self.size)
        return self._on_card[index]

    def _program(self, index: int) -> Program:
        if index not in self._programs:
            self._programs = {index: self.judge.program(self.dial[index])}
        return self._programs[index]

    def estimate(self, index: int) -> Estimate:
        reading = self.on_card(index) if self.judge.budget_bytes is None else None
        return self.judge.estimate(self.dial[index], reading)

    def shares(self, fits: int, runs: int) -> tuple[float, float]:
        """Return the part of live bytes in what is reserved, at the last step that fits and at the last that runs."""
        if fits < 0 or self.judge.budget_bytes is not None:
            return USUAL_SHARES
        return self.live(fits) / self.needed(fits).peak_reserved_bytes, self.live(runs) / self.size

    @property
    def share_that_runs(self) -> float:
        """Part of the card that live bytes fill at the last step that runs, as far as is known."""
        return 1.0 if self.judge.budget_bytes is not None else self._hint.shares[1]

    def share_that_fits(self) -> float:
        """Return the part of live bytes in what is reserved, at the step nearest to the card's size that was tried."""
        if self.judge.budget_bytes is not None:
            return 1.0
        if not self._needed:
            return self._hint.shares[0]
        nearest = min(self._needed, key=lambda index: abs(self._needed[index].peak_reserved_bytes - self.size))
        return self.live(nearest) / self._needed[nearest].peak_reserved_bytes

    def guess(self, share: float, low: int, high: int) -> int:
        """Return an index between two whose live bytes are about a share of the card.

        False position on logarithms: live bytes grow about as a power of most dials.
        """
        room = self.size * share
        index = len(self.dial) // 2 if self._hint.index is None else self._hint.index
        if self._needed:
            index = min(self._needed, key=lambda tried: abs(math.log(self.live(tried) / room)))
        within, beyond = low, high
        while beyond - within > 1:
            index = min(max(index, within + 1), beyond - 1)
            if abs(math.log(self.live(index) / room)) < self._close:
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

    def may_fall_after(self, index: int) -> bool:
        """Whether the next step may need less: see WORSE."""
        model, following = self.dial[index].model, self.dial[index + 1].model
        grows = model.hidden_size == following.hidden_size and model.num_hidden_layers < following.num_hidden_layers
        return not grows or self.dial[index].setup.offload is Offload.PARAMS

    def smallest_share(self) -> float:
        """Return the smallest part of live bytes in what is reserved, at any step that was tried."""
        shares = (self.live(index) / reading.peak_reserved_bytes for index, reading in self._needed.items())
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


def _fitting_below_first_failure(steps: _Steps) -> int:
    """Return the last step below the first that does not fit."""
    last = _fitting(steps, -1, steps.end)
    worse = WORSE[steps.dial[0].setup.offload]
    answer = last
    for index in range(last - 1, max(last - MOST_BELOW, 0) - 1, -1):
        is_near = index >= last - ALWAYS_BELOW
        is_safe = steps.live(index) <= worse * steps.smallest_share() * steps.size and not is_near
        if is_safe and steps.ends_a_width(index) and index != answer:
            break
        is_below_a_failure = index == answer != last
        if (is_below_a_failure or (not is_safe and steps.may_fall_after(index))) and not steps.fits(index):
            answer = index - 1
    return answer


def _fitting(steps: _Steps, low: int, high: int) -> int:
    """Return a step that fits and whose next one does not: what one step reserves says where to look next."""
    while high - low > 1:
        index = steps.guess(steps.share_that_fits(), low, high)
        low, high = (index, high) if steps.fits(index) else (low, index)
    return low


def _running(steps: _Steps, low: int, high: int) -> int:
    """Return a step that runs and whose next one does not: gallop until both sides are known, then halve."""
    if high - low < 2:
        return low
    index, stride = steps.guess(steps.share_that_runs, low, high), 1
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
