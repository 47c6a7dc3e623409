"""The largest candidate that fits: without allocation retries, with the headroom, and within the host's memory.

On the size ladder the first model of the next width has fewer layers than the model before it, and may need less
memory. So the answer is defined in two parts: the last width whose shallowest model fits, and the most layers that fit
with that width. Any other quantity is searched as if all its candidates had one width.

1. The ceiling is the largest candidate whose live bytes and host memory are within the limits. Both are predicted in
   milliseconds and grow with the width and the number of layers, so interpolation finds it. (The shallowest model of
   a width is less deep than that of any larger width.)
2. Reserved memory is more than live memory. The replay of the caching allocator takes longer, and reserved memory grows
   less regularly: it may fall by some percent when a model gets wider. So the shallowest models are replayed one by
   one, from the ceiling down, until one fits; then the number of layers is searched, again from above.
"""

import gc
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fsdp_bench.plan.parallel import map_forked
from fsdp_bench.plan.prediction import Prediction
from fsdp_bench.plan.question import Question
from fsdp_bench.plan.search.fit import CheckedCandidate, FitCheck, Limit
from fsdp_bench.plan.search.quantity import Quantity
from fsdp_bench.plan.setup_text import setup_line
from fsdp_bench.simulate.step import SimulatedSteps, for_any_depth, without_collections
from fsdp_bench.spec.recording.model import Model
from fsdp_bench.spec.setup import TrainSetup


@dataclass(frozen=True)
class SearchResult:
    """The largest candidate of a quantity that fits under one setting; or why that is not known."""

    quantity: Quantity
    check: FitCheck
    fits: int = -1
    """Index of the largest candidate that fits; -1 if none fits."""
    runs: int = -1
    """Index of the largest that runs without running out of memory, allocation retries allowed. At least ``fits``."""
    limited_by: Limit | None = None
    """The memory that the next candidate exceeds. None if there is no next candidate."""
    at: Prediction | None = None
    """The prediction of the candidate ``fits``."""
    beyond: Prediction | None = None
    """The prediction of the next candidate. Its reserved memory is predicted when it is asked for."""
    impossible: str | None = None
    """Why the setting cannot run."""
    unknown: str | None = None
    """Why nothing can be predicted."""

    @property
    def is_answered(self) -> bool:
        """Whether the setting can run and be predicted."""
        return self.impossible is None and self.unknown is None

    @property
    def question(self) -> Question:
        """The question of the first candidate."""
        return self.check.question(self.quantity[0])

    @property
    def setup(self) -> TrainSetup:
        """The setup with the first value of the quantity."""
        return self.quantity[0].setup

    @property
    def shown(self) -> Question:
        """The question that describes the setting. If the fewest GPUs are searched, it has the number found."""
        return self.at.question if self.at and self.quantity.name == "world_size" else self.question

    @property
    def fits_value(self) -> int | None:
        """The largest value that fits. None if none fits or there is no answer."""
        return self.quantity.values[self.fits] if self.fits >= 0 else None

    @property
    def runs_value(self) -> int | None:
        """The largest value that runs without running out of memory, allocation retries allowed."""
        return self.quantity.values[self.runs] if self.runs >= 0 else None


@dataclass(frozen=True, repr=False)
class LargestModel(SearchResult):
    """The largest model of the size ladder that fits, and which memory the next one exceeds."""

    @property
    def model(self) -> Model | None:
        """The largest model that fits. None if the smallest does not fit."""
        return None if self.at is None else self.at.model

    def __repr__(self) -> str:
        largest = "nothing fits" if self.model is None else f"largest model that fits: {self.model.name}"
        lines = [f"{largest}: {setup_line(self.quantity[0].setup)}"]
        if self.beyond is None or self.limited_by is None:
            return "\n".join([*lines, "  the size ladder ends there"])
        limit = self.limited_by
        place = "GPU" if limit.place == "gpu" else limit.place
        short = f"  {self.beyond.model.name} is short of {place} memory in {limit.phase}"
        return "\n".join([*lines, f"{short}, most of it {limit.category.replace('_', ' ')}"])


def find_largest(quantity: Quantity, check: FitCheck) -> SearchResult:
    """Find the largest candidate that fits.

    Raises SpecError for unknown memory, and what cannot run or be predicted.
    """
    return SearchResult(quantity, check, *_find(quantity, check))


def find_all(
    quantities: Sequence[Quantity],
    check: FitCheck,
    progress: Callable[[int], None] = lambda done: None,
    with_time: bool = False,
    with_next: bool = False,
) -> list[SearchResult]:
    """Find the largest candidate of each quantity, by forks on all processors; ``progress`` gets the number of answers.

    ``with_time``: predict the speed of what fits; ``with_next``: the next candidate's reserved memory, too. Raises as
    ``find_largest``.
    """
    found: list[SearchResult] = []
    gc.freeze()  # what is there already need not be looked through after every simulation
    try:
        for answer in map_forked(lambda quantity: _find(quantity, check, with_time, with_next), quantities):
            found.append(SearchResult(quantities[len(found)], check, *answer))
            progress(len(found))
    finally:
        gc.unfreeze()
    return found


