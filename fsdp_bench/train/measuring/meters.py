"""Memory meters: the peaks of one rank by phase. On CUDA from the caching allocator, on a CPU from live tensors.

Phases are read in the warm-up steps only, so that reading does not slow timed steps. The peak over all steps is read
at the end.
"""

import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import torch

from fsdp_bench.spec.files import cgroup_files
from fsdp_bench.spec.rank_report import MemoryReading, Telemetry
from fsdp_bench.spec.record import WITHOUT_COMMUNICATION
from fsdp_bench.train.measuring.storage_tracker import StorageTracker

# -- Memory, power and utilization of this process's GPU from NVML, which a container can hide -------------------------

SAMPLE_SECONDS = 0.1


class Nvml:
    """One GPU in pynvml. Without a driver every method returns None."""

    def __init__(self, device: torch.device) -> None:
        self._handle: Any = None
        if device.type != "cuda":
            return
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}" if not uuid.startswith("GPU-") else uuid)
        except Exception:  # no driver, no pynvml, a MIG slice: NVML's facts are then unknown, the trial goes on
            self._handle = None

    def process_bytes(self) -> int | None:
        """Return the GPU memory of this process. If process IDs are hidden, of the only process on the GPU."""
        if self._handle is None:
            return None
        try:
            processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        except self._nvml.NVMLError:
            return None
        mine = [p for p in processes if p.pid == os.getpid()] or (processes if len(processes) == 1 else [])
        used = mine[0].usedGpuMemory if mine else None
        return int(used) if used else None

    def sample(self) -> tuple[float, float] | None:
        """Return power in watts and utilisation in per cent."""
        if self._handle is None:
            return None
        try:
            power = self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1000
            return power, float(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu)
        except self._nvml.NVMLError:
            return None


class TelemetrySampler:
    """Samples power and utilisation in a thread, inside a ``with`` block."""

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml
        self._samples: list[tuple[float, float]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while (sample := self._nvml.sample()) is not None:
            self._samples.append(sample)
            if self._stop.wait(SAMPLE_SECONDS):
                return

    def __enter__(self) -> "TelemetrySampler":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def telemetry(self) -> Telemetry | None:
        """Return the samples. None if NVML gave none."""
        if not self._samples:
            return None
        return Telemetry(
            power_watts=tuple(power for power, _ in self._samples),
            utilization_percent=tuple(utilization for _, utilization in self._samples),
        )


GLOO_RELEASE_SECONDS = 0.005
"""The time to wait between phases: gloo's threads keep the tensors of a finished collective a little longer."""


class MemoryMeter:
    """Measures the memory of one rank by phase. The training loop tells it when a phase begins.

    This one measures nothing, for steps that are only timed.
    """

    current_phase = WITHOUT_COMMUNICATION

    def phase(self, name: str) -> None:
        """End the current phase and begin a new one."""

    def end_phases(self) -> None:
        """End the warm-up. From here only the overall peak is tracked."""

    def reading(self) -> MemoryReading:
        """Return the readings so far."""
        raise AssertionError("nothing was metered")


class _PhasesMeter(MemoryMeter):
    """Peaks by phase, and host memory: the peak resident set size of this process, and its cgroup's peak."""

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}
        self.current_phase = "load"
        peaks = cgroup_files("memory.peak", "memory.max_usage_in_bytes")
        self._cgroup = next((file for file in peaks if file.exists()), None)
        self._cgroup_before = _number_in(self._cgroup)

    def _close_window(self, peak_bytes: int) -> None:
        self.peaks[self.current_phase] = max(self.peaks.get(self.current_phase, 0), peak_bytes)

    def _reading(self, **fields: Any) -> MemoryReading:
        after, before = _number_in(self._cgroup), self._cgroup_before
        is_higher = after is not None and before is not None and after > before  # the cgroup's peak is never reset
        return MemoryReading(
            phases=dict(self.peaks),
            peak_host_bytes=_peak_rss_bytes(),
            peak_host_cgroup_bytes=after if is_higher else None,
            **fields,
        )


