"""The largest that fits on one kind of hardware, setting by setting, and its JSON form.

What is looked for is the dial's: the largest model of the ladder, the deepest, the largest batch, the longest
sequence, or the fewest GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fsdp_bench.plan.estimate import Estimate
from fsdp_bench.plan.question import ANSWERS, Prediction, Question, document, refusal
from fsdp_bench.plan.search.dials import Dial, Hardware, Step
from fsdp_bench.plan.search.judge import NO_FLASH_ATTENTION
from fsdp_bench.plan.search.search import Judge, Limit, Reach, reach_all
from fsdp_bench.replay.host_memory import Build
from fsdp_bench.simulate import TORCH_VERSION
from fsdp_bench.spec.hardware import Cluster, Gpu
from fsdp_bench.spec.profile import Profile
from fsdp_bench.spec.setup import TrainSetup

TIMED = 30
"""Settings on all hardware together of which the time is predicted unasked: each takes some hundredths of a second."""


@dataclass(frozen=True)
class Assumptions:
    """What holds for every setting."""

    build: Build = Build.META
    expandable_segments: bool = False
    profile: Profile | None = None
    """A calibration, for the time of what fits."""
    with_time: bool | None = None
    """Whether the time of what fits is predicted; None: up to TIMED settings."""
    headroom_bytes: int | None = None
    """What is kept free of each GPU for the CUDA context and NCCL; None: what is known of them, and else assumed."""

    def asked(self, step: Step) -> Question:
        """Return a step of a dial as a question that ``predict`` answers too."""
        return Question(
            step.model,
            step.setup,
            step.hardware,
            "cuda",
            self.build,
            self.expandable_segments,
            self.profile,
            self.headroom_bytes,
        )


@dataclass(frozen=True)
class Cell:
    """One setting and what is the largest under it."""

    dial: Dial
    assumptions: Assumptions
    reach: Reach | None
    """None where there is no answer; then one of the reasons is set."""
    impossible: str | None = None
    """Why the setting cannot run."""
    unknown: str | None = None
    """Why nothing can be said."""

    @property
    def setup(self) -> TrainSetup:
        """The setting, with the dial at its first step."""
        return self.dial[0].setup

    @property
    def question(self) -> Question:
        """The dial's first step."""
        return self.assumptions.asked(self.dial[0])

    @property
    def shown(self) -> Question:
        """What tells the setting from others: of a dial of GPUs the step that fits, whose groups are what is meant."""
        return self.at.question if self.at and self.dial.name == "world_size" else self.question

    @property
    def fits(self) -> int | None:
        """The dial's value that fits; None where none does or there is no answer."""
        return self._value(self.reach.fits) if self.reach else None

    @property
    def runs(self) -> int | None:
        """The dial's value that ends without running out of memory, retries allowed."""
        return self._value(self.reach.runs) if self.reach else None

    @cached_property
    def at(self) -> Prediction | None:
        """The prediction of what fits."""
        return self._predicted(self.reach.at, None) if self.reach else None

    @property
    def beyond(self) -> Prediction | None:
        """The prediction of the next step, which does not fit; None where the dial ends."""
        return self._predicted(self.reach.beyond, self.reach.beyond_bytes) if self.reach else None

    @property
    def limit(self) -> Limit | None:
        """What the next step is short of."""
        return self.reach.limited_by if self.reach else None

    def _value(self, index: int) -> int | None:
        return self.dial.values[index] if index >= 0 else None

    def _predicted(self, estimate: Estimate | None, needed_bytes: int | None) -> Prediction | None:
        if estimate is None:
            return None
        hardware: Hardware = estimate.cluster or estimate.gpu
        question = self.assumptions.asked(Step(estimate.model, estimate.setup, hardware))
        return Prediction(question, estimate, needed_bytes)


@dataclass(frozen=True)
class Sizes:
    """Every setting on one kind of hardware."""

    hardware: Cluster | Gpu
    cells: tuple[Cell, ...]
    with_time: bool = False
    """Whether the time of what fits is told."""

    @property
    def name(self) -> str:
        """The server's name, or the GPU's."""
        return self.hardware.server.name if isinstance(self.hardware, Cluster) else self.hardware.name

    @property
    def title(self) -> str:
        """What it is sized for: ``2 x g5.48xlarge``, or the GPUs; the name alone where their number is looked for."""
        if self.cells[0].dial.name == "world_size":
            return self.name
        if isinstance(self.hardware, Cluster):
            return self.name if self.hardware.num_nodes == 1 else f"{self.hardware.num_nodes} x {self.name}"
        return f"{self.cells[0].setup.world_size} x {self.name}"

    @property
    def gpu(self) -> Gpu:
        """The card."""
        return self.hardware.gpu if isinstance(self.hardware, Cluster) else self.hardware

    @property
    def answered(self) -> tuple[Cell, ...]:
        """The settings of which something can be said."""
        return tuple(cell for cell in self.cells if cell.reach is not None)

    @property
    def nothing_fits(self) -> bool:
        """Whether every answer is that not even the smallest fits."""
        return bool(self.answered) and all(cell.fits is None for cell in self.answered)


