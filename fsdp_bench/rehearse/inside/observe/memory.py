"""Peaks of PyTorch's caching allocator between two moments, without changing what the script reads; its history.

To read a peak between two moments, the counters must be reset in between. A script that prints
torch.cuda.max_memory_allocated would see that. So its view is kept apart: the peak since its own last reset.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .user_lines import Frame, as_document, cause

_STATISTICS = ("_cuda_memoryStats", "_accelerator_getDeviceStats")
_RESETS = ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats")
"""Functions of torch._C that read and reset the same counters; the second of each exists in newer versions."""


@dataclass(frozen=True)
class MemoryCounters:
    """Counters of this process's GPU: peaks since the last reading, and counts since the start."""

    allocated_bytes: int
    reserved_bytes: int
    active_bytes: int
    num_alloc_retries: int
    num_ooms: int


class PeakCounters:
    """Reads and resets the allocator's peaks."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, str, str], int] = {}
        """Peaks that our resets hide from the script: by device, counter and pool. Its own reset clears them."""
        self.peak_requested_bytes = 0
        """The peak of what tensors asked for, before rounding, which is what PyTorch's memory history adds up to.

        Until a free completes it counts, as in active and not as in allocated bytes."""
        self._raw = {name: getattr(torch._C, name) for name in (*_STATISTICS, *_RESETS) if hasattr(torch._C, name)}

    def install(self) -> None:
        """Let the script see its own peaks."""
        for name, raw in self._raw.items():
            setattr(torch._C, name, (self._script_view if name in _STATISTICS else self._script_reset)(raw))

    def take(self) -> MemoryCounters | None:
        """Return the peaks since the last call, and begin anew. None before CUDA is initialized."""
        if not torch.cuda.is_initialized():
            return None
        device = torch.cuda.current_device()
        found = self._raw["_cuda_memoryStats"](device)
        for key, values in _with_peaks(device, found):
            self._held[key] = max(self._held.get(key, 0), values["peak"])
        self.peak_requested_bytes = max(self.peak_requested_bytes, found["requested_bytes"]["all"]["peak"])
        self._raw["_cuda_resetPeakMemoryStats"](device)
        return MemoryCounters(
            allocated_bytes=found["allocated_bytes"]["all"]["peak"],
            reserved_bytes=found["reserved_bytes"]["all"]["peak"],
            active_bytes=found["active_bytes"]["all"]["peak"],
            num_alloc_retries=found["num_alloc_retries"],
            num_ooms=found["num_ooms"],
        )

    def totals(self) -> dict[tuple[str, str, str], int]:
        """Return the counts and bytes since the start: by counter, pool, and ``allocated`` or ``freed``."""
        if not torch.cuda.is_initialized():
            return {}
        device = torch.cuda.current_device()
        counters = _with_peaks(device, self._raw["_cuda_memoryStats"](device))
        kinds = ("allocated", "freed")
        return {(name, pool, kind): counts[kind] for (_device, name, pool), counts in counters for kind in kinds}

    def _script_view(self, raw: Any) -> Any:
        def statistics(device: int) -> Any:
            found = raw(device)
            for key, values in _with_peaks(device, found):
                values["peak"] = max(self._held.get(key, 0), values["peak"])
            return found

        return statistics

    def _script_reset(self, raw: Any) -> Any:
        def reset(device: int) -> Any:
            self._held = {key: peak for key, peak in self._held.items() if key[0] != device}
            return raw(device)

        return reset


def _with_peaks(device: int, found: dict[str, Any]) -> Iterator[tuple[tuple[int, str, str], dict[str, int]]]:
    """Yield the statistics that have a peak, with their device, counter and pool."""
    for counter, pools in found.items():
        if isinstance(pools, dict):
            for pool, values in pools.items():
                if isinstance(values, dict) and "peak" in values:
                    yield (device, counter, pool), values


# -- PyTorch's own memory history: which lines hold what is allocated at the peak, and the curve over time -------------
#
# torch.cuda.memory._record_memory_history keeps every allocation and free with its Python stack. Autograd's thread has
# no Python stack: what backward allocates is attributed to the backward pass.

MOST_ENTRIES = 2_000_000
"""Allocations and frees that are kept: an hour of steps. The oldest are dropped beyond."""

MOST_POINTS = 2_000
"""Points of the curve that is drawn."""

MOST_LINES = 200
"""Lines that are reported: all of most scripts, so that two rehearsals can be compared."""

SMALL_BYTES = 1 << 20
"""Up to this size the allocator takes blocks from its pool for small ones: kSmallSize in CUDACachingAllocator.cpp."""


def record_history() -> None:
    """Begin to record when CUDA is initialized, which is the script's own decision."""
    record_all = torch.cuda.memory._record_memory_history
    torch.cuda._lazy_call(functools.partial(record_all, "all", stacks="python", max_entries=MOST_ENTRIES))


