"""Communication of one step: kinds of collectives, bytes, total time and exposed time.

Calls and bytes come from the dispatcher. Times come from torch.profiler. With NCCL, collectives are NCCL's kernels, and
compute is all other kernels. With gloo, collectives are the operations of the process group, and compute is operators
on any other thread. Both are read in extra steps, never in a measured step.
"""

import re
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._autograd import DeviceType
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp_bench.spec.rank_report import CollectiveReading, CommunicationReading
from fsdp_bench.train.measuring.meters import GLOO_RELEASE_SECONDS

Interval = tuple[float, float]

_KIND_OF_NCCL_KERNEL = {
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "broadcast": "broadcast",
}

_COPIES = {"Memcpy HtoD": "copy_to_device", "Memcpy DtoH": "copy_to_host"}
_ANNOTATIONS = ("nccl:", "FSDP::", "record_param")
"""Device events that are no work."""

_GLOO_ALGORITHM = {"all_gather": "all_gather", "reduce_scatter": "all_reduce", "all_reduce": "all_reduce"}
"""ProcessGroupGloo's name of each operation. A reduce-scatter runs as an all-reduce (ProcessGroupGloo.cpp)."""


@dataclass(frozen=True)
class ProfilerEvent:
    """One event of the profiler, in seconds."""

    name: str
    start: float
    end: float
    thread: int
    on_device: bool


def measure_communication(
    step: Callable[[], object], device: torch.device, num_steps: int, trace: Path | None = None
) -> tuple[CommunicationReading, ...]:
    """Run ``num_steps`` profiled steps and one counted step; return a reading for each profiled step.

    The counted step comes last, because torch.compile falls back to eager under a dispatch mode, and stays in eager.
    With ``trace`` the trace of the last profiled step is written there, in Chrome's format, which Perfetto opens.
    """
    profiled = [_profile(step, device, trace if last == 0 else None) for last in range(1 - num_steps, 1)]
    with CollectiveCounter() as counter:
        step()
    split = split_kernels if device.type == "cuda" else split_gloo
    return tuple(build_reading(seconds, split(events), counter) for seconds, events in profiled)


def _profile(step: Callable[[], object], device: torch.device, trace: Path | None) -> tuple[float, list[ProfilerEvent]]:
    """Return the step's seconds under the profiler, and the profiler's events."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=activities, acc_events=True) as profiler:  # torch 2.11 warns where it is not said
        begin = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - begin
        time.sleep(GLOO_RELEASE_SECONDS)  # an operation of gloo's threads is recorded after its result is there
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    return seconds, _events(profiler)


def _events(profiler: profile) -> list[ProfilerEvent]:
    """Return the profiler's raw events. ``profiler.events()`` takes ten times as long."""
    events = []
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    for event in profiler.profiler.kineto_results.events():
        on_device = event.device_type() != DeviceType.CPU
        if on_device and event.is_user_annotation():
            continue  # the shadow of a record_function on the GPU's timeline, such as Optimizer.step: no kernel
        start, end = event.start_ns() / 1e9, event.end_ns() / 1e9
        events.append(ProfilerEvent(event.name(), start, end, event.start_thread_id(), on_device))
    return events


Intervals = dict[str, list[Interval]]
"""By kind."""
Split = tuple[Intervals, list[Interval], Intervals]
"""Collectives, compute, and copies between device and host."""


def split_kernels(events: list[ProfilerEvent]) -> Split:
    """Split a GPU's events. Collectives have names like ncclDevKernel_AllGather_RING_LL; other kernels are compute."""
    collectives: Intervals = defaultdict(list)
    copies: Intervals = defaultdict(list)
    compute = []
    for event in (event for event in events if event.on_device):
        interval, name = (event.start, event.end), event.name.lower()
        if event.name.startswith(tuple(_COPIES)):
            copies[next(kind for start, kind in _COPIES.items() if event.name.startswith(start))].append(interval)
        elif "nccldevkernel" in name or "ncclkernel" in name:
            found = re.search("|".join(_KIND_OF_NCCL_KERNEL), name.replace("_", ""))
            collectives[_KIND_OF_NCCL_KERNEL[found.group()] if found else "other"].append(interval)
        elif not event.name.startswith(_ANNOTATIONS):
            compute.append(interval)
    return collectives, compute, copies


