"""The GPU of rehearsed trials, which is one of the catalogue, and the environment in which they run.

This package does not import the stand-in for NVIDIA's libraries: the subprocess
``python -m fsdp_bench.rehearse.build`` compiles it and prints the environment variables that put it before them.
"""

import tempfile
from collections.abc import Mapping
from functools import cache

import msgspec

from fsdp_bench.catalog import loader
from fsdp_bench.plan import rehearsal
from fsdp_bench.plan.defaults import USUAL_GPUS_PER_NODE
from fsdp_bench.plan.headroom import sized, stated_headroom
from fsdp_bench.spec.codec import to_json
from fsdp_bench.spec.errors import MachineError, SpecError
from fsdp_bench.spec.hardware import Hardware
from fsdp_bench.spec.subprocesses.own_python import NoAnswer, ask
from fsdp_bench.spec.subprocesses.rehearsal import RehearsedGpu
from fsdp_bench.sweep.machine import GpuDevice, Machine


def rehearsed_gpu(name: str, headroom: str | int | None = None) -> RehearsedGpu:
    """Return a GPU of the catalogue to rehearse on. The default headroom is that of ``fsdp-bench rehearse --gpu``.

    Raises SpecError for a name that is not in the catalogue, a GPU that is not NVIDIA's or whose product name is not
    known, and a headroom that is no size.
    """
    hardware = sized(Hardware.of_gpu(loader.gpu(name)), None, None)
    kept = rehearsal.headroom_of_script(hardware, USUAL_GPUS_PER_NODE, stated_headroom(headroom, hardware))
    found = rehearsal.rehearsed_gpu(hardware.gpu, kept.num_bytes)
    if not hardware.gpu.product_names:
        raise SpecError(f"gpu: {name} cannot be rehearsed in a sweep; the catalogue has no product name for it")
    return found


def machine_with(machine: Machine, gpu: RehearsedGpu) -> Machine:
    """Return the machine as rehearsed trials see it: with that GPU and no other."""
    device = GpuDevice(index=0, name=gpu.product_name, memory_bytes=gpu.usable_bytes)
    return msgspec.structs.replace(machine, gpus=(device,), gpu_links=(), driver_version=None, rehearses=True)


def stand_in_environment(gpu: RehearsedGpu) -> Mapping[str, str]:
    """Return the environment variables with which processes run on the stand-in. Takes seconds the first time.

    Raises MachineError in one line, if torch is not a CUDA build, or there is no C compiler.
    """
    arguments = to_json(gpu).decode(), _temporary_folder().name
    try:
        answer = ask("fsdp_bench.rehearse.build", dict[str, str], *arguments)
    except NoAnswer as error:
        raise MachineError(f"the stand-in for NVIDIA's libraries cannot be made: {error}") from None
    if "error" in answer:
        raise MachineError(answer["error"])
    return answer


@cache
def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder for a stand-in that cannot be kept; it ends with this process."""
    return tempfile.TemporaryDirectory(prefix="fsdp-bench-")
