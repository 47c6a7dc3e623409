"""From what a rehearsed step issued to the events that replay/schedule.py runs."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from fsdp_bench.plan.rehearsed_time.operator_work import Tensors, work_of_host, work_of_operator
from fsdp_bench.rates.collectives import Groups, Topology, topology_of_ranks
from fsdp_bench.replay.step_parts import IN_OPTIMIZER
from fsdp_bench.simulate.events import Category, Event, Kind, Stream, Work
from fsdp_bench.spec.hardware import Hardware
from fsdp_bench.spec.subprocesses.issued import (
    CollectivesWait,
    HookCall,
    HostOperator,
    HostWait,
    Issued,
    IssuedCollective,
    IssuedCopy,
    IssuedOperator,
    IssuedStep,
    LaunchedKernel,
    PhaseBegin,
    RecordedEvent,
    StreamWait,
    TritonKernel,
)

_KINDS = {
    "allgather": "all_gather",
    "allgather_base": "all_gather",
    "allgather_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "barrier": "all_reduce",
    "broadcast": "broadcast",
}
"""Kinds of rates/collectives.py, by the operators of the ``c10d`` namespace. The time of others is unknown."""

_NAMES = ("shard", "replicate", "world", "post_forward")
"""Groups that rates/ has. Which is which does not matter: each has its topology."""


def kind_of(collective: IssuedCollective) -> str | None:
    """Return the kind of a collective; None for those whose time nobody knows."""
    return _KINDS.get(collective.name)


@dataclass(frozen=True)
class ProcessGroups:
    """The process groups that communicate in a step."""

    names: dict[str, str]
    """Names of rates/, by the script's own."""
    groups: Groups
    sizes: dict[str, int]
    """Ranks, by the script's own names."""


def process_groups(step: IssuedStep, hardware: Hardware) -> ProcessGroups:
    """Return the process groups of a step with their topologies.

    If there are more than four, those of the same ranks share a name, as if they had one communicator; if there are
    still more than four, the others are unknown.
    """
    ranks: dict[str, tuple[int, ...] | None] = {}
    gathers: set[str] = set()
    for event in step.events:
        if isinstance(event, IssuedCollective):
            ranks.setdefault(event.group, event.ranks)
            if kind_of(event) in ("all_gather", "reduce_scatter"):
                gathers.add(event.group)
    communicate = [group for group, of in ranks.items() if of is None or len(of) > 1]
    names = _named(sorted(communicate, key=lambda group: group not in gathers), ranks)
    sizes = {group: len(of) for group, of in ranks.items() if of is not None}
    found: dict[str, Topology | None] = dict.fromkeys(_NAMES)
    for group, name in names.items():
        of = ranks[group]
        found[name] = None if of is None else topology_of_ranks(hardware, of)
    return ProcessGroups(names, Groups(**found), sizes)


def _named(groups: Sequence[str], ranks: dict[str, tuple[int, ...] | None]) -> dict[str, str]:
    if len(groups) <= len(_NAMES):
        return dict(zip(groups, _NAMES, strict=False))
    by_ranks = dict(zip(dict.fromkeys(ranks[group] for group in groups), _NAMES, strict=False))
    return {group: by_ranks[ranks[group]] for group in groups if ranks[group] in by_ranks}


_FIRST_NUMBER = 1000
"""CUDA events are numbered from here, above Queue's members: each pair of a record and a wait has its own queue."""

_FP32 = 4


@dataclass
class Replayable:
    """A step's events whose time rates/ may know, and the names of work whose time nobody knows."""

    events: list[Event] = field(default_factory=list)
    unknown: Counter[str] = field(default_factory=Counter)
    """The number of times that each was issued."""
    num_streams: int = 0
    """Streams that the script used."""


def events_of(step: IssuedStep, groups: ProcessGroups) -> Replayable:
    """Return the events of a step."""
    return _Conversion(step, groups).run()


