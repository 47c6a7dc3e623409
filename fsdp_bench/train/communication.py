"""Communication of one step: which collectives, how many bytes, how long in total, how long exposed.

Calls and bytes come from the dispatcher, which every collective passes whatever the backend. Times come from
torch.profiler: NCCL's kernels against all other kernels on CUDA; on gloo the process group's own operations
against operators on any other thread. Both are read on steps of their own, never on a measured step.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_bench.spec.record import CollectiveReading, CommunicationReading

Interval = tuple[float, float]

_KIND_OF_OPERATOR = {
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
"""c10d's operators (torch/csrc/distributed/c10d/Ops.cpp) and the functional ones, by kind."""

_NOT_COMMUNICATION = ("barrier", "wait_tensor", "monitored_barrier_", "_wrap_tensor_autograd")

_KIND_OF_NCCL_KERNEL = {
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "broadcast": "broadcast",
}

_NO_KERNEL = ("Memcpy HtoD", "Memcpy DtoH", "nccl:", "FSDP::", "record_param")
"""Device events that are neither collectives nor compute: copies to and from the host, and annotations."""

_GLOO_ALGORITHM = {"all_gather": "all_gather", "reduce_scatter": "all_reduce", "all_reduce": "all_reduce"}
"""What ProcessGroupGloo names its operation; a reduce-scatter runs as an all-reduce there (ProcessGroupGloo.cpp)."""


class CollectiveCounter(TorchDispatchMode):
    """Counts the calls and the message bytes of each kind of collective that is issued while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = defaultdict(int)
        self.message_bytes: dict[str, int] = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note a collective's kind and size, then run it."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        namespace, _, name = func.name().partition("::")
        if namespace in ("c10d", "_c10d_functional"):
            operator = name.partition(".")[0]
            if operator not in _NOT_COMMUNICATION:
                kind = _KIND_OF_OPERATOR.get(operator, "other")
                self.calls[kind] += 1
                self.message_bytes[kind] += _message_bytes(args)
        return func(*args, **(kwargs or {}))


def _message_bytes(args: Any) -> int:
    """Return the bytes of the largest argument: the output of a gather, the input of a scatter, else the tensor."""

    def size(value: Any) -> int:
        if isinstance(value, torch.Tensor):
            return value.nbytes
        return sum(size(part) for part in value) if isinstance(value, list | tuple) else 0

    return max((size(arg) for arg in args), default=0)


@dataclass(frozen=True)
class Span:
    """One event of the profiler, in seconds."""

    name: str
    start: float
    end: float
    thread: int
    on_device: bool


def measure_communication(
    step: Callable[[], object], device: torch.device, num_steps: int
) -> tuple[CommunicationReading, ...]:
    """Run ``num_steps`` profiled steps and one counted step; return a reading for each profiled one.

    The counted step comes last: torch.compile falls back to eager under a dispatch mode, and stays there.
    """
    profiled = [_profile(step, device) for _ in range(num_steps)]
    with CollectiveCounter() as counter:
        step()
    calls, message_bytes = dict(counter.calls), dict(counter.message_bytes)
    return tuple(
        build_reading(seconds, *split_spans(spans, device.type == "cuda"), calls, message_bytes)
        for seconds, spans in profiled
    )


def _profile(step: Callable[[], object], device: torch.device) -> tuple[float, list[Span]]:
    """Return the step's seconds under the profiler, and the profiler's events."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=activities) as profiler:
        begin = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - begin
    return seconds, _spans(profiler)


def _spans(profiler: profile) -> list[Span]:
    spans = []
    for event in profiler.events() or []:
        on_device = event.device_type != DeviceType.CPU
        if on_device and getattr(event, "is_user_annotation", False):
            continue  # the shadow of a record_function on the GPU's timeline, such as Optimizer.step: no kernel
        start, end = event.time_range.start / 1e6, event.time_range.end / 1e6
        spans.append(Span(event.name, start, end, event.thread, on_device))
    return spans


def split_spans(spans: list[Span], cuda: bool) -> tuple[dict[str, list[Interval]], list[Interval]]:
    """Sort the profiler's events into collectives by kind, and compute."""
    return _split_kernels(spans) if cuda else _split_gloo(spans)


def _split_kernels(spans: list[Span]) -> tuple[dict[str, list[Interval]], list[Interval]]:
    """NCCL's kernels are named ncclDevKernel_AllGather_RING_LL and the like; every other kernel is compute."""
    collectives: dict[str, list[Interval]] = defaultdict(list)
    compute = []
    for span in spans:
        if not span.on_device or span.name.startswith(_NO_KERNEL):
            continue
        if "nccldevkernel" in span.name.lower() or "ncclkernel" in span.name.lower():
            found = re.search("|".join(_KIND_OF_NCCL_KERNEL), span.name.lower().replace("_", ""))
            collectives[_KIND_OF_NCCL_KERNEL[found.group()] if found else "other"].append((span.start, span.end))
        else:
            compute.append((span.start, span.end))
    return collectives, compute


def _split_gloo(spans: list[Span]) -> tuple[dict[str, list[Interval]], list[Interval]]:
    """A gloo operation is attributed to the earliest issued collective that runs as it and is not yet taken."""
    issued: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: span.start):
        if span.name.startswith("c10d::"):
            kind = _KIND_OF_OPERATOR.get(span.name.removeprefix("c10d::"), "other")
            issued[_GLOO_ALGORITHM.get(kind, kind)].append((span.start, kind))
    collectives: dict[str, list[Interval]] = defaultdict(list)
    gloo_threads = {span.thread for span in spans if span.name.startswith("gloo:")}
    compute = []
    for span in sorted(spans, key=lambda span: span.start):
        if span.name.startswith("gloo:"):
            waiting = issued[span.name.removeprefix("gloo:")]
            kind = waiting.pop(0)[1] if waiting and waiting[0][0] <= span.start else "other"
            collectives[kind].append((span.start, span.end))
        elif span.name.startswith("aten::") and span.thread not in gloo_threads:
            compute.append((span.start, span.end))
    return collectives, compute


def build_reading(
    step_seconds: float,
    collectives: dict[str, list[Interval]],
    compute: list[Interval],
    calls: dict[str, int],
    message_bytes: dict[str, int],
) -> CommunicationReading:
    """Turn intervals and counts into a reading; every kind that was counted or timed appears."""
    everything = union([interval for intervals in collectives.values() for interval in intervals])
    total = length(everything)
    overlapped = total + length(union(compute)) - length(union(everything + compute))
    readings = tuple(
        CollectiveReading(
            kind=kind,
            calls=calls.get(kind, 0),
            message_bytes=message_bytes.get(kind, 0),
            seconds=length(union(collectives[kind])) if kind in collectives else None,
        )
        for kind in sorted(set(calls) | set(collectives))
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
