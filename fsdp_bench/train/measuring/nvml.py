"""Reads memory, power and utilization of this process's GPU from NVML. A container can hide them."""

from __future__ import annotations

import os
import threading
from typing import Any

import torch

from fsdp_bench.spec.rank_report import Telemetry

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

    def __enter__(self) -> TelemetrySampler:
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