class _Conversion:
    def __init__(self, step: IssuedStep, groups: ProcessGroups) -> None:
        self._step, self._groups = step, groups
        self._streams = streams_of(step.events)
        self._found = Replayable(num_streams=len(set(self._streams)))
        self._records = _waits_of_records(step.events)
        """For each wait the number of its own record; for each record the numbers of those that wait for it."""
        self._is_pending = False
        """Whether a collective was started that nobody has waited for."""
        self._phase_name = "forward"

    def run(self) -> Replayable:
        self._add(Kind.MARK, label="forward")
        for index, event in enumerate(self._step.events):
            self._issue_work(event)
            self._keep_order(index, event)
        return self._found

    def _issue_work(self, event: Issued) -> None:
        tensors = self._step.tensors
        match event:
            case IssuedOperator():
                self._operator(event)
            case HostOperator():
                self._issue(Kind.HOST_WORK, -1, f"{event.name} on the CPU", work_of_host(event, tensors))
            case TritonKernel():
                self._issue(Kind.KERNEL, event.stream, event.name, work_of_kernel(event, tensors))
            case LaunchedKernel():
                self._issue(Kind.KERNEL, event.stream, event.name, None)
            case IssuedCopy():
                work = Work(event.name, event.num_bytes)
                self._add(Kind.COPY, stream=event.stream, label=event.name, work=work)
            case IssuedCollective():
                self._collective(event)
            case HookCall():
                self._add(Kind.HOST_WORK, label=event.name, work=Work(event.name))
            case PhaseBegin():
                self._phase_name = event.name
                self._add(Kind.MARK, label=event.name)

    def _keep_order(self, index: int, event: Issued) -> None:
        match event:
            case RecordedEvent():
                for wait in self._records[index]:
                    self._add(Kind.RECORD_EVENT, _FIRST_NUMBER + wait, event.stream)
            case StreamWait() if index in self._records:
                self._add(Kind.WAIT_EVENT, _FIRST_NUMBER + index, event.stream)
            case HostWait(event=None):
                for stream in self._streams if event.stream is None else (event.stream,):
                    self._add(Kind.SYNCHRONIZE, stream=stream)
            case HostWait() if index in self._records:
                self._add(Kind.HOST_WAIT, _FIRST_NUMBER + index)
            case CollectivesWait() if self._is_pending:
                self._add(Kind.WAIT_COLLECTIVES, stream=event.stream)
                self._is_pending = False

    def _add(self, kind: Kind, number: int = -1, stream: int = -1, label: str = "", work: Work | None = None) -> None:
        on = self._streams.get(stream, Stream.COMPUTE)
        self._found.events.append(Event(kind, number, 0, Category.TEMPORARY, on, label, work))

    def _issue(self, kind: Kind, stream: int, name: str, work: Work | None) -> None:
        if work is None:
            self._found.unknown[name] += 1
        else:
            label = IN_OPTIMIZER if self._phase_name == "optimizer" else work.name
            self._add(kind, stream=stream, label=label, work=work)

    def _operator(self, event: IssuedOperator) -> None:
        work, name = work_of_operator(event, self._step.tensors), event.name
        if work is not None and work.dims and work.itemsize == _FP32 and self._step.allows_tf32:
            work, name = None, f"{event.name} in TF32"
        self._issue(Kind.KERNEL, event.stream, name, work)

    def _collective(self, event: IssuedCollective) -> None:
        if self._groups.sizes.get(event.group) == 1:
            return  # a rank alone: NCCL copies within the rank's own memory, or does nothing
        kind, group = kind_of(event), self._groups.names.get(event.group)
        if kind is None or group is None or event.stream < 0:
            self._found.unknown[f"{event.name} ({_described(event)})"] += 1
            return
        self._is_pending |= event.is_asynchronous
        started = Kind.START_COLLECTIVE if event.is_asynchronous else Kind.COLLECTIVE
        work = Work(kind, event.num_bytes, group=group)
        self._add(started, stream=event.stream, label=kind, work=work)


def _described(collective: IssuedCollective) -> str:
    if collective.stream < 0:
        return "between hosts"
    return f"{len(collective.ranks)} ranks" if collective.ranks is not None else "unknown ranks"


def _waits_of_records(events: Sequence[Issued]) -> dict[int, list[int]]:
    """Return for each record the waits for it, and for each wait of an event that this step recorded nothing.

    Keys and values are places among the events. A wait is for the event as it was recorded last.
    """
    last: dict[int, int] = {}
    found: dict[int, list[int]] = {}
    for index, event in enumerate(events):
        if isinstance(event, RecordedEvent):
            last[event.event] = index
            found[index] = []
        elif isinstance(event, StreamWait | HostWait) and event.event in last:
            found[last[event.event]].append(index)
            found[index] = []
    return found


_BY_COLLECTIVE = {
    "all_gather": Stream.ALL_GATHER,
    "reduce_scatter": Stream.REDUCE_SCATTER,
    "all_reduce": Stream.ALL_REDUCE,
}