class CpuMeter(_PhasesMeter):
    """Tracks live tensor bytes in the warm-up, with an optional budget that ends the trial.

    torch.compile falls back to eager under a dispatch mode, and compiled code allocates without operators; so a
    compiled trial is not tracked, and its peak is unknown.
    """

    def __init__(self, budget_bytes: int | None, compiled: bool) -> None:
        super().__init__()
        self._tracker: StorageTracker | None = None
        if not compiled:
            self._tracker = StorageTracker(budget_bytes, GLOO_RELEASE_SECONDS)
            self._tracker.__enter__()

    def phase(self, name: str) -> None:
        """End the current phase and begin a new one."""
        if self._tracker is not None:
            self._close_window(self._tracker.peak_bytes)
            time.sleep(GLOO_RELEASE_SECONDS)
            self._tracker.reset_peak()
        self.current_phase = name

    def end_phases(self) -> None:
        """Stop tracking: measured steps run at full speed."""
        if self._tracker is not None:
            self._close_window(self._tracker.peak_bytes)
            self._tracker.__exit__(None, None, None)
            self._tracker = None

    def reading(self) -> MemoryReading:
        """Return the peaks by phase. A CPU has no reserved memory and no allocation retries."""
        if self._tracker is not None:
            self._close_window(self._tracker.peak_bytes)
        worst = max(self.peaks, key=lambda phase: self.peaks[phase], default="unknown")
        return self._reading(peak_allocated_bytes=self.peaks.get(worst), peak_phase=worst)


class CudaMeter(_PhasesMeter):
    """Reads the caching allocator's statistics and NVML."""

    def __init__(self, device: torch.device, limit_bytes: int | None) -> None:
        super().__init__()
        self._device = device
        self._nvml = Nvml(device)
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
        """End the current phase and begin a new one."""
        if not self._ended:
            self._close_window(self._read_window())
            torch.cuda.reset_peak_memory_stats(self._device)
        self.current_phase = name

    def end_phases(self) -> None:
        """End the warm-up. From here only the overall peak is tracked."""
        if not self._ended:
            self._close_window(self._read_window())
            self._sample_device()
            self._ended = True

    def _sample_device(self) -> None:
        # Reserved memory, context and communicators only grow, so that a sample at the end is the peak.
        sample = self._nvml.process_bytes()
        self._peak_device = self._peak_device if sample is None else max(self._peak_device or 0, sample)

    def reading(self) -> MemoryReading:
        """Return the allocator's peaks and counts. The phase of a peak after the warm-up is unknown."""
        window = self._read_window()
        if not self._ended:
            self._close_window(window)
        self._sample_device()
        worst = max(self.peaks, key=lambda phase: self.peaks[phase])
        statistics: dict[str, Any] = torch.cuda.memory_stats(self._device)
        return self._reading(
            peak_allocated_bytes=self._peak_allocated,
            peak_phase=worst if self.peaks[worst] == self._peak_allocated else "unknown",
            peak_reserved_bytes=self._peak_reserved,
            peak_device_bytes=self._peak_device,
            num_alloc_retries=statistics.get("num_alloc_retries"),
            num_ooms=statistics.get("num_ooms"),
        )


def _peak_rss_bytes() -> int | None:
    """Return VmHWM (proc_pid_status(5)), the peak of this process's resident set. None if this is not Linux."""
    try:
        found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def _number_in(file: Path | None) -> int | None:
    try:
        return int(file.read_text()) if file else None
    except (OSError, ValueError):
        return None


def build_meter(device: torch.device, limit_bytes: int | None, compiled: bool) -> MemoryMeter:
    """Return the meter for a device, and apply the memory limit."""
    return CudaMeter(device, limit_bytes) if device.type == "cuda" else CpuMeter(limit_bytes, compiled)
