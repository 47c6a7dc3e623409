"""A simulated step in the Trace Event Format, which ui.perfetto.dev and chrome://tracing open.

A process is a rank or a setup. Its tracks are the phases, the host, the operators and the copies of each stream, and
the collectives of each process group, of which one runs at a time. Slices of a track do not overlap, or Perfetto would
drop them. Memory is not there: the allocator follows the host, and nobody knows when the host makes its calls.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from fsdp_bench.plan.chart_data import step_speeds
from fsdp_bench.plan.question import Question
from fsdp_bench.plan.rehearsal import Rehearsal
from fsdp_bench.plan.rehearsed_time.events import process_groups
from fsdp_bench.plan.setup_text import title, varying
from fsdp_bench.rates.datasheet import attention_flops
from fsdp_bench.replay.schedule import Span
from fsdp_bench.simulate.events import IN_HOST_MEMORY, Stream, Work
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.version import __version__

Event = dict[str, Any]
Track = tuple[int, int, str]
"""Two numbers by which tracks are ordered, and the name."""
_KINDS = {"host": "host", "compute": "operators", "collective": "collectives", "copy": "copies"}
"""Names of the tracks by the kind of their spans, from top to bottom."""
MOST = 16
"""Most setups of one file: each has half a megabyte."""


@dataclass(frozen=True)
class TracedStep:
    """One process of a trace."""

    name: str
    spans: Sequence[Span]
    groups: Mapping[str, str] = field(default_factory=dict)
    """The script's own process groups, by the names that spans have for them."""


def rehearsal_trace(found: Mapping[str, Rehearsal]) -> Event | None:
    """Return the trace of the steps that were noted, by the names of their processes. None if there is none."""
    steps = []
    for name, one in found.items():
        issued, time = one.report.issued, one.time
        if issued is None or time is None:
            continue
        sizes = process_groups(issued, one.hardware, one.report.rank).sizes
        groups = {group: f"{group} ({size} ranks)" for group, size in sizes.items()}
        count = sum(time.unknown.values())
        without = f"; without {count} kernels and collectives whose time is unknown" if count else ""
        steps.append(
            TracedStep(f"{name}, step {time.step}: rehearsed work, predicted times{without}", time.time.spans, groups)
        )
    return trace_document(steps) if steps else None


def prediction_trace(questions: Sequence[Question]) -> Event:
    """Return the trace of each setup's step. Raises SpecError for more than ``MOST``, or without a time."""
    if len(questions) > MOST:
        raise SpecError(f"trace: {len(questions)} setups are too many for one file; at most {MOST}")
    differing = varying([one.values for one in questions])
    names = (f"{title(one.values, differing)}: " if differing else "" for one in questions)
    speeds = step_speeds(questions, "trace")
    return trace_document(
        [TracedStep(f"{name}rank 0, predicted", one.time.spans) for name, one in zip(names, speeds, strict=True)]
    )


def trace_document(steps: Sequence[TracedStep]) -> Event:
    """Return steps as a document of the Trace Event Format, in its order: names first, then slices by their begin."""
    names, slices = list[Event](), list[Event]()
    for process, step in enumerate(steps, start=1):
        tracks: dict[Track, list[Event]] = {}
        for span in step.spans:
            tracks.setdefault(_track(span, step), []).append(_slice(span.work.name, span, _arguments(span)))
        tracks[-1, 0, "phases"] = list(_phases(step.spans))
        names.append(_metadata("process_name", process, 0, {"name": step.name}))
        for place, track in enumerate(sorted(tracks), start=1):
            thread = 100 * process + place  # unlike the others' of all processes; 0 is the idle thread of Linux
            names.append(_metadata("thread_name", process, thread, {"name": track[-1]}))
            names.append(_metadata("thread_sort_index", process, thread, {"sort_index": place}))
            slices += [{**one, "pid": process, "tid": thread} for one in tracks[track]]
    slices.sort(key=lambda one: (one["ts"], one["tid"]))
    said = "predicted for the work that is issued, not measured"
    return {"traceEvents": [*names, *slices], "otherData": {"fsdp-bench": __version__, "times": said}}


def _track(span: Span, step: TracedStep) -> Track:
    place, group = [*_KINDS].index(span.kind), span.work.group
    if span.kind == "host":
        return place, 0, _KINDS[span.kind]
    if span.kind == "collective":
        return place, 0, f"{_KINDS[span.kind]} of process group {step.groups.get(group, group)}"
    return place, span.stream, f"{_KINDS[span.kind]} of the {span.stream.name.lower().replace('_', '-')} stream"


def _phases(spans: Sequence[Span]) -> Iterator[Event]:
    """Yield each phase of the compute stream, from its first operator to its last."""
    operators = (span for span in spans if span.kind == "compute" and span.stream is Stream.COMPUTE)
    for name, own in groupby(operators, key=lambda span: span.phase):
        first, *others = own
        last = others[-1] if others else first
        yield _slice(name, Span("phase", first.stream, first.begin, last.end, first.work, name, -1), {})


def _slice(name: str, span: Span, arguments: Event) -> Event:
    begin, end = (round(seconds * 1e9) for seconds in (span.begin, span.end))
    times = {"ts": _microseconds(begin), "dur": _microseconds(end - begin)}
    return {"name": name.removeprefix(IN_HOST_MEMORY), "cat": span.kind, "ph": "X", **times, "args": arguments}


def _microseconds(nanoseconds: int) -> float:
    """Return microseconds that are so many nanoseconds rounded or cut off, as older Perfetto does (CoerceToTs)."""
    found = nanoseconds / 1e3
    return found if int(found * 1e3) == nanoseconds else math.nextafter(found, math.inf)


def _arguments(span: Span) -> Event:
    work = span.work
    known = {"phase": span.phase, "bytes": work.num_bytes, **_sizes(work)}
    return {name: value for name, value in known.items() if value}


def _sizes(work: Work) -> Event:
    """Return the sizes and FLOPs of what is bound by computing."""
    if work.is_product:
        return {**dict(zip("mnk", work.dims, strict=True)), "FLOPs": 2 * math.prod(work.dims)}
    if not work.is_attention:
        return {}
    sizes = zip(("batch", "heads", "key_value_heads", "length", "head_size"), work.dims, strict=False)
    return {**dict(sizes), "FLOPs": attention_flops(work.dims, work.is_backward)}


def _metadata(name: str, process: int, thread: int, arguments: Event) -> Event:
    return {"name": name, "ph": "M", "pid": process, "tid": thread, "args": arguments}
