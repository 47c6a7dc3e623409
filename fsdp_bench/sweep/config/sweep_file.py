"""A sweep file: TOML, whose tables other files of this package read.

[run]        how each trial is run: steps, warm-up, time limit, device, memory_limit, launcher (run_table.py)
[grid]       lists are crossed, the last key varying fastest; a single value is used in all cells (cells.py, shapes.py)
[[include]]  further cells; single values of [grid] are used here too, lists are crossed (cells.py)
[[exclude]]  cells that are not run, each with its reason (cells.py)
[models.X]   the user's own model: dimensions, with Hugging Face's names (shapes.py), or its code (model_code.py);
             [grid] names it as model = "X"
[frontier]   what to search in every cell: the largest model, batch or sequence length (frontier/file.py)

grid.py makes the cells trials; with [frontier], frontier/file.py makes them searches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from fsdp_bench.spec.codec import parse_document, read_text
from fsdp_bench.spec.errors import MachineError, SpecError, SweepFileError
from fsdp_bench.spec.model_code import TrainedModel
from fsdp_bench.spec.record import Device, RunPlan
from fsdp_bench.spec.units import format_gib
from fsdp_bench.sweep.config.reading import check_keys
from fsdp_bench.sweep.config.run_table import emulated, read_run_table, rehearsed
from fsdp_bench.sweep.config.shapes import read_models
from fsdp_bench.sweep.machine import GpuDevice, Machine
from fsdp_bench.sweep.run.rehearsed import machine_with

NO_GPU = "this machine shows no GPU (NVML, CUDA_VISIBLE_DEVICES)"

_TOP_KEYS = ("run", "grid", "include", "exclude", "models", "frontier")


@dataclass(frozen=True)
class SweepFile:
    """One sweep file. [run] is resolved for a machine, the other tables are still as they were written."""

    path: Path
    text: str
    document: dict[str, Any]
    machine: Machine
    """The machine. With --gpu-memory, its GPUs have that memory. If trials are rehearsed, it has the GPU of these."""
    name: str
    launcher: str
    device: Device
    run: RunPlan
    models: dict[str, TrainedModel]
    gpu_is_limited: bool
    """Whether --gpu-memory made the GPU smaller than it is."""
    lacks_gpu: bool = False
    """Whether the file asks for a GPU that this machine lacks. Such a file can be listed but not run."""

    @property
    def has_frontier(self) -> bool:
        """Whether the file has [frontier], so that cells are searched instead of run."""
        return "frontier" in self.document


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put the file's name before an error's message."""
    try:
        yield
    except SpecError as error:
        raise SweepFileError(f"{path}: {error}") from None


def require_gpu(file: SweepFile) -> SweepFile:
    """Return the file, if this machine has the GPU that it asks for.

    Raises:
        MachineError: if the file asks for a GPU and there is none.
    """
    if file.lacks_gpu:
        raise MachineError(
            f"[run] device: 'cuda' was asked for and {NO_GPU}; 'auto' would use the CPU, `fsdp-bench doctor` says what"
            " is here"
        )
    return file


def read_file(
    path: Path,
    machine: Machine,
    gpu_memory_bytes: int | None = None,
    emulate_world: int | None = None,
    rehearse_gpu: str | None = None,
) -> SweepFile:
    """Read a sweep file and resolve [run] for a machine. ``require_gpu`` refuses a file that cannot run there.

    Args:
        path: the file.
        machine: the machine that runs the trials.
        gpu_memory_bytes: memory of each GPU (--gpu-memory). It overrides memory_limit of [run].
        emulate_world: emulate every trial as rank 0 of this many ranks, instead of the file's world sizes.
        rehearse_gpu: rehearse every trial on this GPU of the catalogue (--rehearse).

    Raises:
        SweepFileError: one line: the file, the place in it, what is allowed.
        MachineError: if --gpu-memory is more than a GPU has.
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
        if rehearse_gpu is not None:
            document = {**document, "run": rehearsed(table(document, "run"), rehearse_gpu, path.stem)}
        return _resolve(path, text, document, machine, gpu_memory_bytes)


def _emulating(document: dict[str, Any], world_size: int, stem: str) -> dict[str, Any]:
    """Return a document whose trials are all emulated as rank 0 of ``world_size`` ranks."""
    cells: dict[str, Any] = {"grid": {**table(document, "grid"), "world_size": world_size}}
    if "include" in document:
        cells["include"] = [
            {key: value for key, value in entry.items() if key != "world_size"} for entry in tables(document, "include")
        ]
    return {**document, **cells, "run": emulated(table(document, "run"), world_size, stem)}


def _resolve(
    path: Path, text: str, document: dict[str, Any], machine: Machine, gpu_memory_bytes: int | None
) -> SweepFile:
    check_keys("", document, _TOP_KEYS)
    run = read_run_table(table(document, "run"), path.stem, "frontier" in document, machine)
    name, plan = run.name, run.plan
    if plan.rehearsed_on is not None:
        machine = machine_with(machine, plan.rehearsed_on)
    lacks_gpu = run.device == "cuda" and not machine.gpus
    if gpu_memory_bytes is not None:
        machine = _limited(machine, run.device, gpu_memory_bytes)
        name = f"{name}-on-{format_gib(gpu_memory_bytes).replace(' ', '').replace('.0', '')}"
        plan = msgspec.structs.replace(plan, memory_limit_bytes=gpu_memory_bytes)
    return SweepFile(
        path=path,
        text=text,
        document=document,
        machine=machine,
        name=name,
        launcher=run.launcher,
        device=run.device,
        run=plan,
        models=read_models(table(document, "models"), path.parent),
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
    """Return a table of the file; an empty one if it is missing.

    Raises:
        SpecError: if the value is something else.
    """
    value = document.get(key, {})
    if not isinstance(value, dict):
        raise SpecError(f"{key}: must be a table, written [{key}]")
    return value


def tables(document: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """Return a list of tables of the file; an empty one if it is missing.

    Raises:
        SpecError: if the value is something else.
    """
    value = document.get(key, [])
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise SpecError(f"{key}: must be a list of tables, each written [[{key}]]")
    return value
