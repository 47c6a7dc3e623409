"""Headroom: GPU memory that torch's caching allocator must leave free for the CUDA context and NCCL's communicators.

All commands use this rule. NCCL's buffers are derived from its source (rates/communicators.py). The CUDA context is
measured by a calibration. Whatever is unknown is assumed. --headroom replaces the whole.

And what changes a GPU: --gpu-memory, a CUDA context that a calibration measured, --cuda. The usable memory of each GPU
itself is in catalog/gpus.toml (``usable_memory_bytes``).
"""

from dataclasses import dataclass
from datetime import date

from msgspec.structs import replace

from fsdp_bench.rates.communicators import Communicators
from fsdp_bench.spec.calibration_profile import Calibration, Profile
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import Gpu, Hardware, Source
from fsdp_bench.spec.units import GIB, format_gib, parse_bytes

ASSUMED_BYTES = 2 * GIB
"""Assumed for the CUDA context and NCCL together: the middle of the 1 to 3 GiB that users report between what torch
reserves and what nvidia-smi shows (issues of pytorch, OpenTau and Automodel)."""
ASSUMED_CONTEXT_BYTES = ASSUMED_BYTES - GIB // 2
"""Assumed for the CUDA context alone, if NCCL's part is derived: ASSUMED_BYTES less 0.5 GiB, the least that is reported
for one communicator."""
_ASSUMED = "for CUDA and NCCL (an assumption; users see 1 to 3 GiB)"
_CONTEXT_ASSUMED = "for CUDA (an assumption)"
_NCCL_ASSUMED = "for NCCL (an assumption; users see 1 to 3 GiB for CUDA and NCCL)"


@dataclass(frozen=True)
class Headroom:
    """Memory of one GPU that torch's allocator must leave free."""

    num_bytes: int
    source: str
    """The purpose of the headroom and how its size is known, as text."""


def headroom_of(gpu: Gpu | None, communicators: Communicators, stated_bytes: int | None = None) -> Headroom:
    """Return the memory of a GPU that is kept free: ``stated_bytes`` (--headroom), else for NCCL and the CUDA context.

    A context that a calibration measured is already subtracted from usable memory; it counts towards --headroom.
    """
    context = gpu.context_bytes if gpu is not None else None
    if stated_bytes is not None:
        return Headroom(max(stated_bytes - (context or 0), 0), "as stated")
    nccl = communicators.num_bytes
    if nccl is None:
        left = ASSUMED_BYTES if context is None else max(ASSUMED_BYTES - context, 0)
        return Headroom(left, _ASSUMED if context is None else _NCCL_ASSUMED)
    if context is None:
        return Headroom(ASSUMED_CONTEXT_BYTES + nccl.high, _ASSUMED if nccl.high else _CONTEXT_ASSUMED)
    return Headroom(nccl.high, "NCCL's derived buffers" if nccl.high else "one GPU has no NCCL")


def as_stated(
    hardware: Hardware | None,
    gpu_memory: str | int | None,
    profile: Calibration | None,
    cuda: str | None,
    power: str | float | None = None,
) -> Hardware | None:
    """Return hardware with what is stated of its GPU: usable memory, a calibration's context, CUDA's version, power.

    Raises SpecError as ``sized``, ``with_cuda`` and ``Gpu.under_power``.
    """
    if power is not None:
        if hardware is None:
            raise SpecError("power: no GPU is named; server= or gpu=, or hardware=")
        hardware = replace(hardware, gpu=hardware.gpu.under_power(power))
    if gpu_memory is not None:
        hardware = sized(hardware, gpu_memory, profile)
    elif hardware is not None:
        hardware = without_context(hardware, profile)
    return hardware if cuda is None else with_cuda(hardware, cuda)


def sized(hardware: Hardware | None, gpu_memory: str | int | None, profile: Calibration | None) -> Hardware:
    """Return the hardware with its GPU's usable memory, the catalogue's or ``gpu_memory``, less a measured context.

    Raises SpecError if no GPU is named, its memory is not documented, or ``gpu_memory`` is larger than the GPU.
    """
    if hardware is None:
        raise SpecError("no GPU is named; --server NAME or --gpu NAME, in Python server= or gpu=")
    gpu = hardware.gpu
    if gpu_memory is None:
        if gpu.usable_memory_bytes is None:
            raise SpecError(
                f"gpu: nobody documents how much memory a process can use on {gpu.name};"
                f" say it with --gpu-memory, below its {gpu.memory_gib:g} GiB"
            )
        return without_context(hardware, profile)
    size = parse_bytes(gpu_memory, "gpu-memory")
    if size > gpu.memory_gib * GIB:
        raise SpecError(f"gpu-memory: {format_gib(size)} is not allowed; {gpu.name} has {gpu.memory_gib:g} GiB")
    source = Source(title="the command line, --gpu-memory", date=date.today().isoformat())
    known = replace(gpu, usable_memory_bytes=size, usable_memory_source=source)
    return without_context(replace(hardware, gpu=known), profile)


def stated_headroom(text: str | int | None, hardware: Hardware | None) -> int | None:
    """Return --headroom in bytes, or None. Raises SpecError unless it is a size below the GPU's usable memory."""
    if text is None:
        return None
    size = parse_bytes(text, "headroom")
    usable = hardware.gpu.usable_memory_bytes if hardware else None
    if usable is not None and size >= usable:
        raise SpecError(
            f"headroom: {format_gib(size)} is not allowed; a process can use {format_gib(usable)} of the GPU"
        )
    return size


def with_cuda(hardware: Hardware | None, version: str) -> Hardware:
    """Return the hardware with the rates of a CUDA version. Raises SpecError without a GPU, or for other text."""
    if hardware is None:
        raise SpecError("cuda: no GPU is named; --server NAME or --gpu NAME, in Python server= or gpu=")
    return replace(hardware, gpu=hardware.gpu.with_cuda(version))


def without_context(hardware: Hardware, profile: Calibration | None) -> Hardware:
    """Subtract a measured CUDA context from usable memory. Raises SpecError if nothing is left."""
    gpu = hardware.gpu
    if not isinstance(profile, Profile) or profile.device_name not in gpu.product_names:
        return hardware
    if gpu.context_bytes is not None:  # `doctor --as-catalog --calibration` has subtracted it
        return hardware
    context, usable, source = profile.context_bytes, gpu.usable_memory_bytes, gpu.usable_memory_source
    if context is None or usable is None or source is None:
        return hardware
    if usable <= context:
        raise SpecError(
            f"gpu-memory: {format_gib(usable)} is not allowed; more than the CUDA context of {format_gib(context)}"
            f" that was measured on {profile.machine}"
        )
    title = f"{source.title} ({source.date}), less a CUDA context of {format_gib(context)} on {profile.machine}"
    read = Source(title=title, date=profile.measured_on)
    left = replace(gpu, usable_memory_bytes=usable - context, usable_memory_source=read, context_bytes=context)
    return replace(hardware, gpu=left)
