"""A sweep file as its trials."""

from __future__ import annotations

from pathlib import Path

from fsdp_bench.sweep.config.grid import trials_of
from fsdp_bench.sweep.config.sweep_file import read_file, require_gpu
from fsdp_bench.sweep.config.trial import SweepPlan
from fsdp_bench.sweep.machine import Machine


def read_sweep(path: Path, machine: Machine) -> SweepPlan:
    """Read a sweep file and resolve it for this machine."""
    return trials_of(require_gpu(read_file(path, machine)))
