"""Memory meters: one rank's peaks, by phase. On CUDA from the caching allocator, on a CPU by storage tracking.

Phases are read in the warm-up steps only: there the reading costs nothing that is timed. The peak over all steps
is read at the end.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any, Protocol

import torch

from fsdp_bench.spec.rank_report import MemoryReading
from fsdp_bench.spec.record import WITHOUT_COMMUNICATION
from fsdp_bench.train.measuring.nvml import Nvml
from fsdp_bench.train.measuring.storage_tracker import StorageTracker

GLOO_RELEASE_SECONDS = 0.005
"""Gloo's threads hold the tensors of a finished collective a moment longer; they must not count in the next phase."""


class MemoryMeter(Protocol):
    """Measures one rank's memory by phase; the training loop says when a phase begins."""

    @property
    def current_phase(self) -> str:
        """The phase that is running."""

    def phase(self, name: str) -> None:
        """A new phase begins."""

    def end_phases(self) -> None:
        """The warm-up is over; only the overall peak is still followed."""

    def close(self) -> None:
        """Stop metering, whatever happened."""

    def reading(self) -> MemoryReading:
        """Return what was seen so far; resident bytes are filled in by the worker."""


class Unmetered:
    """Measures no memory, for steps of which only the time is wanted."""

    current_phase = WITHOUT_COMMUNICATION

    def phase(self, name: str) -> None:
        """Nothing is followed."""

    def end_phases(self) -> None:
        """Nothing is followed."""

    def close(self) -> None:
        """Nothing is followed."""

    def reading(self) -> MemoryReading:
        """Nothing was seen."""
        raise AssertionError("nothing was metered")


class _Phases:
    """Peaks by phase, and the phase that is running."""

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}
        self.current = "load"

    def close_window(self, peak_bytes: int) -> None:
        self.peaks[self.current] = max(self.peaks.get(self.current, 0), peak_bytes)

    def worst(self) -> str:
        return max(self.peaks, key=lambda phase: self.peaks[phase])


class CpuMeter:
    """Live tensor bytes while phases are followed, with an optional budget that ends the trial.

    torch.compile falls back to eager under a dispatch mode, and compiled code allocates without operators; so a
    compiled trial is not tracked, and its peak is unknown.
    """

    def __init__(self, budget_bytes: int | None, compiled: bool) -> None:
        self._tracker: StorageTracker | None = None
        if not compiled:
            self._tracker = StorageTracker(budget_bytes, GLOO_RELEASE_SECONDS)
            self._tracker.__enter__()
        self._phases = _Phases()
        self._host = HostMeter()

    def phase(self, name: str) -> None:
        """Close the running phase and begin another."""
        if self._tracker is not None:
            self._phases.close_window(self._tracker.peak_bytes)
            time.sleep(GLOO_RELEASE_SECONDS)
            self._tracker.reset_peak()
        self._phases.current = name

    @property
    def current_phase(self) -> str:
        """The phase that is running."""
        return self._phases.current

    def end_phases(self) -> None:
        """Stop tracking: measured steps run at full speed."""
        if self._tracker is not None:
            self._phases.close_window(self._tracker.peak_bytes)
            self._tracker.__exit__(None, None, None)
            self._tracker = None

    def close(self) -> None:
        """Stop tracking."""
        self.end_phases()

    def reading(self) -> MemoryReading:
        """Return peaks by phase; a CPU has no reserved memory and no retries."""
        if self._tracker is not None:
            self._phases.close_window(self._tracker.peak_bytes)
        peaks = dict(self._phases.peaks)
        return MemoryReading(
            peak_allocated_bytes=max(peaks.values(), default=None),
            peak_phase=max(peaks, key=lambda phase: peaks[phase], default="unknown"),
            phases=peaks,
            peak_host_bytes=self._host.peak_rss_bytes(),
            peak_host_cgroup_bytes=self._host.peak_cgroup_bytes(),
        )