def streams_of(events: Sequence[Issued]) -> dict[int, Stream]:
    """Return a Stream for each of the script's streams: forward runs on COMPUTE, others are named by collectives.

    Most operators of a whole step may be on another one: an optimizer in backward has many small ones on that of the
    reduce-scatters. If there are more streams than names, the last ones share one, and then wait for each other.
    """
    forward = takewhile(lambda event: not (isinstance(event, PhaseBegin) and event.name == "backward"), events)
    issued = Counter(event.stream for event in forward if isinstance(event, IssuedOperator | TritonKernel))
    streams = [(getattr(event, "stream", None), isinstance(event, RecordedEvent | StreamWait)) for event in events]
    in_order = sorted(streams, key=lambda pair: pair[1])  # those with work before those that only wait
    used = dict.fromkeys(stream for stream, _ in in_order if stream is not None and stream >= 0)
    if not used:
        return {}
    found = {max(used, key=lambda stream: issued[stream]): Stream.COMPUTE}
    for event in events:
        if isinstance(event, IssuedCollective) and event.stream >= 0 and event.stream not in found:
            wanted = _BY_COLLECTIVE.get(kind_of(event) or "")
            if wanted is not None and wanted not in found.values():
                found[event.stream] = wanted
    for stream in used:
        free = [one for one in _REST if one not in found.values()]
        found.setdefault(stream, free[0] if free else _REST[-1])
    return found


_REST = (
    Stream.ALL_GATHER_COPY_IN,
    Stream.ALL_GATHER,
    Stream.REDUCE_SCATTER,
    Stream.ALL_REDUCE,
    Stream.OPTIMIZER_OFFLOAD,
)


# -- The bytes that a Triton kernel moves: Inductor's and Liger's are bound by memory; others are unknown --------------

_MEMORY_BOUND = re.compile(r"triton_(poi|red|per|for|mix)_.*")
"""Inductor's pointwise kernels, reductions, and several of them in one. Its templates (triton_tem) are products."""


_LIGER = "liger_kernel.ops."
_LIGERS = {
    "liger_cross_entropy_kernel": {"X_ptr": 3},
    "element_mul_kernel": {"X_ptr": 2},
    "_triton_rope": {"q_ptr": 2, "k_ptr": 2},
    "_rms_norm_forward_kernel": {},
    "_rms_norm_backward_kernel": {},
    "_block_rms_norm_forward_kernel": {},
    "_block_rms_norm_backward_kernel": {},
    "_layer_norm_forward_kernel": {},
    "_layer_norm_backward_kernel": {},
    "_swiglu_forward_kernel": {},
    "_swiglu_forward_kernel_tiled": {},
    "_swiglu_backward_kernel": {"a_ptr": 2, "b_ptr": 2},
    "_swiglu_backward_kernel_tiled": {"a_ptr": 2, "b_ptr": 2},
    "_geglu_tanh_forward_kernel": {},
    "_geglu_tanh_backward_kernel": {"a": 2, "b": 2},
}
"""Kernels of Liger that are bound by memory, and how often they pass over a tensor: once unless this says more.

A tensor that is changed in place is read and written; cross entropy reads the logits twice: for their sum and their
gradient.
"""


def work_of_kernel(kernel: TritonKernel, tensors: Tensors) -> Work | None:
    """Return a kernel's work: it reads its inputs, writes its outputs, and both of what it changes in place.

    It reads no more elements of an input than it has points: few of an embedding's weight. None if its time is not
    known.
    """
    is_ligers = kernel.module.startswith(_LIGER) and kernel.name in _LIGERS
    if not is_ligers and not (kernel.is_inductors and _MEMORY_BOUND.fullmatch(kernel.name)):
        return None
    passes = _LIGERS[kernel.name] if is_ligers else {name: 2 for name in kernel.changed if name.startswith("in_")}
    points = math.prod(kernel.sizes) if kernel.sizes else None
    total, itemsize = 0, 0
    for name, number in zip(kernel.names, kernel.arguments, strict=False):
        if number is None:
            continue
        tensor = tensors[number]
        itemsize = itemsize or tensor.itemsize
        own = math.prod(tensor.shape) * tensor.itemsize
        if points is not None and name.startswith("in_ptr"):
            own = min(own, points * tensor.itemsize)
        total += passes.get(name, 1) * own
    return Work(kernel.name, total, (), itemsize)
