"""From what a rehearsed step issued to the events that replay/schedule.py runs."""

import math
import re
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from fsdp_bench.plan.rehearsed_time.operator_work import Tensors, work_of_host, work_of_operator
from fsdp_bench.rates.collectives import ALL_TO_ALL, MESSAGES, Groups, topology_of_pair, topology_of_ranks
from fsdp_bench.replay.step_parts import IN_OPTIMIZER
from fsdp_bench.replay.together import Meeting
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
    "reduce": "broadcast",  # NCCL's model has one for both (ncclTopoTuneModel)
    "alltoall": ALL_TO_ALL,
    "alltoall_base": ALL_TO_ALL,
}
"""Kinds of rates/collectives.py, by the operators of the ``c10d`` namespace. The time of others is unknown."""

_MESSAGES = ("send", "recv")


def kind_of(collective: IssuedCollective) -> str | None:
    """Return the kind of a collective; None for those whose time nobody knows."""
    return _KINDS.get(collective.name)


@dataclass(frozen=True)
class ProcessGroups:
    """The process groups that communicate in a step of one rank."""

    rank: int
    groups: Groups
    sizes: dict[str, int]
    """Ranks, by the script's own names."""


def process_groups(step: IssuedStep, hardware: Hardware, rank: int = 0) -> ProcessGroups:
    """Return the process groups of a rank's step with their topologies, and the links to those it sends messages to."""
    collectives = [event for event in step.events if isinstance(event, IssuedCollective)]
    ranks = {event.group: event.ranks for event in collectives}
    topologies = {group: None if of is None else topology_of_ranks(hardware, of) for group, of in ranks.items()}
    peers = {event.peer for event in collectives if event.peer is not None}
    pairs = {peer: topology_of_pair(hardware, rank, peer) for peer in peers}
    sizes = {group: len(of) for group, of in ranks.items() if of is not None}
    return ProcessGroups(rank, Groups(of_script=topologies, pairs=pairs), sizes)


_FIRST_NUMBER = 1000
"""CUDA events are numbered from here, above Queue's members: each pair of a record and a wait has its own queue."""

_FP32 = 4


@dataclass
class Replayable:
    """A step's events whose time rates/ may know, and the names of work whose time nobody knows."""

    events: list[Event] = field(default_factory=list)
    unknown: Counter[str] = field(default_factory=Counter)
    """The number of times that each was issued."""
    meetings: list[list[Meeting]] = field(default_factory=list)
    """The ranks that take part in each collective, by the event's number."""
    num_streams: int = 0


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
        self._started: dict[int, int] = {}
        """Started collectives, counted in their order, by their own numbers."""
        self._num_started = 0
        self._batch: list[IssuedCollective] = []
        """Messages that NCCL starts together."""
        self._counts = Counter[Hashable]()
        self._phase_name = "forward"

    def run(self) -> Replayable:
        self._add(Kind.MARK, label="forward")
        for index, event in enumerate(self._step.events):
            if not self._is_in_batch(event):
                self._end_batch()
            self._issue_work(event)
            self._keep_order(index, event)
        self._end_batch()
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
            case CollectivesWait() if event.number is not None:
                if event.number in self._started:
                    self._add(Kind.WAIT_COLLECTIVES, self._started[event.number], event.stream)
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
        kind = kind_of(event)
        if event.stream >= 0 and event.name in _MESSAGES:
            self._batch.append(event)
        elif kind is None or event.stream < 0:
            self._found.unknown[f"{event.name} ({_described(event)})"] += 1
        else:
            ranks = frozenset(event.ranks or (self._groups.rank,))
            meeting = Meeting(self._counted(event.ranks or event.group), ranks)
            self._communicate([event], Work(kind, event.num_bytes, group=event.group), [meeting])

    def _is_in_batch(self, event: Issued) -> bool:
        """Whether a message belongs to those before it."""
        if not self._batch or not isinstance(event, IssuedCollective):
            return False
        return event.batch is not None and event.batch == self._batch[0].batch

    def _end_batch(self) -> None:
        """Add the messages of a batch as one: GPUs send and receive at once.

        NCCL has a communicator for all batches of a group, and one for each pair of ranks that exchange messages singly
        (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, pointToPoint).
        """
        batch, self._batch = self._batch, []
        if not batch:
            return
        own, first = self._groups.rank, batch[0]
        num_bytes = max(sum(one.num_bytes for one in batch if one.name == name) for name in _MESSAGES)
        peers = tuple(sorted({one.peer for one in batch if one.peer is not None}))
        group = first.group if first.batch is not None else f"{first.group} {min(own, *peers)}:{max(own, *peers)}"
        meetings = []
        for one in batch:
            assert one.peer is not None
            pair = (own, one.peer) if one.name == "send" else (one.peer, own)
            meetings.append(Meeting(self._counted((one.ranks or one.group, *pair)), frozenset(pair)))
        self._communicate(batch, Work(MESSAGES, num_bytes, peers, group=group), meetings)

    def _counted(self, key: Hashable) -> tuple[Hashable, int]:
        self._counts[key] += 1
        return key, self._counts[key]

    def _communicate(self, issued: Sequence[IssuedCollective], work: Work, meetings: list[Meeting]) -> None:
        kind = Kind.COLLECTIVE
        if issued[0].is_asynchronous:
            kind, self._is_pending = Kind.START_COLLECTIVE, True
            self._started |= {one.number: self._num_started for one in issued}
            self._num_started += 1
        self._add(kind, len(self._found.meetings), issued[0].stream, work.name, work)
        self._found.meetings.append(meetings)


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


