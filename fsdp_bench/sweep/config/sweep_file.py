"""Reads a sweep file, which is TOML, and crosses its tables to cells; resolves [run] and [models.X] for a machine.

[run]        how each trial is run; all keys are optional (RunTable)
[grid]       lists are crossed, the last key varying fastest; a single value is used in all cells
[[include]]  further cells; single values of [grid] are used here too, lists are crossed
[[exclude]]  cells that are not run, each with its reason
[models.X]   the user's own model: dimensions, with Hugging Face's names, or its code (models.py); [grid] names it as
             model = "X"
[frontier]   what to search in every cell: the largest model, batch or sequence length (frontier/file.py)

grid.py makes the cells trials; with [frontier], frontier/file.py makes them searches.
"""

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from fsdp_bench.spec.errors import MachineError, SpecError, SweepFileError, shown
from fsdp_bench.spec.files import parse_document, read_text
from fsdp_bench.spec.model_code import TrainedModel
from fsdp_bench.spec.record import Device, RunPlan
from fsdp_bench.spec.setup import TrainSetup
from fsdp_bench.spec.subprocesses.rehearsal import RehearsedGpu
from fsdp_bench.spec.units import format_gib, parse_bytes
from fsdp_bench.sweep.config.models import MODEL_KEYS, read_models
from fsdp_bench.sweep.config.reading import FIELD_ALIASES, check_keys, convert, naming, one_of, table, tables
from fsdp_bench.sweep.machine import GpuDevice, Machine
from fsdp_bench.sweep.run.rehearsed import machine_with, rehearsed_gpu

_PLAN_KEYS = tuple(field for field in RunPlan.__struct_fields__ if field != "rehearsed_on")
RUN_KEYS = ("name", "device", "gpu", "headroom", "launcher", "memory_limit", *_PLAN_KEYS)
"""All keys that [run] may have. Beside the fields of RunPlan (spec/record.py)::

    name          the folder of the results; by default the file's name
    device        "cuda", "cpu", or "auto" (the default): GPUs if there are any; "rehearsed": rank 0 of the world in
                  torch's CUDA build, on a stand-in for NVIDIA's libraries; memory, no times
    gpu           the GPU of the catalogue that is rehearsed: "H100-SXM"
    headroom      memory of it that is kept free for the CUDA context and NCCL: "2GiB", by default as
                  fsdp-bench rehearse --gpu does
    launcher      how ranks are started: "fork" or "torchrun" (LAUNCHERS)
    memory_limit  memory that one rank may allocate, as text: "24GiB"
"""

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
        # cuDNN would compile its attention in each trial, which takes at most 1 MiB more than FlashAttention.
        fields |= {"emulate": True, "attention": "flash", "rehearsed_on": rehearsed_on}
    fields |= {key: value for key, value in run.items() if key in _PLAN_KEYS}
    if shares_gpus and any(fields[key] for key in _STEPS_WITH_PEERS):
        raise SpecError("[run] backend: over gloo a GPU's messages go through the host; communication is not measured")
    if device == "cpu":
        fields = {key: value for key, value in fields.items() if (key, value) not in _GPU_CHOICES}
    if "memory_limit" in run:
        fields["memory_limit_bytes"] = parse_bytes(run["memory_limit"], "[run] memory_limit")
    return convert(fields, RunPlan, "[run]")


NO_GPU = "this machine shows no GPU (NVML, CUDA_VISIBLE_DEVICES)"

_TOP_KEYS = ("run", "grid", "include", "exclude", "models", "frontier")
_GRID_KEYS = (*MODEL_KEYS, *TrainSetup.__struct_fields__, *FIELD_ALIASES)

Cell = dict[str, Any]

MOST_CELLS = 100_000
"""The most cells of one table. With trials of five minutes they take almost a year."""


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


