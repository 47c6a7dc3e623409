"""Tracks storages of fake tensors, by numbers that they keep: live bytes, peaks by phase, categories at a peak."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from fsdp_bench.spec.rank_report import MemoryReading
from fsdp_bench.spec.subprocesses.dry_run import CATEGORIES, MemoryAtStart
from fsdp_bench.train.measuring.meters import MemoryMeter
from fsdp_bench.train.measuring.storage_tracker import StorageTracker
from fsdp_bench.train.step import Training
from fsdp_bench.train.wrapping.readback import local, optimizer_states


class Birth(NamedTuple):
    """The creation of a storage: the operator and the phase."""

    phase: str
    operator: str
    shape: tuple[int, ...]
    recomputed: bool
    """Whether autograd was recording. In backward this means that checkpointing recomputes a forward pass."""


class SizeChange(NamedTuple):
    """A change of the size of a storage in bytes. A storage of 0 bytes is freed."""

    number: int
    grown_bytes: int
    operator: str


class DataMove(NamedTuple):
    """A move of data from one storage to another, which changes only dtype and layout."""

    source: int
    target: int
    added: bool
    """Whether the data was added to other data."""


@dataclass(frozen=True)
class RecordedStep:
    """The changes of storages in one step."""

    start: dict[int, int]
    """Bytes of each storage that was live before the step."""
    changes: list[SizeChange]
    marks: list[tuple[int, str]]
    """Indices in ``changes`` at which each phase began."""
    peaks: dict[str, int]

    def live_at_peak(self) -> dict[int, int]:
        """Return the bytes of each storage at the first moment of the step's largest live bytes."""
        live = list(accumulate((change.grown_bytes for change in self.changes), initial=sum(self.start.values())))
        peak, sizes = max(live), dict(self.start)
        for change in self.changes[: live.index(peak)]:
            sizes[change.number] = sizes.get(change.number, 0) + change.grown_bytes
        assert sum(sizes.values()) == peak
        return {number: size for number, size in sizes.items() if size}


class FakeTracker(StorageTracker, MemoryMeter):
    """Tracks fake tensors on one fake device; train_step reports phases to it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device_type = device.type
        self._numbers: dict[int, int] = {}
        self._operator = ""
        self._recording = False
        self._changes: list[SizeChange] = []
        self._marks: list[tuple[int, str]] = []
        self.current_phase = "load"
        self.peaks: dict[str, int] = {}
        self.births: list[Birth] = []
        self.moves: list[DataMove] = []
        self.sent: dict[str, set[int]] = {"gather": set(), "reduce": set()}
        """Storages that were inputs or outputs of a collective, by kind."""
        self.on_phase: list[Callable[[str], object]] = []
        """Functions that are called when a phase begins."""

    def counts(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is fake and on the tracked device."""
        return isinstance(tensor, FakeTensor) and tensor.fake_device.type == self._device_type

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, count the storages of its results, and note the data that it moved."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        outer, self._operator = self._operator, func.name()
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._operator = outer
        follow = _FOLLOWED.get(func.name().partition(".")[0])
        if follow is not None:
            follow(self, args, kwargs or {}, result)
        return result

    def record(self, step: Callable[[], object]) -> RecordedStep:
        """Run a step; return its changes of storages."""
        start = {self._numbers[key]: size for key, size in self._sizes.items()}
        self._changes, self._marks, self.peaks, self._recording = [], [], {}, True
        self.reset_peak()
        self.current_phase = "start"
        step()
        self.phase("end")
        self._recording = False
        peaks = {phase: peak for phase, peak in self.peaks.items() if phase != "start"}
        return RecordedStep(start, self._changes, self._marks, peaks)

    def numbers_in(self, value: Any) -> Iterator[int]:
        """Yield the numbers of the tracked storages of the tensors in a value."""
        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata in self._numbers:
                yield self._numbers[leaf.untyped_storage()._cdata]

    def phase(self, name: str) -> None:
        """End the current phase and begin a new one."""
        self.peaks[self.current_phase] = max(self.peaks.get(self.current_phase, 0), self.peak_bytes)
        self.reset_peak()
        self.current_phase = name
        self._marks.append((len(self._changes), name))
        for call in self.on_phase:
            call(name)

    def reading(self) -> MemoryReading:
        """Return the peaks by phase."""
        worst = max(self.peaks, key=lambda phase: self.peaks[phase])
        return MemoryReading(peak_allocated_bytes=self.peaks[worst], peak_phase=worst, phases=dict(self.peaks))

    def _count(self, tensor: torch.Tensor) -> None:
        if not self.counts(tensor):
            return
        key = tensor.untyped_storage()._cdata
        if key not in self._numbers:
            recomputed = torch.is_grad_enabled()
            self._numbers[key] = len(self.births)
            self.births.append(Birth(self.current_phase, self._operator, tuple(tensor.shape), recomputed))
        super()._count(tensor)

    def _set(self, key: int, size: int) -> None:
        if self._recording:
            operator = self._operator or "resize_"
            self._changes.append(SizeChange(self._numbers[key], size - self._sizes[key], operator))
        super()._set(key, size)

    def _forget(self, key: int) -> None:
        number, size = self._numbers.pop(key), self._sizes.get(key, 0)
        if self._recording and size:
            self._changes.append(SizeChange(number, -size, "free"))
        super()._forget(key)

    def moved(self, source: Any, target: Any, added: bool = False) -> None:
        """Note that data was moved from some tensors to others."""
        targets = set(self.numbers_in(target))
        sources = set(self.numbers_in(source))
        self.moves += [DataMove(one, two, added) for one in sources for two in targets if one != two]


