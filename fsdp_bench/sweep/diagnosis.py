"""The facts that ``fsdp-bench doctor`` prints: what a sweep would use on this machine, and what prevents it."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import msgspec

from fsdp_bench.catalog.loader import gpu_by_product_name
from fsdp_bench.spec.errors import install_hint
from fsdp_bench.spec.subprocesses.own_python import own_python
from fsdp_bench.spec.units import format_gib
from fsdp_bench.sweep.launchers.start import worker_environment
from fsdp_bench.sweep.machine import Machine, torch_version


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """The machine, the GPUs that torch sees, what a sweep will use, and warnings."""

    machine: Machine
    torch: dict[str, Any] | None
    """The facts that torch reports. None if torch is not installed or cannot be imported."""
    will: tuple[str, ...]
    warnings: tuple[str, ...]


def diagnose(machine: Machine) -> Diagnosis:
    """Collect the facts about this machine. A subprocess asks torch."""
    torch_facts, problem = _ask_torch()
    warnings = [problem] if problem else []
    warnings += _gpu_warnings(machine, torch_facts)
    return Diagnosis(machine=machine, torch=torch_facts, will=_will(machine, torch_facts), warnings=tuple(warnings))


def _ask_torch() -> tuple[dict[str, Any] | None, str | None]:
    if torch_version() is None:
        return None, f"torch is not installed: no sweep can run; {install_hint('train')}"
    command = own_python("fsdp_bench.train.processes.backends")
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=worker_environment(), timeout=180)
    except subprocess.TimeoutExpired:
        return None, "torch did not start within 180 s"
    if done.returncode:
        return None, f"torch does not start: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts, None


def _will(machine: Machine, facts: dict[str, Any] | None) -> tuple[str, ...]:
    if facts is None:
        return ("nothing until torch starts",)
    if machine.gpus and facts["cuda_available"]:
        return (
            f'run trials over NCCL on up to {len(machine.gpus)} GPUs (device = "cuda" or "auto")',
            f"record results in results/{machine.name}/",
        )
    memory = format_gib(machine.available_memory_bytes)
    return (
        f'run trials over gloo on {machine.num_cores} cores (device = "cpu" or "auto"), ranks sharing {memory}',
        "measure live tensor bytes, step time and communication; reserved memory, MFU and power stay unknown",
        f"record results in results/{machine.name}/",
    )


def _gpu_warnings(machine: Machine, facts: dict[str, Any] | None) -> list[str]:
    warnings = []
    if machine.gpus and facts is not None and not facts["cuda_available"]:
        warnings.append(f"NVML shows {len(machine.gpus)} GPUs, but torch {facts['torch']} has no working CUDA")
    for gpu in machine.gpus:
        if gpu.processes:
            numbers = ", ".join(map(str, gpu.processes))
            warnings.append(f"GPU {gpu.index} is in use by process {numbers}: measurements will be marked suspect")
    for name in sorted({gpu.name for gpu in machine.gpus}):
        if gpu_by_product_name(name) is None:
            warnings.append(f"{name} is not in the catalogue: MFU will be unknown")
    shm = _shm_free_bytes()
    if machine.gpus and shm is not None and shm < 1 << 30:
        warnings.append(f"/dev/shm has only {format_gib(shm)}: NCCL may fail between GPUs; enlarge it (--shm-size)")
    return warnings


def _shm_free_bytes() -> int | None:
    try:
        stat = os.statvfs("/dev/shm")
    except OSError:
        return None
    return stat.f_bavail * stat.f_frsize
