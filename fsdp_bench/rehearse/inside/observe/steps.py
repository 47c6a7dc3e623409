"""The step and phase that the script is in, found with PyTorch's own hooks; ends the script after enough steps.

A step ends with an optimizer's step. An optimizer that follows at once, as AdamW after Muon, belongs to the same step.
If a backward pass runs between the two, as in a GAN, the second one is counted to the next step. Phases:

    load        until the first forward
    forward     forward and loss, up to the backward pass, and all else that comes in between: data, evaluation
    backward    torch.autograd.backward and torch.autograd.grad
    optimizer   from the end of the backward pass (clipping) to the end of the optimizer's step
"""

from __future__ import annotations

import functools
import itertools
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .issued import IssuedWork
from .memory import History, MemoryCounters, PeakCounters


class EnoughSteps(BaseException):
    """Ends the script. No ``except Exception`` of the script or of a library catches it."""


@dataclass(frozen=True)
class TimeSpan:
    """The time between two moments of a step."""

    step: int
    """The number of the step, from 1."""
    phase: str
    peak: MemoryCounters
    ended_us: int
    """Microseconds since the epoch, as in PyTorch's memory history."""


class Steps:
    """Follows the script from span to span."""

    def __init__(
        self, most: int | None, counters: PeakCounters, issued: IssuedWork | None = None, ends_early: bool = False
    ) -> None:
        """``ends_early``: the script is ended before so many steps as soon as a step repeats the one before."""
        self.spans: list[TimeSpan] = []
        self.num_steps = 0
        """Steps that have ended."""
        self._most = most
        self._ends_early = ends_early
        self._totals: list[dict[tuple[str, str, str], int]] = []
        """The allocator's totals at the end of each step."""
        self._counters = counters
        self._issued = issued
        """The work that the script issues in a step; None if nobody asked for that."""
        self._taken: Counter[int] = Counter()
        """The number of steps that each optimizer has made, by its id."""
        self._kept: list[Any] = []
        """The optimizers: an id is not used again."""
        self._followers: set[int] = set()
        """Optimizers that step directly after the one that ends a step, by their id."""
        self.phase = "load"
        """As it is known now: clipping counts as ``forward`` until the optimizer's step shows what it was."""
        self._in_backward = False
        self._saw_backward = False
        """Whether a backward pass has run since the last step."""
        self._stepped_in_backward = False

    def install(self) -> None:
        """Register the hooks."""
        first = register_module_forward_pre_hook(lambda _module, _inputs: self._first_forward(first))
        register_optimizer_step_pre_hook(self._before_optimizer)
        register_optimizer_step_post_hook(self._after_optimizer)
        torch.autograd.backward = self._observed(torch.autograd.backward)
        torch.autograd.grad = self._observed(torch.autograd.grad)

    def end(self) -> None:
        """End the last span, at the end of the script or where it failed."""
        self._close(self.phase)

    def _close(self, phase: str) -> None:
        peak = self._counters.take()
        if peak is not None:
            follows = phase == "optimizer" and self.num_steps and not self._saw_backward
            step = self.num_steps if follows else self.num_steps + 1
            self.spans.append(TimeSpan(step, phase, peak, time.time_ns() // 1000))

    def _begin(self, phase: str) -> None:
        self.phase = phase
        if self._issued is not None:
            self._issued.begin_phase(phase)

    def _first_forward(self, hook: Any) -> None:
        hook.remove()
        if self.phase == "load":
            self._close("load")
            self._begin("forward")

    def _observed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return what runs autograd's engine, as a phase of its own."""

        @functools.wraps(original)
        def run(*arguments: Any, **keywords: Any) -> Any:
            # Checkpointing calls it within backward, and torch.compile on tensors without data.
            if self._in_backward or detect_fake_mode(arguments) is not None:
                return original(*arguments, **keywords)
            return self._backward(original, *arguments, **keywords)

        return run

    def _backward(self, compute: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        self._close("forward")
        self._begin("backward")
        self._in_backward = self._saw_backward = True
        try:
            found = compute(*arguments, **keywords)
        finally:
            self._in_backward = False
        self._close("backward")
        self._begin("forward")
        if self._stepped_in_backward:  # an optimizer in backward: one for each parameter, the last of them now
            self._stepped_in_backward = False
            self._end_step()
        return found

    def _before_optimizer(self, _optimizer: Any, _arguments: Any, _keywords: Any) -> None:
        self._close("backward" if self._in_backward else "optimizer")
        self._begin("optimizer")

    def _after_optimizer(self, optimizer: Any, _arguments: Any, _keywords: Any) -> None:
        self._close("optimizer")
        if self._in_backward:
            self._begin("backward")
            self._stepped_in_backward = True
            return
        self._begin("forward")
        if id(optimizer) not in self._taken:
            self._kept.append(optimizer)
        self._taken[id(optimizer)] += 1
        if self._taken[id(optimizer)] > self.num_steps:
            self._end_step()
        elif not self._saw_backward:
            self._followers.add(id(optimizer))
            self._stop_after_enough()

    def _end_step(self) -> None:
        self.num_steps += 1
        self._saw_backward = False
        if self._issued is not None:
            self._issued.end_step(self.num_steps)
        self._stop_after_enough()

    def _stop_after_enough(self) -> None:
        """Raise EnoughSteps after the last step, once every optimizer that follows has made it, too."""
        have_followed = all(self._taken[one] >= self.num_steps for one in self._followers)
        if not have_followed or self._most is None:
            return
        if self.num_steps >= self._most:
            raise EnoughSteps
        if self._ends_early:
            self._totals = [*self._totals[: self.num_steps - 1], self._counters.totals()]
            if self._repeats():
                raise EnoughSteps

    def _repeats(self) -> bool:
        """Whether the last step is as the one before; the allocator's totals mostly say that it is not."""
        if self.num_steps < 3 or len(self._totals) < self.num_steps:  # the second is the first with optimizer states
            return False
        first, last = (
            {key: later[key] - before[key] for key in later.keys() & before.keys()}
            for before, later in itertools.pairwise(self._totals[-3:])
        )
        if not last or any(last[key] != first[key] for key in last if key[1] == "large_pool"):
            return False
        begin, middle, end = (
            max(span.ended_us for span in self.spans if span.step <= self.num_steps - before) for before in (2, 1, 0)
        )
        return History().repeats(begin, middle, end, last["allocation", "all", "allocated"])

    def document(self) -> list[dict[str, Any]]:
        """Return the spans, those of the same step and phase as one."""
        found: dict[tuple[int, str], dict[str, Any]] = {}
        for span in self.spans:
            peak = asdict(span.peak)
            known = found.setdefault((span.step, span.phase), peak)
            found[span.step, span.phase] = {name: max(value, known[name]) for name, value in peak.items()}
        return [{"step": step, "phase": phase, **peak} for (step, phase), peak in found.items()]