def split_gloo(events: list[ProfilerEvent]) -> Split:
    """Split gloo's events. An operation belongs to the earliest collective that runs as it and has none yet."""
    issued: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for event in sorted(events, key=lambda event: event.start):
        if event.name.startswith("c10d::"):
            kind = KIND_OF_OPERATOR.get(event.name.removeprefix("c10d::"), "other")
            issued[_GLOO_ALGORITHM.get(kind, kind)].append((event.start, kind))
    collectives: Intervals = defaultdict(list)
    gloo_threads = {event.thread for event in events if event.name.startswith("gloo:")}
    compute = []
    for event in sorted(events, key=lambda event: event.start):
        if event.name.startswith("gloo:"):
            waiting = issued[event.name.removeprefix("gloo:")]
            kind = waiting.pop(0)[1] if waiting and waiting[0][0] <= event.start else "other"
            collectives[kind].append((event.start, event.end))
        elif event.name.startswith("aten::") and event.thread not in gloo_threads:
            compute.append((event.start, event.end))
    return collectives, compute, {}


def build_reading(step_seconds: float, split: Split, counter: "CollectiveCounter") -> CommunicationReading:
    """Make a reading of intervals and counts, with every kind that was counted or timed."""
    collectives, compute, copies = split
    timed = {**collectives, **copies}
    everything = union([interval for intervals in collectives.values() for interval in intervals])
    total = length(everything)
    overlapped = total + length(union(compute)) - length(union(everything + compute))
    readings = tuple(
        CollectiveReading(
            kind=kind,
            calls=counter.calls.get(kind, 0),
            message_bytes=counter.message_bytes.get(kind, 0),
            seconds=length(union(timed[kind])) if kind in timed else None,
            group_size=next(iter(sizes)) if len(sizes := counter.group_sizes.get(kind, set())) == 1 else None,
        )
        for kind in sorted(set(counter.calls) | set(timed))
    )
    return CommunicationReading(
        step_seconds=step_seconds,
        total_seconds=total,
        exposed_seconds=min(max(total - overlapped, 0.0), total),
        collectives=readings,
    )


def union(intervals: list[Interval]) -> list[Interval]:
    """Merge overlapping intervals; return them disjoint and in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(intervals: list[Interval]) -> float:
    """Sum the lengths of disjoint intervals."""
    return sum(end - start for start, end in intervals)


KIND_OF_OPERATOR = {
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_reduce": "all_reduce",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
}
"""The kind of collective by operator: c10d's (torch/csrc/distributed/c10d/Ops.cpp) and the functional ones."""

_NOT_COMMUNICATION = ("barrier", "wait_tensor", "monitored_barrier_", "_wrap_tensor_autograd")


class CollectiveCounter(TorchDispatchMode):
    """Counts calls, message bytes and group sizes by kind, and copies between host and device, while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = defaultdict(int)
        self.message_bytes: dict[str, int] = defaultdict(int)
        self.group_sizes: dict[str, set[int]] = defaultdict(set)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the kind and size of a collective or copy, then run it."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        namespace, _, name = func.name().partition("::")
        operator = name.partition(".")[0]
        if namespace in ("c10d", "_c10d_functional") and operator not in _NOT_COMMUNICATION:
            kind = KIND_OF_OPERATOR.get(operator, "other")
            self._count(kind, _message_bytes(args))
            self.group_sizes[kind].update(map(_group_size, filter(_is_group, (*args, *kwargs.values()))))
        elif namespace == "aten" and operator in ("copy_", "_to_copy"):
            self._count_copy(operator, args, kwargs)
        return func(*args, **kwargs)

    def _count(self, kind: str, num_bytes: int) -> None:
        self.calls[kind] += 1
        self.message_bytes[kind] += num_bytes

    def _count_copy(self, operator: str, args: Any, kwargs: Any) -> None:
        source = args[1] if operator == "copy_" else args[0]
        to = args[0].device if operator == "copy_" else torch.device(kwargs.get("device") or source.device)
        if (source.device.type == "cpu") != (to.type == "cpu"):
            self._count("copy_to_host" if to.type == "cpu" else "copy_to_device", source.nbytes)


def _message_bytes(args: Any) -> int:
    """Return the bytes of the largest argument: the output of an all-gather, the input of a reduce-scatter."""
    tensors_of = (filter(torch.is_tensor, tree_leaves(arg)) for arg in args)
    return max((sum(tensor.nbytes for tensor in tensors) for tensors in tensors_of), default=0)


def _is_group(value: Any) -> bool:
    """Return whether an argument is a boxed process group, or its name, as in functional collectives."""
    if isinstance(value, str):
        return value.isdigit()  # the other strings are reductions: "sum", "avg"
    return isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type())


def _group_size(group: Any) -> int:
    if isinstance(group, str):
        return int(distributed_c10d._resolve_process_group(group).size())  # type: ignore[attr-defined, arg-type]
    return int(dist.ProcessGroup.unbox(group).size())