_Answer = tuple[int, int, Limit | None, Prediction | None, Prediction | None]
"""The fields of a SearchResult after its quantity, which holds functions that cannot be sent between processes."""


@without_collections()
def _find(quantity: Quantity, check: FitCheck, with_time: bool = False, with_next: bool = False) -> _Answer:
    for index in {0, len(quantity) - 1}:  # a larger model can have units inside its blocks where a small one has none
        check.refuse(quantity[index])
    candidates = _Candidates(quantity, check)
    widths = _up_to_ceiling(quantity, lambda index: candidates[index].fullness)
    if check.budget_bytes is not None:
        fits = runs = widths[-1][-1] if widths else -1
    else:
        fits = _largest(widths, lambda index: candidates[index].fits())
        runs = _largest(widths, lambda index: candidates[index].runs())
    at = candidates[fits].replayed() if fits >= 0 else None
    if at and with_time:
        at.speed  # noqa: B018 - predicted here, and kept
    limit = beyond = None
    if fits + 1 < len(quantity):
        following = candidates[fits + 1]
        limit, beyond = following.limit, following.prediction
        if (with_next or at is None) and check.budget_bytes is None:  # where nothing fits, it is the answer
            beyond = following.replayed()
            if limit.place == "gpu":
                beyond.needed_bytes  # noqa: B018 - predicted here, and kept
    candidates.forget()
    return fits, runs, limit, at, beyond


class _Candidates:
    """Candidates by index, each checked once. Models that differ in depth alone share their steps."""

    def __init__(self, quantity: Quantity, check: FitCheck) -> None:
        self._quantity, self._check = quantity, check
        self._checked: dict[int, CheckedCandidate] = {}
        self._any_depth: dict[tuple[Model, TrainSetup], SimulatedSteps] = {}

    def __getitem__(self, index: int) -> CheckedCandidate:
        if index not in self._checked:
            candidate = self._quantity[index]
            shallow = for_any_depth(candidate.model, candidate.setup)
            shared = None
            if shallow is not None:
                of_width = shallow, candidate.setup
                made = self._check.on(Question(*of_width, candidate.hardware)).simulated
                shared = self._any_depth.setdefault(of_width, made)
            self._checked[index] = self._check.on(candidate, shared)
        return self._checked[index]

    def forget(self) -> None:
        """Keep no logs of what was looked at."""
        for one in self._checked.values():
            one.simulated.forget()


def _up_to_ceiling(quantity: Quantity, fullness: Callable[[int], float]) -> list[range]:
    """Return the candidates of each width up to the ceiling (see the docstring of this file)."""
    widths = quantity.widths
    count = _num_within(quantity.values, [width[0] for width in widths], fullness)
    if count == 0:
        return []
    *smaller, last = widths[:count]
    return [*smaller, last[: _num_within(quantity.values, last, fullness)]]


_INTERPOLATIONS = 6
"""The number of interpolations after which the interval is halved, for curves that are far from a straight line."""


def _num_within(values: Sequence[int], indices: Sequence[int], fullness: Callable[[int], float]) -> int:
    """Return how many candidates, from the first on, are at most full.

    If values grow, the next candidate is where a straight line between the nearest two known ones reaches 1. Otherwise,
    as with numbers of GPUs, the interval is halved.
    """
    low, high = -1, len(indices)
    known = {low: 0.0}
    grows = bool(indices) and values[indices[0]] <= values[indices[-1]]
    while high - low > 1:
        guess = (low + high) // 2
        if grows and high in known and len(known) <= _INTERPOLATIONS:
            first = values[indices[low]] if low >= 0 else 0
            part = (1 - known[low]) / (known[high] - known[low])
            wanted = first + part * (values[indices[high]] - first)
            guess = bisect_left(indices, wanted, low + 1, high - 1, key=lambda index: values[index])
        known[guess] = fullness(indices[guess])
        low, high = (guess, high) if known[guess] <= 1 else (low, guess)
    return high


def _largest(widths: Sequence[range], holds: Callable[[int], bool]) -> int:
    """Return the largest candidate for which ``holds`` is true, as this file's docstring defines it; -1 if none."""
    # What holds for the deepest holds for the shallowest, which then need not be replayed.
    width = next((width for width in reversed(widths) if holds(width[-1]) or holds(width[0])), None)
    if width is None:
        return -1
    index, stride, above = width[-1], 1, width.stop
    while not holds(index):
        above, index, stride = index, max(index - stride, width[0]), 2 * stride
    return bisect_left(range(above), True, lo=index + 1, key=lambda index: not holds(index)) - 1
