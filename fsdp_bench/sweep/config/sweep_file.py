"""Reads a sweep file. cells.py crosses its cells; grid.py makes them trials, frontier/file.py searches.

The keys of [run] are here, those of [grid] in cells.py and shapes.py, those of [frontier] in frontier/file.py.

[run]        how each trial is run: steps, warm-up, time limit, device, memory_limit, launcher
[grid]       lists are crossed, the last key varying fastest; a single value is used in all cells
[[include]]  further cells; what [grid] gives as a single value is used here too, lists are crossed
[[exclude]]  cells that are not run, each with its reason
[models.X]   a model of one's own, by Hugging Face's names; named in the grid as model = "X"
[frontier]   what to search in every cell: the largest model, batch or sequence length that fits
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from fsdp_bench.spec.codec import parse_document, read_text
from fsdp_bench.spec.errors import MachineError, SpecError, SweepFileError, shown
from fsdp_bench.spec.model import ModelShape
from fsdp_bench.spec.record import Device, RunPlan
from fsdp_bench.spec.units import format_gib, parse_bytes
from fsdp_bench.sweep.config.reading import check_keys, convert
from fsdp_bench.sweep.config.shapes import read_models
from fsdp_bench.sweep.machine import GpuDevice, Machine

_RUN_KEYS = ("name", "device", "launcher", "memory_limit", *RunPlan.__struct_fields__)
LAUNCHERS = ("fork", "torchrun", "resident")
"""A fork for every rank, torchrun for every trial, or one process for one trial of one rank after another."""

RESERVED_NAMES = ("trials",)
"""Of a sweep's folder: every file in a folder of that name is read as a trial's record."""

NO_GPU = "this machine shows no GPU (NVML, CUDA_VISIBLE_DEVICES)"

_TOP_KEYS = ("run", "grid", "include", "exclude", "models", "frontier")


@dataclass(frozen=True)
class SweepFile:
    """One file, its [run] resolved for a machine; its cells still as they were written."""

    path: Path
    text: str
    document: dict[str, Any]
    machine: Machine
    """With the memory that --gpu-memory leaves of its GPUs."""
    name: str
    launcher: str
    device: Device
    run: RunPlan
    models: dict[str, ModelShape]
    gpu_is_limited: bool
    """Whether --gpu-memory made the GPU smaller than it is."""
    lacks_gpu: bool = False
    """Whether it asks for a GPU that is not here, so that it can be listed and not run."""

    @property
    def has_frontier(self) -> bool:
        """Whether cells are searched, not run."""
        return "frontier" in self.document


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put the file's name before an error's message."""
    try:
        yield
    except SpecError as error:
        raise SweepFileError(f"{path}: {error}") from None


def require_gpu(file: SweepFile) -> SweepFile:
    """Return the file where this machine has what it asks for.

    Raises:
        MachineError: when it asks for a GPU and there is none.
    """
    if file.lacks_gpu:
        raise MachineError(
            f"[run] device: 'cuda' was asked for and {NO_GPU}; 'auto' would use the CPU, `fsdp-bench doctor` says what"
            " is here"
        )
    return file


def read_file(
    path: Path, machine: Machine, gpu_memory_bytes: int | None = None, emulate_world: int | None = None
) -> SweepFile:
    """Read a sweep file and resolve its [run] for this machine; ``require_gpu`` refuses it where it cannot run.

    Args:
        path: the file.
        machine: where it will run.
        gpu_memory_bytes: what --gpu-memory leaves of each GPU; it goes before [run] memory_limit.
        emulate_world: ranks of which every trial is rank 0, instead of the file's world sizes.

    Raises:
        SweepFileError: one line: the file, the place in it, what is allowed.
        MachineError: when --gpu-memory asks for a larger GPU.
    """
    if not path.exists():
        raise SweepFileError(f"{path}: no such file; sweep files end in .toml, the shipped ones are in sweeps/")
    try:
        text = read_text(path, "TOML")
        document = parse_document(text, "TOML", path)
    except SpecError as error:
        raise SweepFileError(str(error)) from None
    with naming(path):
        if emulate_world is not None:
            document = _emulating(document, emulate_world, path.stem)
        return _resolve(path, text, document, machine, gpu_memory_bytes)


def _emulating(document: dict[str, Any], world_size: int, stem: str) -> dict[str, Any]:
    """Return a document whose trials are all emulated as rank 0 of ``world_size`` ranks, without what needs peers."""
    run = {**table(document, "run"), "emulate": True}
    run = {key: value for key, value in run.items() if key not in (*_WITH_PEERS, "backend")}
    run["name"] = f"{run.get('name', stem)}-world-{world_size}"
    cells: dict[str, Any] = {"grid": {**table(document, "grid"), "world_size": world_size}}
    if "include" in document:
        cells["include"] = [
            {key: value for key, value in words.items() if key != "world_size"} for words in tables(document, "include")
        ]
    return {**document, **cells, "run": run}


