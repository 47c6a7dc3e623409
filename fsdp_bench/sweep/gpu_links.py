"""The links between this machine's GPUs, and to the host, as NVML reports them."""

import contextlib
import os
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from fsdp_bench.spec.hardware import Interconnect, LinkKind, Source

T = TypeVar("T")

_NVLINKS = {
    (6, 0): ("NVLink 1", 20e9),
    (7, 0): ("NVLink 2", 25e9),
    (7, 5): ("NVLink 2", 25e9),
    (8, 0): ("NVLink 3", 25e9),
    (9, 0): ("NVLink 4", 25e9),
    (10, 0): ("NVLink 5", 50e9),
    (10, 3): ("NVLink 5", 50e9),
}
"""By compute capability: the generation of NVLink, and bytes a second of one link and direction (NVIDIA's whitepapers:
300 GB/s for the 6 links of a V100, 600 for 12 of an A100, 900 for 18 of an H100, 1800 for 18 of a B200, both ways)."""
_PCIE_3_BYTES_PER_SECOND = 1e9
"""Nominal rate of a lane of PCIe 3.0 and one direction; each generation since has twice that of the one before."""


class GpuLinks(msgspec.Struct, frozen=True, kw_only=True):
    """The links of a machine's first GPU. A fact that NVML does not report is None."""

    compute_capability: tuple[int, int] | None = None
    num_nvlinks: int = 0
    to_switch: bool | None = None
    """Whether the NVLinks lead to a switch; otherwise they lead to other GPUs."""
    pcie_generation: int | None = None
    """The highest generation that GPU and machine both have; an idle GPU runs at a lower one."""
    pcie_lanes: int | None = None

    def between_gpus(self, source: Source) -> Interconnect | None:
        """Return the link between the GPUs. None if NVML does not report where the NVLinks lead."""
        if not self.num_nvlinks:
            return self.to_host(source)
        if self.to_switch is None:
            return None
        kind = LinkKind.NVSWITCH if self.to_switch else LinkKind.NVLINK_MESH
        found = _NVLINKS.get(self.compute_capability) if self.compute_capability else None
        generation, of_one = found or (None, None)
        together = self.num_nvlinks * of_one if of_one else None
        return Interconnect(kind=kind, generation=generation, bandwidth_bytes_per_second=together, source=source)

    def to_host(self, source: Source) -> Interconnect | None:
        """Return the link between a GPU and host memory. None if NVML does not report it."""
        generation, lanes = self.pcie_generation, self.pcie_lanes
        if generation is None or lanes is None or generation < 3:
            return None
        rate = lanes * _PCIE_3_BYTES_PER_SECOND * 2 ** (generation - 3)
        name = f"PCIe {generation}.0 x{lanes}"
        return Interconnect(kind=LinkKind.PCIE, generation=name, bandwidth_bytes_per_second=rate, source=source)


def with_nvml(read: Callable[[Any], T]) -> T | None:
    """Return what a function reads from NVML, which is started for it; None if NVML is not here or fails."""
    try:
        import pynvml
    except ImportError:
        return None
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        try:
            return read(pynvml)
        finally:
            pynvml.nvmlShutdown()
    return None


def probe_links() -> GpuLinks:
    """Ask NVML for the links of the first GPU that CUDA_VISIBLE_DEVICES allows. Without NVML nothing is known."""

    def read(nvml: Any) -> GpuLinks:
        visible = visible_gpus(nvml.nvmlDeviceGetCount())
        if not visible:
            return GpuLinks()
        handle = nvml.nvmlDeviceGetHandleByIndex(visible[0])
        return GpuLinks(
            compute_capability=_ask("nvmlDeviceGetCudaComputeCapability", handle),
            num_nvlinks=num_nvlinks(handle),
            to_switch=_to_switch(handle),
            pcie_generation=_ask("nvmlDeviceGetMaxPcieLinkGeneration", handle),
            pcie_lanes=_ask("nvmlDeviceGetMaxPcieLinkWidth", handle),
        )

    return with_nvml(read) or GpuLinks()


def visible_gpus(count: int) -> list[int]:
    """Return the indices of GPUs that CUDA_VISIBLE_DEVICES allows. Names other than numbers allow all GPUs."""
    setting = os.environ.get("CUDA_VISIBLE_DEVICES")
    if setting is None:
        return list(range(count))
    words = [word.strip() for word in setting.split(",") if word.strip()]
    if not all(word.isdigit() for word in words):
        return list(range(count)) if words and words != ["-1"] else []
    return [int(word) for word in words if int(word) < count]


def describe_links(handles: list[object]) -> tuple[str, ...]:
    """Describe the connection of each pair of GPUs: the number of NVLinks, or the nearest common PCIe switch."""
    import pynvml

    ancestors = {
        0: "same board",
        10: "one PCIe switch",
        20: "PCIe switches",
        30: "one host bridge",
        40: "one NUMA node",
        50: "system",
    }
    described = []
    for i, first in enumerate(handles):
        for j in range(i + 1, len(handles)):
            with contextlib.suppress(pynvml.NVMLError):
                level = pynvml.nvmlDeviceGetTopologyCommonAncestor(first, handles[j])
                links = num_nvlinks(first)
                described.append(f"{i}-{j} {f'NVLink x{links}' if links else ancestors.get(level, f'level {level}')}")
    return tuple(described)


def num_nvlinks(handle: object) -> int:
    """Return the number of a GPU's NVLinks that are up."""
    import pynvml

    active = 0
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            active += pynvml.nvmlDeviceGetNvLinkState(handle, link) == 1
        except pynvml.NVMLError:
            break
    return active


def _to_switch(handle: object) -> bool | None:
    import pynvml

    end = _ask("nvmlDeviceGetNvLinkRemoteDeviceType", handle, 0)
    known = {pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH: True, pynvml.NVML_NVLINK_DEVICE_TYPE_GPU: False}
    return known.get(end)


def _ask(function: str, *arguments: object) -> Any:
    """Return what a function of NVML reports; None if it does not, or this version of NVML lacks it."""
    import pynvml

    try:
        found = getattr(pynvml, function)(*arguments)
    except pynvml.NVMLError:
        return None
    return tuple(found) if isinstance(found, list | tuple) else found
