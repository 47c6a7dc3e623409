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
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_all_start_methods, get_context

from fsdp_bench.plan.estimate import Estimate
from fsdp_bench.plan.search.dial_steps import Hint, Steps, last_that_fits, last_that_runs
from fsdp_bench.plan.search.dials import Dial, model_dial
from fsdp_bench.plan.search.judge import Judge, Limit
from fsdp_bench.replay.compiled import compiled_run
from fsdp_bench.spec.hardware import Cluster, Gpu
from fsdp_bench.spec.model import Family
from fsdp_bench.spec.setup import TrainSetup

__all__ = ["Judge", "Limit", "Reach", "largest_model", "reach", "reach_all"]

GARBAGE_THRESHOLD = 50_000
"""Objects between two collections in a worker: blocks name their neighbours, so thousands are made and dropped."""


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
    if workers < 2 or "fork" not in get_all_start_methods():  # Windows: dials hold functions, which only fork keeps
        for dial in dials:
            found.append(_reach(dial, judge, hints))
            progress(len(found))
        return found
    if judge.budget_bytes is None:
        compiled_run()  # once, for all workers
    with ProcessPoolExecutor(workers, get_context("fork"), _share, (dials, judge)) as pool:
        for answer in pool.map(_reach_shared, range(len(dials))):
            found.append(Reach(dials[len(found)], *answer))
            progress(len(found))
    return found


class _Hints:
    """Where searches ended, by setup: the next one begins where the most similar one did."""

    def __init__(self) -> None:
        self._ended: list[tuple[TrainSetup, Hint]] = []

    def add(self, setup: TrainSetup, hint: Hint) -> None:
        self._ended.append((setup, hint))

    def nearest(self, setup: TrainSetup) -> Hint:
        if not self._ended:
            return Hint()
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
    steps = Steps(dial, judge, hints.nearest(setup))
    fits = last_that_fits(steps)
    runs = fits if judge.budget_bytes is not None else last_that_runs(steps, fits)
    hints.add(setup, Hint(max(fits, 0), steps.share(fits)))
    beyond = fits + 1 if fits + 1 < len(dial) else None
    not_fitting = None if beyond is None else steps.estimate(beyond)
    limit = None if beyond is None or not_fitting is None else judge.limit(dial[beyond], not_fitting)
    return Reach(
        dial=dial,
        fits=fits,
        runs=runs,
        limited_by=limit,
        at=steps.estimate(fits) if fits >= 0 else None,
        beyond=not_fitting,
        beyond_bytes=None if beyond is None or limit is None or limit.place == "host" else steps.needs(beyond),
    )
