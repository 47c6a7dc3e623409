"""This machine: processors, memory, GPUs, versions, read without torch. Written to machine.json."""

from __future__ import annotations

import contextlib
import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
import psutil

from fsdp_bench.spec.files import cgroup_files, cgroup_limit_bytes, lines_of
from fsdp_bench.sweep.gpu_links import describe_links, visible_gpus, with_nvml
from fsdp_bench.sweep.run.outcome import OutOfMemoryKill
from fsdp_bench.version import __version__


class GpuDevice(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU of this machine, as NVML reports it."""

    index: int
    name: str
    memory_bytes: int
    processes: tuple[int, ...] = ()
    """IDs of the processes that compute on it."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about this machine. A fact that cannot be read is None, and prints as ``unknown``."""

    cpu_name: str
    num_cores: int
    """Cores that this process may use."""
    memory_bytes: int
    cgroup_limit_bytes: int | None
    gpus: tuple[GpuDevice, ...]
    driver_version: str | None
    gpu_links: tuple[str, ...]
    """The connection of each pair of GPUs: ``0-1 NVLink x18`` or the nearest common switch."""
    platform: str
    versions: dict[str, str]
    rehearses: bool = False
    """Whether the GPUs are not there: trials run on a stand-in for NVIDIA's libraries."""
    num_nodes: int = 1
    """Nodes of a cluster, all like this one."""
    ranks_per_node: int | None = None
    """The ranks of a trial on each of several nodes. None on one node, which runs all ranks of a trial."""

    @property
    def name(self) -> str:
        """The name of its folder in results/: ``8xH100-80GB-HBM3``, ``cpu-2-cores``, ``rehearsed``.

        With several nodes it begins with their number and that of ranks on each: ``2x4-A100-SXM4-80GB``.
        """
        if self.rehearses:
            return "rehearsed"
        if self.ranks_per_node is not None:
            first = self.gpus[:1]
            one = msgspec.structs.replace(self, num_nodes=1, ranks_per_node=None, gpus=first, gpu_links=())
            return f"{self.num_nodes}x{self.ranks_per_node}-{one.name}"
        if not self.gpus:
            return f"cpu-{self.num_cores}-cores"
        product = re.sub(r"[^A-Za-z0-9]+", "-", self.gpus[0].name.removeprefix("NVIDIA ")).strip("-")
        return product if len(self.gpus) == 1 else f"{len(self.gpus)}x{product}"

    def describe(self) -> str:
        """One line for charts and tables."""
        if self.rehearses:
            return f"{self.gpus[0].name} (rehearsed)"
        if self.ranks_per_node is not None:
            one = msgspec.structs.replace(self, num_nodes=1, ranks_per_node=None)
            return f"{self.num_nodes} nodes, each with {one.describe()}"
        if self.gpus:
            return f"{len(self.gpus)} x {self.gpus[0].name}"
        return f"{self.num_cores} cores of {self.cpu_name}"

    @property
    def num_gpus(self) -> int:
        """The GPUs of all nodes."""
        return len(self.gpus) * self.num_nodes

    def nodes_of(self, world_size: int) -> int:
        """Return how many nodes a trial takes: one if its ranks fit there, else as many as it fills."""
        if self.ranks_per_node is None or world_size <= self.ranks_per_node:
            return 1
        return -(-world_size // self.ranks_per_node)

    def why_not_placed(self, world_size: int) -> str | None:
        """Return why a trial's ranks cannot be spread over the nodes, each with as many as the others; else None."""
        each, nodes = self.ranks_per_node, self.nodes_of(world_size)
        if each is None or nodes == 1:
            return None
        if nodes > self.num_nodes:
            return f"world size {world_size} needs {nodes} nodes of {each} ranks; here are {self.num_nodes}"
        if world_size % each:
            return f"world size {world_size} does not fill nodes of {each} ranks; use a multiple of {each}"
        return None

    @property
    def available_memory_bytes(self) -> int:
        """Host memory that may be used: the machine's memory, or the cgroup's limit if that is lower."""
        return min(self.memory_bytes, self.cgroup_limit_bytes or self.memory_bytes)


def probe_machine() -> Machine:
    """Read the facts about this machine. Imports no torch, starts no CUDA."""
    gpus, driver, links = with_nvml(_probe_gpus) or ((), None, ())
    packages = {name: package_version(name) for name in ("torch", "nvidia-nccl-cu12", "nvidia-nccl-cu13")}
    return Machine(
        cpu_name=_cpu_name(),
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=psutil.virtual_memory().total,
        cgroup_limit_bytes=cgroup_limit_bytes(),
        gpus=gpus,
        driver_version=driver,
        gpu_links=links,
        platform=f"{platform.system()} {platform.release()} {platform.machine()}",
        versions={"fsdp-bench": __version__, "python": platform.python_version()}
        | {name: found for name, found in packages.items() if found is not None},
    )


def torch_version() -> str | None:
    """Return the version of the installed torch without importing it. None if torch is not installed."""
    return package_version("torch")


def package_version(name: str) -> str | None:
    """Return the version of an installed package without importing it. None if it is not installed."""
    with contextlib.suppress(PackageNotFoundError):
        return version(name)
    return None


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if match:
            return match.group(1)
    return platform.processor() or platform.machine()


class OutOfMemoryKills(msgspec.Struct, frozen=True, kw_only=True):
    """The number of processes that the kernel has killed so far because memory ran out."""

    own: int | None
    """Processes killed in this process's cgroup, which includes its ranks. None if the kernel does not count them."""
    machine: int
    """Processes killed on the whole machine, of any user."""

    def since(self, before: OutOfMemoryKills) -> OutOfMemoryKill:
        """Return whether a process of this cgroup was killed since ``before``, as far as the kernel shows it."""
        if self.own is not None and before.own is not None:
            return "yes" if self.own > before.own else "no"
        return "possibly" if self.machine > before.machine else "no"


def oom_kills() -> OutOfMemoryKills:
    """Read how many processes the kernel has killed so far because memory ran out."""
    counts = (_count("oom_kill", file) for file in cgroup_files("memory.events", "memory.oom_control"))
    own = next((count for count in counts if count is not None), None)
    return OutOfMemoryKills(own=own, machine=_count("oom_kill", Path("/proc/vmstat")) or 0)


def _count(word: str, file: Path) -> int | None:
    for line in lines_of(file):
        name, _, value = line.partition(" ")
        if name == word and value.isdigit():
            return int(value)
    return None


def _probe_gpus(nvml: Any) -> tuple[tuple[GpuDevice, ...], str | None, tuple[str, ...]]:
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in visible_gpus(nvml.nvmlDeviceGetCount())]
    devices = tuple(
        GpuDevice(
            index=index,
            name=nvml.nvmlDeviceGetName(handle),
            memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
            processes=tuple(p.pid for p in nvml.nvmlDeviceGetComputeRunningProcesses(handle)),
        )
        for index, handle in enumerate(handles)
    )
    return devices, nvml.nvmlSystemGetDriverVersion(), describe_links(handles)