# -- The bytes that a Triton kernel moves: Inductor's, Liger's and TRL's are bound by memory, others unknown ----------

_MEMORY_BOUND = re.compile(r"triton_(poi|red|per|for|mix)_.*")
"""Inductor's pointwise kernels, reductions, and several of them in one. Its templates (triton_tem) are products."""

_LIBRARIES: dict[str, dict[str, dict[str, int]]] = {
    "liger_kernel.ops.": {
        "liger_cross_entropy_kernel": {"X_ptr": 3},
        "element_mul_kernel": {"X_ptr": 2},
        "_triton_rope": {"q_ptr": 2, "k_ptr": 2},
        **{f"_{norm}_norm_forward_kernel": {} for norm in ("rms", "block_rms", "layer")},
        **{f"_{norm}_norm_backward_kernel": {} for norm in ("rms", "block_rms", "layer")},
        **{f"_swiglu_forward_kernel{tiled}": {} for tiled in ("", "_tiled")},
        **{f"_swiglu_backward_kernel{tiled}": {"a_ptr": 2, "b_ptr": 2} for tiled in ("", "_tiled")},
        "_geglu_tanh_forward_kernel": {},
        "_geglu_tanh_backward_kernel": {"a": 2, "b": 2},
    },
    "trl.kernels.chunked_logprob": {"_forward_kernel": {}, "_backward_kernel": {"mm_ptr": 2}},
}
"""By their modules, kernels of Liger and TRL that are bound by memory, and how often they pass over a tensor.

That is once unless this says more. A tensor that is changed in place is read and written; Liger's cross entropy reads
the logits twice: for their sum and their gradient. TRL's overwrites a tile of logits with its gradient (TRL 1.16).
"""


def work_of_kernel(kernel: TritonKernel, tensors: Tensors) -> Work | None:
    """Return a kernel's work: it reads its inputs, writes its outputs, and both of what it changes in place.

    It reads no more elements of an input than it has points: few of an embedding's weight. None if its time is not
    known.
    """
    known = next((found for module, found in _LIBRARIES.items() if kernel.module.startswith(module)), {})
    passes = known.get(kernel.name)
    if passes is None and kernel.is_inductors and _MEMORY_BOUND.fullmatch(kernel.name):
        passes = {name: 2 for name in kernel.changed if name.startswith("in_")}
    if passes is None:
        return None
    points = math.prod(kernel.sizes) if kernel.sizes else None
    total, itemsize = 0, 0
    given = zip(kernel.names, kernel.arguments, strict=False)
    for name, tensor in [(name, tensors[number]) for name, number in given if number is not None]:
        itemsize = itemsize or tensor.itemsize
        own = math.prod(tensor.shape) * tensor.itemsize
        if points is not None and name.startswith("in_ptr"):
            own = min(own, points * tensor.itemsize)
        total += passes.get(name, 1) * own
    return Work(kernel.name, total, (), itemsize)
