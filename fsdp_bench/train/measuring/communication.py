"""Communication of one step: which collectives, how many bytes, how long in total, how long exposed.

Calls and bytes come from the dispatcher (collective_counter.py). Times come from torch.profiler: NCCL's kernels
against all other kernels on CUDA; on gloo the process group's own operations against operators on any other thread.
Both are read on steps of their own, never on a measured step.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from fsdp_bench.spec.record import CollectiveReading, CommunicationReading
from fsdp_bench.train.measuring.collective_counter import KIND_OF_OPERATOR, CollectiveCounter
from fsdp_bench.train.measuring.meters import GLOO_RELEASE_SECONDS

Interval = tuple[float, float]

_KIND_OF_NCCL_KERNEL = {
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "broadcast": "broadcast",
}

_COPIES = {"Memcpy HtoD": "copy_to_device", "Memcpy DtoH": "copy_to_host"}
_NO_KERNEL = (*_COPIES, "nccl:", "FSDP::", "record_param")
"""Device events that are neither collectives nor compute: copies to and from the host, and annotations."""

_GLOO_ALGORITHM = {"all_gather": "all_gather", "reduce_scatter": "all_reduce", "all_reduce": "all_reduce"}
"""What ProcessGroupGloo names its operation; a reduce-scatter runs as an all-reduce there (ProcessGroupGloo.cpp)."""


@dataclass(frozen=True)
class Span:
    """One event of the profiler, in seconds."""

    name: str
    start: float
    end: float
    thread: int
    on_device: bool


def measure_communication(
    step: Callable[[], object], device: torch.device, num_steps: int, trace: Path | None = None
) -> tuple[CommunicationReading, ...]:
    """Run ``num_steps`` profiled steps and one counted step; return a reading for each profiled one.

    The counted step comes last: torch.compile falls back to eager under a dispatch mode, and stays there. The last
    profiled step's trace is kept where one is asked for: Chrome's format, which Perfetto opens.
    """
    profiled = [_profile(step, device, trace if last == 0 else None) for last in range(1 - num_steps, 1)]
    with CollectiveCounter() as counter:
        step()
    return tuple(
        build_reading(seconds, *split_spans(spans, device.type == "cuda"), counter, copies_of(spans))
        for seconds, spans in profiled
    )


def _profile(step: Callable[[], object], device: torch.device, trace: Path | None) -> tuple[float, list[Span]]:
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
    return seconds, _spans(profiler)


def _spans(profiler: profile) -> list[Span]:
    """Return the profiler's events as it recorded them; ``profiler.events()`` takes ten times as long for the same."""
    spans = []
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    for event in profiler.profiler.kineto_results.events():
        on_device = event.device_type() != DeviceType.CPU
        if on_device and event.is_user_annotation():
            continue  # the shadow of a record_function on the GPU's timeline, such as Optimizer.step: no kernel
        start, end = event.start_ns() / 1e9, event.end_ns() / 1e9
        spans.append(Span(event.name(), start, end, event.start_thread_id(), on_device))
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
            kind = KIND_OF_OPERATOR.get(span.name.removeprefix("c10d::"), "other")
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
    counter: CollectiveCounter | None = None,
    copies: dict[str, list[Interval]] | None = None,
) -> CommunicationReading:
    """Turn intervals and counts into a reading; every kind that was counted or timed appears."""
    counter = counter or CollectiveCounter()
    timed = {**collectives, **(copies or {})}
    everything = union([interval for intervals in collectives.values() for interval in intervals])
    total = length(everything)
    overlapped = total + length(union(compute)) - length(union(everything + compute))
    readings = tuple(
        CollectiveReading(
            kind=kind,
            calls=counter.calls.get(kind, 0),
            message_bytes=counter.message_bytes.get(kind, 0),
            seconds=length(union(timed[kind])) if kind in timed else None,
            group_size=_only(counter.group_sizes.get(kind, set())),
        )
        for kind in sorted(set(counter.calls) | set(timed))
    )
    return CommunicationReading(
        step_seconds=step_seconds,
        total_seconds=total,
        exposed_seconds=min(max(total - overlapped, 0.0), total),
        collectives=readings,
    )


def copies_of(spans: list[Span]) -> dict[str, list[Interval]]:
    """Return when the device copied to and from the host, by kind."""
    copies: dict[str, list[Interval]] = defaultdict(list)
    for span in spans:
        kind = next((kind for name, kind in _COPIES.items() if span.name.startswith(name)), None)
        if span.on_device and kind is not None:
            copies[kind].append((span.start, span.end))
    return copies


def _only(sizes: set[int]) -> int | None:
    return next(iter(sizes)) if len(sizes) == 1 else None


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
