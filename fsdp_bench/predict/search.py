"""The inverse questions: how far a dial can be turned before a setup no longer fits.

Two limits are found: ``fits``, the last step below the first one that needs an allocation retry or more host memory
than a node has; and ``runs``, the last step below the first one that runs out of memory.

Memory grows with most dials, but not with all at every step: on the size ladder a wider model begins with fewer
layers, and what the caching allocator reserves jumps by a few per cent with the sizes. So the answer is the largest
step below the *first* failure, and a larger one may fit again.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_bench.predict.dials import Dial, Step
from fsdp_bench.predict.estimate import Estimate, estimate, predict_memory
from fsdp_bench.predict.host import Build
from fsdp_bench.predict.kernels import CUDA, Kernels


@dataclass(frozen=True)
class Limit:
    """What the first step that fails is short of."""

    place: str
    """``card`` or ``host``."""
    phase: str
    """Where the card is full; ``load`` or ``training`` for the host."""
    category: str
    """What most of it is: a category of the breakdown; of the host, one of its parts."""


@dataclass(frozen=True)
class Reach:
    """How far a dial can be turned."""

    dial: Dial
    fits: int
    """Index of the last step that fits, below the first that does not; -1 where none does."""
    runs: int
    """The same for steps that end without running out of memory, retries allowed."""
    limited_by: Limit | None
    """Of the step after ``fits``; None where the dial ends."""
    at: Estimate | None
    """The step that ``fits``."""
    beyond: Estimate | None
    """The step after it."""


@dataclass(frozen=True)
class Judge:
    """What a step is held against.

    On a card: the caching allocator's peak within ``usable_memory_bytes``, and the host's memory where it is known.
    With ``budget_bytes``: live bytes within a budget, as on a CPU, where a measured trial has the same limit.
    """

    kernels: Kernels = CUDA
    build: Build = Build.META
    expandable_segments: bool = False
    budget_bytes: int | None = None
