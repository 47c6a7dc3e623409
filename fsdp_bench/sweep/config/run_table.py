"""The [run] table of a sweep file: how each trial is run and measured. All keys of it are optional.

    name                         the folder of the results; by default the file's name
    device                       "cuda", "cpu", or "auto" (the default): GPUs if there are any; "rehearsed": rank 0 of
                                 the world in torch's CUDA build, on a stand-in for NVIDIA's libraries; memory, no times
    gpu                          the GPU of the catalogue that is rehearsed: "H100-SXM"
    headroom                     memory of it that is kept free for the CUDA context and NCCL: "2GiB", by default as
                                 fsdp-bench rehearse --gpu does
    launcher                     how ranks are started: "fork" or "torchrun" (LAUNCHERS, below)
    memory_limit                 memory that one rank may allocate, as text: "24GiB"

The other keys are fields of RunPlan in spec/record.py, where their defaults and ranges are.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from fsdp_bench.spec.errors import SpecError, shown
from fsdp_bench.spec.record import Device, RunPlan
from fsdp_bench.spec.subprocesses.rehearsal import RehearsedGpu
from fsdp_bench.spec.units import parse_bytes
from fsdp_bench.sweep.config.reading import check_keys, convert, one_of
from fsdp_bench.sweep.machine import Machine
from fsdp_bench.sweep.run.rehearsed import rehearsed_gpu

_PLAN_KEYS = tuple(field for field in RunPlan.__struct_fields__ if field != "rehearsed_on")
RUN_KEYS = ("name", "device", "gpu", "headroom", "launcher", "memory_limit", *_PLAN_KEYS)
"""All keys that [run] may have."""

LAUNCHERS = ("fork", "torchrun")
"""``fork`` (the default): each rank is forked from a process that has imported torch. ``torchrun``: each trial starts
with torchrun."""

RESERVED_NAMES = ("trials",)
"""Names that a sweep's folder must not have: every file in a folder with such a name is read as a trial's record."""

STEPS_WITHOUT_COMMUNICATION = 3
"""The default in sweeps without [frontier], which measure time; a search for the largest model does not."""

_STEPS_WITH_PEERS = ("communication_steps", "steps_without_communication")
"""Keys for steps that measure communication. They are 0 where rank 0 runs alone or messages go through the host."""

_GPU_CHOICES = (("backend", "gloo"), ("attention", "flash"))
"""Keys with values that change something on GPUs only; on a CPU they are ignored."""


@dataclass(frozen=True)
class RunTable:
    """The [run] table, resolved for a machine."""

    name: str
    device: Device
    launcher: str
    plan: RunPlan


def read_run_table(written: dict[str, Any], stem: str, has_frontier: bool, machine: Machine) -> RunTable:
    """Read [run] and resolve it for a machine.

    Args:
        written: the table as it was written.
        stem: the sweep file's name without its ending.
        has_frontier: whether the file has [frontier].
        machine: where the trials will run.
    """
    check_keys("[run] ", written, RUN_KEYS)
    name, device = _name(written, stem), _device(written, machine)
    plan = _run_plan(written, has_frontier, device, _rehearsed_on(written))
    launcher = one_of("[run] launcher", written.get("launcher", "fork"), LAUNCHERS)
    return RunTable(name, device, launcher, plan)


def of_rank_0(written: dict[str, Any], stem: str, of: str, **keys: Any) -> dict[str, Any]:
    """Return a [run] table with these keys that runs rank 0 alone, without the keys that need other ranks.

    ``of`` is added to its name: what emulates or rehearses the others.
    """
    run = {key: value for key, value in written.items() if key not in (*_STEPS_WITH_PEERS, "backend")}
    return {**run, **keys, "name": f"{run.get('name', stem)}-{of}".replace(" ", "-")}


def _rehearsed_on(run: dict[str, Any]) -> RehearsedGpu | None:
    if run.get("device") == "rehearsed":
        if not isinstance(run.get("gpu"), str):
            raise SpecError('[run] gpu: device = "rehearsed" needs the name of a GPU: gpu = "H100-SXM"')
        try:
            return rehearsed_gpu(run["gpu"], run.get("headroom"))
        except SpecError as error:
            raise SpecError(f"[run] {error}") from None
    for key in ("gpu", "headroom"):
        if key in run:
            raise SpecError(f'[run] {key}: is for device = "rehearsed"; other trials run on the GPU that is there')
    return None


def _name(run: dict[str, Any], stem: str) -> str:
    name = run.get("name", stem)
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise SpecError(
            f"[run] name: {shown(name)} is not allowed; letters, digits, '.', '_' and '-', for a folder's name"
        )
    if name.lower() in RESERVED_NAMES:
        raise SpecError(f"[run] name: {shown(name)} is not allowed; results keep records in folders of that name")
    return name


def _device(run: dict[str, Any], machine: Machine) -> Device:
    wanted = one_of("[run] device", run.get("device", "auto"), ("auto", "cpu", "cuda", "rehearsed"))
    return "cuda" if wanted in ("cuda", "rehearsed") or (wanted == "auto" and machine.gpus) else "cpu"


def _run_plan(run: dict[str, Any], has_frontier: bool, device: Device, rehearsed_on: RehearsedGpu | None) -> RunPlan:
    fields: dict[str, Any] = {"steps_without_communication": 0 if has_frontier else STEPS_WITHOUT_COMMUNICATION}
    shares_gpus = run.get("backend") == "gloo" and device == "cuda"
    if run.get("emulate") is True or rehearsed_on is not None or shares_gpus:
        fields = dict.fromkeys(_STEPS_WITH_PEERS, 0)
    if rehearsed_on is not None:
        fields |= {"emulate": True, "attention": "flash", "rehearsed_on": rehearsed_on}  # there is no cuDNN
    fields |= {key: value for key, value in run.items() if key in _PLAN_KEYS}
    if shares_gpus and any(fields[key] for key in _STEPS_WITH_PEERS):
        raise SpecError("[run] backend: over gloo a GPU's messages go through the host; communication is not measured")
    if device == "cpu":
        fields = {key: value for key, value in fields.items() if (key, value) not in _GPU_CHOICES}
    if "memory_limit" in run:
        fields["memory_limit_bytes"] = parse_bytes(run["memory_limit"], "[run] memory_limit")
    return convert(fields, RunPlan, "[run]")