class History:
    """The recorded entries of this process's GPU."""

    def __init__(self) -> None:
        self._entries: Sequence[dict[str, Any]] = ()
        if torch.cuda.is_initialized():
            traces = torch.cuda.memory._snapshot()["device_traces"]
            device = torch.cuda.current_device()
            self._entries = traces[device] if device < len(traces) else ()

    def reaches(self, peak_requested_bytes: int) -> bool:
        """Whether it leads to this peak. It does not if entries were dropped, or the script keeps fewer or none.

        The allocator's ``requested_bytes`` fall when a free completes (CUDACachingAllocator.cpp, free_block): for a
        tensor that another stream uses (record_stream, as FSDP1 calls it), later than when the free is requested.
        """
        levels = (level for _entry, level in self._changes("free_completed"))
        return max(levels, default=0) == peak_requested_bytes

    def _changes(self, freed: str = "free_requested") -> Iterator[tuple[dict[str, Any], int]]:
        """Yield each allocation and free, with the bytes that are allocated after it."""
        level = 0
        for entry in self._entries:
            if entry["action"] == "alloc":
                level += entry["size"]
            elif entry["action"] == freed:
                level -= entry["size"]
            else:
                continue
            yield entry, level

    def repeats(self, begin_us: int, middle_us: int, end_us: int, num_allocations: int) -> bool:
        """Whether each later step is as the last of two, if the script asks for the same.

        It is where both make the same allocations and frees in the same order, on the same streams, large ones at the
        same addresses, and the last one asks for no new segment: so it leaves the large pool as it has found it. That
        both ask for the same is not enough: the same requests may need a new segment if others hold the free blocks.

        ``num_allocations`` is what the allocator has counted in the last step: the history may be the script's own.
        """
        first = [_fact(one) for one in self._entries if begin_us < one["time_us"] <= middle_us]
        last = [_fact(one) for one in self._entries if middle_us < one["time_us"] <= end_us]
        has_all = sum(action == "alloc" for action, *_rest in last) == num_allocations
        return has_all and first == last and not any(action.startswith("segment") for action, *_rest in last)

    def lines_at_peak(self) -> list[dict[str, Any]]:
        """Return the lines that hold most at the first moment of the highest allocation, the largest first."""
        peak, highest = -1, -1
        for index, (_entry, level) in enumerate(self._changes()):
            if level > highest:
                peak, highest = index, level
        alive: dict[int, dict[str, Any]] = {}
        for index, (entry, _level) in enumerate(self._changes()):
            if entry["action"] == "alloc":
                alive[entry["addr"]] = entry
            else:
                alive.pop(entry["addr"], None)
            if index == peak:
                break
        totals: dict[tuple[Frame | None, Frame | None], list[int]] = defaultdict(lambda: [0, 0])
        for entry in alive.values():
            frames = [(frame["filename"], frame["line"], frame["name"]) for frame in entry.get("frames", ())]
            total = totals[cause(frames)]
            total[0] += entry["size"]
            total[1] += 1
        ordered = sorted(totals.items(), key=lambda item: -item[1][0])
        return [
            {"line": as_document(inner), "user_line": as_document(own), "num_bytes": num_bytes, "num_tensors": count}
            for (inner, own), (num_bytes, count) in ordered[:MOST_LINES]
        ]

    def curve(self) -> list[tuple[int, int, int]]:
        """Return time in microseconds, allocated and reserved bytes; of many points the highest of each stretch."""
        points: list[tuple[int, int, int]] = []
        allocated = reserved = 0
        for entry in self._entries:
            action, size = entry["action"], entry["size"]
            allocated += {"alloc": size, "free_requested": -size}.get(action, 0)
            reserved += {"segment_alloc": size, "segment_map": size, "segment_free": -size,
                         "segment_unmap": -size}.get(action, 0)  # fmt: skip
            points.append((entry.get("time_us", 0), allocated, reserved))
        stretch = max(1, len(points) // MOST_POINTS)
        return [max(points[i : i + stretch], key=lambda point: point[1]) for i in range(0, len(points), stretch)]


def _fact(entry: dict[str, Any]) -> tuple[Any, ...]:
    """Return what has to be the same of an entry. Small blocks, such as a loss, take turns."""
    return entry["action"], entry["size"], entry["stream"], entry["addr"] if entry["size"] > SMALL_BYTES else 0