Follow = Callable[[FakeTracker, Any, Any, Any], None]
"""Takes the tracker, and an operator's arguments, keyword arguments and result."""


def _sends(kind: str) -> Follow:
    def follow(tracker: FakeTracker, args: Any, _kwargs: Any, _result: Any) -> None:
        if kind == "gather" or tracker.current_phase == "backward":  # clipping reduces norms, in the optimizer's phase
            tracker.sent[kind].update(tracker.numbers_in(args))

    return follow


_FOLLOWED: dict[str, Follow] = {
    **dict.fromkeys(
        ("aten::cat", "aten::_to_copy", "aten::clone", "aten::constant_pad_nd"),
        lambda tracker, args, kwargs, result: tracker.moved(args[0], result),
    ),
    **dict.fromkeys(
        ("aten::add", "aten::add_"), lambda tracker, args, kwargs, result: tracker.moved(args[:2], result, added=True)
    ),
    **dict.fromkeys(
        ("aten::copy_", "aten::_foreach_copy_"), lambda tracker, args, kwargs, result: tracker.moved(args[1], args[0])
    ),
    **dict.fromkeys(
        ("fsdp::chunk_cat", "fsdp::split_with_sizes_copy"),
        lambda tracker, args, kwargs, result: tracker.moved(args[0], kwargs.get("out", args[-1])),
    ),
    **dict.fromkeys(("c10d::_allgather_base_", "c10d::allgather_"), _sends("gather")),
    **dict.fromkeys(("c10d::_reduce_scatter_base_", "c10d::reduce_scatter_", "c10d::allreduce_"), _sends("reduce")),
}
"""By name, operators that only move data, and collectives."""


class Owners:
    """Sorts the storages that are live at a peak into the categories of spec/subprocesses/dry_run.py.

    The rules; the first match wins::

        parameters            storages of the wrapped model's parameters: this rank's shards
        optimizer_state       storages of optimizer states
        unsharded_parameters  inputs and outputs of an all-gather, or data of a parameter was moved there (cast, copied
                              to the device, copied out of an all-gather)
        gradients             ``.grad`` of a parameter when a phase began
        reduction_buffers     inputs and outputs of a reduce-scatter or all-reduce in backward
        gradients             created in backward, and their data was moved into one of the two above
        logits                the argument of the loss function, or ``logits`` in the output of a user's model; created
                              by the loss function of the benchmark models; in backward, tensors as wide as the logits
        activations           created in forward, or in backward by checkpointing, or before the step (its tokens)
        temporary             everything else
    """

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