class CudaMeter:
    """The caching allocator's own statistics, and NVML's."""

    def __init__(self, device: torch.device, limit_bytes: int | None) -> None:
        self._device = device
        self._nvml = Nvml(device)
        self._phases = _Phases()
        self._host = HostMeter()
        self._ended = False
        self._peak_allocated = self._peak_reserved = 0
        self._peak_device: int | None = None
        if limit_bytes is not None:
            total = torch.cuda.get_device_properties(device).total_memory
            fraction = (limit_bytes + 0.5) / total  # torch cuts the product off to whole bytes
            torch.cuda.set_per_process_memory_fraction(min(fraction, 1.0), device)
        torch.cuda.reset_peak_memory_stats(device)

    def _read_window(self) -> int:
        peak = torch.cuda.max_memory_allocated(self._device)
        self._peak_allocated = max(self._peak_allocated, peak)
        self._peak_reserved = max(self._peak_reserved, torch.cuda.max_memory_reserved(self._device))
        return peak

    def phase(self, name: str) -> None:
        """Close the running phase and begin another."""
        if not self._ended:
            self._phases.close_window(self._read_window())
            torch.cuda.reset_peak_memory_stats(self._device)
        self._phases.current = name

    @property
    def current_phase(self) -> str:
        """The phase that is running."""
        return self._phases.current

    def end_phases(self) -> None:
        """From here only the overall peak is followed."""
        if not self._ended:
            self._phases.close_window(self._read_window())
            self._sample_device()
            self._ended = True

    def close(self) -> None:
        """Nothing to undo: the allocator counts by itself."""

    def _sample_device(self) -> None:
        # Reserved memory, context and communicators only grow, so that a sample at the end is the peak.
        sample = self._nvml.process_bytes()
        if sample is not None:
            self._peak_device = max(self._peak_device or 0, sample)

    def reading(self) -> MemoryReading:
        """Return the allocator's peaks and counts; a peak outside of the warm-up has an unknown phase."""
        window = self._read_window()
        if not self._ended:
            self._phases.close_window(window)
        self._sample_device()
        worst = self._phases.worst()
        statistics: dict[str, Any] = torch.cuda.memory_stats(self._device)
        return MemoryReading(
            peak_allocated_bytes=self._peak_allocated,
            peak_phase=worst if self._phases.peaks[worst] == self._peak_allocated else "unknown",
            phases=dict(self._phases.peaks),
            peak_reserved_bytes=self._peak_reserved,
            peak_device_bytes=self._peak_device,
            peak_host_bytes=self._host.peak_rss_bytes(),
            peak_host_cgroup_bytes=self._host.peak_cgroup_bytes(),
            num_alloc_retries=statistics.get("num_alloc_retries"),
            num_ooms=statistics.get("num_ooms"),
        )


class HostMeter:
    """Host memory: this process's largest resident set, and its cgroup's peak."""

    def __init__(self) -> None:
        self._cgroup = _cgroup_peak_file()
        self._cgroup_before = self._read_cgroup()

    def peak_rss_bytes(self) -> int | None:
        """Return VmHWM (proc_pid_status(5)); None outside Linux."""
        try:
            status = Path("/proc/self/status").read_text()
        except OSError:
            return None
        match = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
        return int(match.group(1)) * 1024 if match else None

    def peak_cgroup_bytes(self) -> int | None:
        """Return the cgroup's peak if it was reached since the meter began: the file's maximum is never reset."""
        after = self._read_cgroup()
        if after is None or self._cgroup_before is None or after <= self._cgroup_before:
            return None
        return after

    def _read_cgroup(self) -> int | None:
        try:
            return int(self._cgroup.read_text()) if self._cgroup else None
        except (OSError, ValueError):
            return None


def _cgroup_peak_file() -> Path | None:
    """Return the file that holds the cgroup's peak: version 2's memory.peak or version 1's counterpart."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            file = Path("/sys/fs/cgroup") / path.lstrip("/") / "memory.peak"
        elif "memory" in controllers.split(","):
            file = Path("/sys/fs/cgroup/memory") / path.lstrip("/") / "memory.max_usage_in_bytes"
        else:
            continue
        if file.exists():
            return file
    return None


def build_meter(device: torch.device, limit_bytes: int | None, compiled: bool) -> MemoryMeter:
    """Return the meter for a device, with its limit or budget in force."""
    return CudaMeter(device, limit_bytes) if device.type == "cuda" else CpuMeter(limit_bytes, compiled)
