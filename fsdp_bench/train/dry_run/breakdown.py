"""Sorts the storages that are live at a peak into the categories of spec/subprocesses/dry_run.py.

The rules; the first match wins:

    parameters            storages of the wrapped model's parameters: this rank's shards
    optimizer_state       storages of optimizer states
    unsharded_parameters  inputs and outputs of an all-gather, or data of a parameter was moved there (cast, copied
                          to the device, copied out of an all-gather)
    gradients             ``.grad`` of a parameter when a phase began
    reduction_buffers     inputs and outputs of a reduce-scatter or all-reduce in backward
    gradients             created in backward, and their data was moved into one of the two above
    logits                the argument of the loss function, or ``logits`` in the output of a user's model; created by
                          the loss function of the benchmark models; in backward, tensors as wide as the logits
    activations           created in forward, or in backward by checkpointing, or before the step (its tokens)
    temporary             everything else
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch

from fsdp_bench.spec.subprocesses.dry_run import CATEGORIES, MemoryAtStart
from fsdp_bench.train.dry_run.fake_tracker import FakeTracker, RecordedStep
from fsdp_bench.train.step import Training
from fsdp_bench.train.wrapping.readback import local, optimizer_states


class Owners:
    """Records the category of each storage while steps run."""

    def __init__(self, tracker: FakeTracker, training: Training, *, loss_makes_logits: bool = True) -> None:
        self._tracker = tracker
        self._loss_makes_logits = loss_makes_logits
        self._training = training
        self._gradients: set[int] = set()
        self._logits: set[int] = set()
        self._width: int | None = None
        tracker.on_phase.append(self._note_gradients)

    def _note_gradients(self, _phase: str) -> None:
        leaves = (parameter for parameter in self._training.model.parameters() if parameter.is_leaf)
        self._gradients.update(self._numbers(leaf.grad for leaf in leaves if leaf.grad is not None))

    def note_logits(self, logits: torch.Tensor) -> None:
        """Note the argument of the loss function."""
        self._logits.update(self._numbers([logits]))
        self._width = logits.shape[-1]

    def resident(self, step: RecordedStep) -> MemoryAtStart:
        """Return the live bytes before a step by category."""
        held = self._sum(step.start)
        known = {name: held.pop(name) for name in ("parameters", "optimizer_state", "gradients")}
        return MemoryAtStart(**{f"{name}_bytes": size for name, size in known.items()}, other_bytes=sum(held.values()))

    def breakdown(self, step: RecordedStep) -> dict[str, int]:
        """Return the live bytes at the peak of a step by category."""
        return self._sum(step.live_at_peak())

    def _sum(self, sizes: dict[int, int]) -> dict[str, int]:
        category_of = self._categories()
        held = dict.fromkeys(CATEGORIES, 0)
        for number, size in sizes.items():
            held[category_of.get(number) or self._by_birth(number)] += size
        return held

    def _categories(self) -> dict[int, str]:
        """Return the categories that do not follow from how a storage was created. The first rule is applied last."""
        tracker = self._tracker
        parameters = set(self._numbers(self._training.model.parameters()))
        states = set(self._numbers(optimizer_states(self._training.optimizer)))
        gathered = parameters | _reached(tracker.sent["gather"] | parameters, _edges(tracker, forward=True))
        sent = tracker.sent["reduce"]
        sources = _reached(sent | self._gradients, _edges(tracker, forward=False))
        made_in_backward = {number for number in sources if tracker.births[number].phase == "backward"}
        found = dict.fromkeys(self._logits, "logits") | dict.fromkeys(made_in_backward, "gradients")
        found |= dict.fromkeys(sent, "reduction_buffers") | dict.fromkeys(self._gradients, "gradients")
        found |= dict.fromkeys(gathered, "unsharded_parameters") | dict.fromkeys(states, "optimizer_state")
        return found | dict.fromkeys(parameters, "parameters")

    def _by_birth(self, number: int) -> str:
        birth = self._tracker.births[number]
        if birth.phase == "loss":
            return "logits" if self._loss_makes_logits else "temporary"
        if birth.phase == "backward" and self._width in birth.shape[-1:]:
            return "logits"
        if birth.phase in ("forward", "start", "load") or (birth.phase == "backward" and birth.recomputed):
            return "activations"
        return "temporary"

    def _numbers(self, tensors: Iterable[torch.Tensor]) -> list[int]:
        return list(self._tracker.numbers_in([local(tensor) for tensor in tensors]))


def _edges(tracker: FakeTracker, *, forward: bool) -> dict[int, list[int]]:
    """Return, for each storage, the storages that its data was moved to (``forward``), or that it came from."""
    edges: dict[int, list[int]] = defaultdict(list)
    for source, target, added in tracker.moves:
        if not forward:
            edges[target].append(source)
        elif not added:
            edges[source].append(target)
    return edges


def _reached(starts: Iterable[int], edges: dict[int, list[int]]) -> set[int]:
    """Return ``starts`` and all storages that are reachable from them by ``edges``."""
    reached, waiting = set(starts), list(starts)
    while waiting:
        for following in edges.get(waiting.pop(), ()):
            if following not in reached:
                reached.add(following)
                waiting.append(following)
    return reached
