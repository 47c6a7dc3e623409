"""Peaks of PyTorch's caching allocator between two moments, without changing what the script reads.

To read a peak between two moments, the counters must be reset in between. A script that prints
torch.cuda.max_memory_allocated would see that. So its view is kept apart: the peak since its own last reset.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

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
        for name in _STATISTICS:
            if name in self._raw:
                setattr(torch._C, name, self._script_view(self._raw[name]))
        for name in _RESETS:
            if name in self._raw:
                setattr(torch._C, name, self._script_reset(self._raw[name]))

    def take(self) -> MemoryCounters | None:
        """Return the peaks since the last call, and begin anew. None before CUDA is initialized."""
        if not torch.cuda.is_initialized():
            return None
        device = torch.cuda.current_device()
        found = self._raw["_cuda_memoryStats"](device)
        self._fold(device, found)
        self.peak_requested_bytes = max(self.peak_requested_bytes, found["requested_bytes"]["all"]["peak"])
        self._raw["_cuda_resetPeakMemoryStats"](device)
        return MemoryCounters(
            allocated_bytes=found["allocated_bytes"]["all"]["peak"],
            reserved_bytes=found["reserved_bytes"]["all"]["peak"],
            active_bytes=found["active_bytes"]["all"]["peak"],
            num_alloc_retries=found["num_alloc_retries"],
            num_ooms=found["num_ooms"],
        )

    def _fold(self, device: int, found: dict[str, Any]) -> None:
        for key, values in _with_peaks(device, found):
            self._held[key] = max(self._held.get(key, 0), values["peak"])

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