def largest(
    places: Iterable[tuple[Cluster | Gpu, Sequence[Dial]]],
    assumptions: Assumptions,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> list[Sizes]:
    """Turn every dial of every place as far as it fits; ``progress`` is told how many of how many are answered.

    Settings that cannot run are answered with the reason.
    """
    held = [(hardware, [_held(dial, assumptions) for dial in dials]) for hardware, dials in places]
    open_dials = [cell.dial for _, cells in held for cell in cells if not cell.impossible and not cell.unknown]
    judge = Judge(
        build=assumptions.build,
        expandable_segments=assumptions.expandable_segments,
        headroom_bytes=assumptions.headroom_bytes,
    )
    reached = iter(reach_all(open_dials, judge, lambda done: progress(done, len(open_dials))))
    with_time = len(open_dials) <= TIMED if assumptions.with_time is None else assumptions.with_time
    return [
        Sizes(
            hardware,
            tuple(c if c.impossible or c.unknown else _reached(next(reached), assumptions) for c in cells),
            with_time,
        )
        for hardware, cells in held
    ]


def _held(dial: Dial, assumptions: Assumptions) -> Cell:
    question = assumptions.asked(dial[0])
    gpu, is_16_bit = question.gpu, question.setup.precision.compute != "fp32"
    unknown = NO_FLASH_ATTENTION if gpu is not None and not gpu.native_bf16 and is_16_bit else None
    return Cell(dial, assumptions, None, question.impossible, None if question.impossible else unknown)


def _reached(reach: Reach, assumptions: Assumptions) -> Cell:
    return Cell(reach.dial, assumptions, reach)


def limit_words(limit: Limit) -> str:
    """Return what a next step is short of: ``activations in backward on the card``."""
    category = limit.category.replace("_", " ")
    if limit.place == "card":
        return f"{category} in {limit.phase} on the card"
    return f"host memory: {category}" + (" (while the model is built)" if limit.phase == "load" else "")


def document_of(sizes: Sequence[Sizes]) -> dict[str, Any]:
    """Return the JSON form: one place's document, or several under ``servers``."""
    made = [_place(one) for one in sizes]
    return made[0] if len(made) == 1 else {"servers": made}


def _place(sizes: Sizes) -> dict[str, Any]:
    first = sizes.cells[0]
    return {
        "source": "predicted",
        "torch": TORCH_VERSION,
        "kernels": "cuda",
        "expandable_segments": first.assumptions.expandable_segments,
        "load": first.assumptions.build.value,
        "dial": first.dial.name,
        "fits_means": "no allocation retries, required_headroom_bytes of each GPU left for the CUDA context and NCCL,"
        " and within the host's memory where that is known",
        "server": refusal(first.question)["server"],
        "cells": [_cell(cell, sizes.with_time) for cell in sizes.cells],
    }


def _cell(cell: Cell, with_time: bool) -> dict[str, Any]:
    """Return one setting; null for what there is no answer to."""
    at = cell.at
    found = document(at, with_time, with_communication=False) if at else refusal(cell.question)
    setup, model = found["setup"], at.question.model if at else None
    keys = ("strategy", "effective_strategy", "api", "precision", "offload", "checkpointing", "optimizer")
    limit = cell.limit
    return {
        **{key: setup[key] for key in keys},
        "source": "predicted",
        "impossible": cell.impossible,
        "unknown": cell.unknown,
        "fits_value": cell.fits,
        "runs_value": cell.runs,
        "model": model.name if model else None,
        "max_parameters": model.num_parameters if model else None,
        "num_hidden_layers": model.num_hidden_layers if model else None,
        "hidden_size": model.hidden_size if model else None,
        "runs_parameters": _runs_parameters(cell),
        "setup": setup,
        "memory": found["memory"],
        "time": found["time"],
        "notes": found["notes"],
        **{key: found[key] for key in ANSWERS},
        "limited_by": limit
        and {"place": limit.place, "phase": limit.phase, "category": limit.category, "words": limit_words(limit)},
        "next": _next(cell),
    }


def _runs_parameters(cell: Cell) -> int | None:
    if cell.reach is None or cell.reach.runs < 0:
        return None
    return cell.dial[cell.reach.runs].model.num_parameters


def _next(cell: Cell) -> dict[str, Any] | None:
    """Return the step after what fits: what it would need."""
    beyond = cell.beyond
    if beyond is None or cell.reach is None:
        return None
    found = document(beyond, with_time=False, with_communication=False)
    return {
        "value": cell.dial.values[cell.reach.fits + 1],
        "model": beyond.question.model.name,
        "num_parameters": beyond.question.model.num_parameters,
        "fits": found["fits"],
        "verdict": found["verdict"],
        "needed_bytes": beyond.needed_bytes,
        "headroom_bytes": found["headroom_bytes"],
        "memory": found["memory"],
    }