def require_gpu(file: SweepFile) -> SweepFile:
    """Return the file. Raises MachineError if it asks for a GPU that this machine lacks."""
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
    """Read a sweep file and resolve [run] for a machine; ``require_gpu`` refuses one that cannot run there.

    ``gpu_memory_bytes`` (--gpu-memory) overrides memory_limit of [run]; ``emulate_world`` replaces the file's world
    sizes; ``rehearse_gpu`` is of the catalogue. Raises SweepFileError, naming the place in the file; MachineError if
    --gpu-memory is more than a GPU has.
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
            run = of_rank_0(table(document, "run"), path.stem, rehearse_gpu, device="rehearsed", gpu=rehearse_gpu)
            document = {**document, "run": run}
        return _resolve(path, text, document, machine, gpu_memory_bytes)


def _emulating(document: dict[str, Any], world_size: int, stem: str) -> dict[str, Any]:
    cells: dict[str, Any] = {"grid": {**table(document, "grid"), "world_size": world_size}}
    if "include" in document:
        cells["include"] = [
            {key: value for key, value in entry.items() if key != "world_size"} for entry in tables(document, "include")
        ]
    run = of_rank_0(table(document, "run"), stem, f"world-{world_size}", emulate=True)
    return {**document, **cells, "run": run}


def _resolve(
    path: Path, text: str, document: dict[str, Any], machine: Machine, gpu_memory_bytes: int | None
) -> SweepFile:
    check_keys("", document, _TOP_KEYS)
    run = table(document, "run")
    check_keys("[run] ", run, RUN_KEYS)
    name, device = _name(run, path.stem), _device(run, machine)
    plan = _run_plan(run, "frontier" in document, device, _rehearsed_on(run))
    if plan.rehearsed_on is not None:
        machine = machine_with(machine, plan.rehearsed_on)
    lacks_gpu = device == "cuda" and not machine.gpus
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
        launcher=one_of("[run] launcher", run.get("launcher", "fork"), LAUNCHERS),
        device=device,
        run=plan,
        models=read_models(table(document, "models"), path.parent),
        gpu_is_limited=gpu_memory_bytes is not None,
        lacks_gpu=lacks_gpu,
    )


def _limited(machine: Machine, device: Device, gpu_memory_bytes: int) -> Machine:
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


def cells(document: dict[str, Any]) -> Iterator[tuple[str, Cell]]:
    """Yield every cell in the order of the file, each with its place in the file."""
    grid = canonical("[grid] ", table(document, "grid"))
    yield from (("[grid]", cell) for cell in _cross(grid, "[grid]"))
    single = {key: value for key, value in grid.items() if not isinstance(value, list)}
    listed = {key for key, value in grid.items() if isinstance(value, list)}
    for number, extra_table in enumerate(tables(document, "include"), 1):
        place = f"[[include]] {number}"
        extra = canonical(f"{place} ", extra_table)
        if {"model", "params"} & set(extra):  # either names the model
            listed = listed - {"model", "params"}
        missing = sorted(listed - set(extra))
        if missing:
            raise SpecError(f"{place} does not say {missing[0]!r}, for which [grid] has several values")
        merged = {**single, **extra}
        if "params" in extra:
            merged.pop("model", None)
        yield from ((place, cell) for cell in _cross(merged, place))


def canonical(place: str, written: dict[str, Any]) -> dict[str, Any]:
    """Return a table of [grid], [[include]] or [[exclude]] with the fields' own names."""
    check_keys(place, written, _GRID_KEYS)
    renamed: dict[str, Any] = {}
    for key, value in written.items():
        target = FIELD_ALIASES.get(key, key)
        if target in renamed:
            raise SpecError(f"{place}{shown(key)} and {target!r} are the same thing; keep one")
        renamed[target] = value
    return renamed


def _cross(written: dict[str, Any], place: str) -> Iterator[Cell]:
    for key, value in written.items():
        if value == []:
            raise SpecError(f"{place} {key}: an empty list leaves no cell; give at least one value")
    if not written:
        return
    axes = [value if isinstance(value, list) else [value] for value in written.values()]
    if (count := math.prod(map(len, axes))) > MOST_CELLS:
        raise SpecError(f"{place} crosses to {count} cells; up to {MOST_CELLS} are allowed")
    for values in itertools.product(*axes):
        yield dict(zip(written, values, strict=True))
