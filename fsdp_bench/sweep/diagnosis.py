"""The answers of ``fsdp-bench doctor``: what a sweep would use here and what prevents it; this machine as an entry."""

import contextlib
import datetime
import shutil
from typing import Any

import msgspec
from msgspec.structs import replace

from fsdp_bench.catalog.loader import gpu_by_product_name
from fsdp_bench.spec.calibration_profile import Profile
from fsdp_bench.spec.errors import SpecError, install_hint, shown
from fsdp_bench.spec.hardware import Gpu, Interconnect, Server, Source
from fsdp_bench.spec.subprocesses.own_python import NoAnswer, ask
from fsdp_bench.spec.units import GIB, MIB, format_gib
from fsdp_bench.sweep.gpu_links import GpuLinks
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
    try:
        return ask("fsdp_bench.train.processes.backends", dict[str, Any], timeout=180), None
    except NoAnswer as error:
        return None, f"torch does not start: {error}"


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
    with contextlib.suppress(OSError):
        if machine.gpus and (shm := shutil.disk_usage("/dev/shm").free) < 1 << 30:
            warnings.append(f"/dev/shm has only {format_gib(shm)}: NCCL may fail between GPUs; enlarge it (--shm-size)")
    return warnings


_SIXTEEN_BITS = ("bf16", "fp16")
"""Dtypes of a calibration's matrix products that ``Gpu.matmul_efficiency`` is about."""


def own_server(diagnosis: Diagnosis, links: GpuLinks, profile: Profile | None = None) -> tuple[Gpu, Server]:
    """Return this machine's GPU and the machine as entries of the catalogue; a calibration adds what it measured.

    A built-in GPU keeps its name and facts. Raises SpecError without a GPU, or of several kinds, or if the calibration
    is of another one.
    """
    gpus = diagnosis.machine.gpus
    if not gpus:
        raise SpecError(
            "as-catalog: NVML shows no GPU here; run it on the machine to describe, or write the entry by hand, as"
            " docs/catalog.md shows"
        )
    if names := sorted({gpu.name for gpu in gpus} - {gpus[0].name}):
        raise SpecError(
            f"as-catalog: {gpus[0].name} and {', '.join(names)} are in this machine, an entry has one kind of GPU;"
            " CUDA_VISIBLE_DEVICES=0,1 chooses some"
        )
    gpu = _gpu(diagnosis, links)
    host_link = links.to_host(_source("NVML on this machine, PCIe of the first GPU"))
    if profile is not None:
        gpu, host_link = _calibrated_gpu(gpu, profile), _calibrated_link(host_link, profile)
    machine = diagnosis.machine
    server = Server(
        name=machine.name,
        provider="own",
        gpu=gpu.name,
        gpus_per_node=len(gpus),
        source=_source("NVML and the operating system of this machine"),
        host_memory_bytes=machine.available_memory_bytes,
        intra_node=links.between_gpus(_source("NVML on this machine")) if len(gpus) > 1 else None,
        host_link=host_link,
    )
    return gpu, server


def _source(title: str, note: str | None = None) -> Source:
    return Source(title=title, date=datetime.date.today().isoformat(), note=note)


def _gpu(diagnosis: Diagnosis, links: GpuLinks) -> Gpu:
    """Return the GPU, known or not, with the memory that torch reports."""
    device = diagnosis.machine.gpus[0]
    seen: dict[str, Any] = next(iter((diagnosis.torch or {}).get("gpus", ())), {})
    known = gpu_by_product_name(device.name)
    major, minor = links.compute_capability or (0, 0)
    found = known or Gpu(
        name=device.name.removeprefix("NVIDIA ").replace(" ", "-"),
        product_names=(device.name,),
        memory_gib=round(device.memory_bytes / GIB),
        source=_source("NVML and torch on this machine"),
        dense_flops_per_second={},
        native_bf16=bool(seen.get("native_bf16", major >= 8)),
        compute_capability=major + minor / 10 if major else None,
        num_multiprocessors=seen.get("num_multiprocessors"),
        l2_cache_mib=seen["l2_cache_bytes"] // MIB if seen.get("l2_cache_bytes") else None,
    )
    found = replace(found, nvml_total_bytes=device.memory_bytes)
    if not seen:
        return found
    read = _source(f"torch.cuda.get_device_properties(0).total_memory here, torch {(diagnosis.torch or {})['torch']}")
    return replace(found, usable_memory_bytes=seen["total_memory_bytes"], usable_memory_source=read)


def _calibrated_gpu(gpu: Gpu, profile: Profile) -> Gpu:
    """Return the GPU without its measured CUDA context, with the rate of its fastest matrix product and copy."""
    if profile.device_name not in gpu.product_names:
        raise SpecError(f"calibration: made on {shown(profile.device_name)}, this machine has {gpu.product_names[0]}")
    context, usable, read = profile.context_bytes, gpu.usable_memory_bytes, gpu.usable_memory_source
    if context is not None and usable is not None and read is not None:
        title = f"{read.title}, less the CUDA context that a calibration measured"
        source = Source(title=title, date=profile.measured_on)
        gpu = replace(
            gpu, usable_memory_bytes=usable - context, usable_memory_source=source, context_bytes=context or None
        )
    products = [one for ranks in profile.ranks for one in ranks.matmul if one.dtype in _SIXTEEN_BITS]
    peak = gpu.peak_flops_per_second("bf16") or gpu.peak_flops_per_second("fp16")
    if products and peak is not None:
        best = max(2 * one.m * one.n * one.k / one.seconds for one in products)
        source = Source(title=f"calibration: {best / 1e12:.1f} TFLOP/s in a matrix product", date=profile.measured_on)
        gpu = replace(gpu, matmul_efficiency=round(best / peak, 4), matmul_efficiency_source=source)
    copied = [one for ranks in profile.ranks for one in ranks.operator if one.operator == "aten::copy_"]
    if copied and gpu.memory_bandwidth_bytes_per_second is None:
        rate = max(one.num_bytes / one.seconds for one in copied)
        note = "memory_bandwidth_bytes_per_second: what a calibration's copies reached; the nominal rate is higher."
        gpu = replace(gpu, memory_bandwidth_bytes_per_second=float(round(rate)), source=replace(gpu.source, note=note))
    return gpu


def _calibrated_link(link: Interconnect | None, profile: Profile) -> Interconnect | None:
    """Return the link to the host, with what copies over it reached as its note."""
    copies = [one for ranks in profile.ranks for one in ranks.copy]
    if link is None or not copies:
        return link
    best = max(one.num_bytes / one.seconds for one in copies)
    return replace(link, source=replace(link.source, note=f"A calibration's copies reached {best / 1e9:.1f} GB/s."))