def _resolve(
    path: Path, text: str, document: dict[str, Any], machine: Machine, gpu_memory_bytes: int | None
) -> SweepFile:
    check_keys("", document, _TOP_KEYS)
    run = table(document, "run")
    check_keys("[run] ", run, _RUN_KEYS)
    name, device = _name(run, path.stem), _device(run, machine)
    lacks_gpu = device == "cuda" and not machine.gpus
    plan = _run_plan(run, "frontier" in document, device)
    if gpu_memory_bytes is not None:
        machine = _limited(machine, device, gpu_memory_bytes)
        name = f"{name}-on-{format_gib(gpu_memory_bytes).replace(' ', '').replace('.0', '')}"
        plan = msgspec.structs.replace(plan, memory_limit_bytes=gpu_memory_bytes)
    return SweepFile(
        path=path,
        text=text,
        document=document,
        machine=machine,
        name=name,
        launcher=one_of("[run] launcher", run.get("launcher", "resident" if plan.emulate else "fork"), LAUNCHERS),
        device=device,
        run=plan,
        models=read_models(table(document, "models")),
        gpu_is_limited=gpu_memory_bytes is not None,
        lacks_gpu=lacks_gpu,
    )


def _limited(machine: Machine, device: Device, gpu_memory_bytes: int) -> Machine:
    """Return the machine with smaller GPUs."""
    if device != "cuda":
        raise MachineError("--gpu-memory: this sweep runs on a CPU, whose budget is [run] memory_limit")
    if not machine.gpus:
        gpu = GpuDevice(index=0, name="a GPU that is not here", memory_bytes=gpu_memory_bytes)
        return msgspec.structs.replace(machine, gpus=(gpu,))
    smallest = min(gpu.memory_bytes for gpu in machine.gpus)
    if gpu_memory_bytes > smallest:
        raise MachineError(
            f"--gpu-memory: {format_gib(gpu_memory_bytes)} is not allowed; a GPU here has {format_gib(smallest)}"
        )
    gpus = tuple(msgspec.structs.replace(gpu, memory_bytes=gpu_memory_bytes) for gpu in machine.gpus)
    return msgspec.structs.replace(machine, gpus=gpus)


def table(document: dict[str, Any], key: str) -> dict[str, Any]:
    """Return a table of the file, empty when it is not there.

    Raises:
        SpecError: when it is something else.
    """
    value = document.get(key, {})
    if not isinstance(value, dict):
        raise SpecError(f"{key}: must be a table, written [{key}]")
    return value


def tables(document: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """Return a list of tables of the file, empty when it is not there.

    Raises:
        SpecError: when it is something else.
    """
    value = document.get(key, [])
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise SpecError(f"{key}: must be a list of tables, each written [[{key}]]")
    return value


def one_of(field: str, value: Any, allowed: tuple[str, ...]) -> str:
    """Return a word of a closed vocabulary.

    Raises:
        SpecError: naming what is allowed.
    """
    if value not in allowed:
        raise SpecError(f"{field}: {shown(value)} is not allowed; one of {', '.join(allowed)}")
    return str(value)


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
    wanted = one_of("[run] device", run.get("device", "auto"), ("auto", "cpu", "cuda"))
    return "cuda" if wanted == "cuda" or (wanted == "auto" and machine.gpus) else "cpu"


_WITH_PEERS = ("communication_steps", "steps_without_communication")
"""Steps of [run] that mean nothing in a world of which only rank 0 is there."""

_OF_GPUS = (("backend", "gloo"), ("attention", "flash"))
"""Choices of [run] that GPUs have; naming one for a CPU changes nothing."""

STEPS_WITHOUT_COMMUNICATION = 3
"""By default, in sweeps that are about time; a search for the largest model is not."""


def _run_plan(run: dict[str, Any], has_frontier: bool, device: Device) -> RunPlan:
    fields: dict[str, Any] = {"steps_without_communication": 0 if has_frontier else STEPS_WITHOUT_COMMUNICATION}
    shares_gpus = run.get("backend") == "gloo" and device == "cuda"
    if run.get("emulate") is True or shares_gpus:
        fields = dict.fromkeys(_WITH_PEERS, 0)
    fields |= {key: value for key, value in run.items() if key in RunPlan.__struct_fields__}
    if shares_gpus and any(fields[key] for key in _WITH_PEERS):
        raise SpecError("[run] backend: over gloo a GPU's messages go through the host; communication is not measured")
    if device == "cpu":  # which has no others
        fields = {key: value for key, value in fields.items() if (key, value) not in _OF_GPUS}
    if "memory_limit" in run:
        fields["memory_limit_bytes"] = parse_bytes(run["memory_limit"], "[run] memory_limit")
    return convert(fields, RunPlan, "[run]")
