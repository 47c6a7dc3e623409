"""A sweep file to trials.

[run]        how each trial is run: steps, warm-up, time limit, device, memory_limit, launcher
[grid]       lists are crossed, the last key varying fastest; a single value holds for all
[[include]]  further cells; what [grid] gives as a single value holds here too, lists are crossed
[[exclude]]  cells that are not run, each with its reason
[models.X]   a model of one's own, by Hugging Face's names; named in the grid as model = "X"
"""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fsdp_bench.spec.errors import MachineError, SpecError, SweepFileError
from fsdp_bench.spec.model import Family, ModelShape
from fsdp_bench.spec.record import Device, RunPlan, TrialSpec
from fsdp_bench.spec.setup import TrainSetup, impossible
from fsdp_bench.spec.units import parse_bytes
from fsdp_bench.sweep.machine import Machine
from fsdp_bench.sweep.shapes import MODEL_KEYS, read_models, shape_of
from fsdp_bench.sweep.trial import SweepPlan, Trial, trial_id
from fsdp_bench.sweep.words import FIELD_ALIASES, check_keys, convert

_SETUP_KEYS = TrainSetup.__struct_fields__
_GRID_KEYS = (*MODEL_KEYS, *_SETUP_KEYS, *FIELD_ALIASES)
_RUN_KEYS = ("name", "device", "launcher", "memory_limit", *RunPlan.__struct_fields__)
_TOP_KEYS = ("run", "grid", "include", "exclude", "models")

Cell = dict[str, Any]


def read_sweep(path: Path, machine: Machine) -> SweepPlan:
    """Read a sweep file and resolve it for this machine.

    Raises:
        SweepFileError: one line: the file, the place in it, what is allowed.
        MachineError: when the file asks for a device that this machine lacks.
    """
    try:
        text = path.read_text(encoding="utf-8")
        document = tomllib.loads(text)
    except FileNotFoundError:
        raise SweepFileError(
            f"{path}: no such file; sweep files end in .toml, the shipped ones are in sweeps/"
        ) from None
    except OSError as error:
        raise SweepFileError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SweepFileError(f"{path}: not valid TOML: {error}") from None
    try:
        return _resolve(document, text, path.stem, machine)
    except SpecError as error:
        raise SweepFileError(f"{path}: {error}") from None


def _resolve(document: dict[str, Any], text: str, stem: str, machine: Machine) -> SweepPlan:
    check_keys("", document, _TOP_KEYS)
    run = _table(document, "run")
    check_keys("[run] ", run, _RUN_KEYS)
    name = _name(run, stem)
    device = _device(run, machine)
    plan = _run_plan(run)
    models = read_models(_table(document, "models"))
    excludes = _excludes(document, models, machine)
    trials: dict[str, Trial] = {}
    for place, cell in _cells(document):
        try:
            shape, setup = _build(cell, models, machine)
        except SpecError as error:
            raise SpecError(f"{place} {error}") from None
        spec = _spec(shape, setup, plan, device)
        reason = _excluded(shape, setup, excludes) or _impossible(setup, plan, device, machine)
        trials.setdefault(spec.id, Trial(spec=spec, skip_reason=reason))
    if all(trial.skip_reason for trial in trials.values()):
        reasons = sorted({trial.skip_reason or "" for trial in trials.values()})
        raise SpecError(f"no trial can run here: {reasons[0] if reasons else 'the grid is empty'}")
    launcher = _one_of("[run] launcher", run.get("launcher", "fork"), ("fork", "torchrun"))
    return SweepPlan(name=name, launcher=launcher, device=device, trials=tuple(trials.values()), source=text)


def _table(document: dict[str, Any], key: str) -> dict[str, Any]:
    value = document.get(key, {})
    if not isinstance(value, dict):
        raise SpecError(f"{key}: must be a table, written [{key}]")
    return value


def _tables(document: dict[str, Any], key: str) -> list[dict[str, Any]]:
    value = document.get(key, [])
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise SpecError(f"{key}: must be a list of tables, each written [[{key}]]")
    return value


def _one_of(field: str, value: Any, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise SpecError(f"{field}: {value!r} is not allowed; one of {', '.join(allowed)}")
    return str(value)


def _name(run: dict[str, Any], stem: str) -> str:
    name = run.get("name", stem)
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise SpecError(f"[run] name: {name!r} is not allowed; letters, digits, '.', '_' and '-', for a folder's name")
    return name


def _device(run: dict[str, Any], machine: Machine) -> Device:
    wanted = _one_of("[run] device", run.get("device", "auto"), ("auto", "cpu", "cuda"))
    if wanted == "cuda" and not machine.gpus:
        raise MachineError(
            "[run] device: 'cuda' was asked for and this machine shows no GPU (NVML, CUDA_VISIBLE_DEVICES);"
            " 'auto' would use the CPU, `fsdp-bench doctor` says what is here"
        )
    return "cuda" if wanted == "cuda" or (wanted == "auto" and machine.gpus) else "cpu"


def _run_plan(run: dict[str, Any]) -> RunPlan:
    fields = {key: value for key, value in run.items() if key in RunPlan.__struct_fields__}
    if "memory_limit" in run:
        fields["memory_limit_bytes"] = parse_bytes(run["memory_limit"], "[run] memory_limit")
    return convert(fields, RunPlan, "[run]")


def _cells(document: dict[str, Any]) -> Iterator[tuple[str, Cell]]:
    """Yield every cell with the place in the file that it comes from, in the order of the file."""
    grid = _canonical("[grid] ", _table(document, "grid"))
    yield from (("[grid]", cell) for cell in _cross(grid, "[grid]"))
    single = {key: value for key, value in grid.items() if not isinstance(value, list)}
    listed = {key for key, value in grid.items() if isinstance(value, list)}
    for number, table in enumerate(_tables(document, "include"), 1):
        place = f"[[include]] {number}"
        extra = _canonical(f"{place} ", table)
        if {"model", "params"} & set(extra):  # either names the model
            listed = listed - {"model", "params"}
        missing = sorted(listed - set(extra))
        if missing:
            raise SpecError(f"{place} does not say {missing[0]!r}, for which [grid] has several values")
        merged = {**single, **extra}
        if "params" in extra:
            merged.pop("model", None)
        yield from ((place, cell) for cell in _cross(merged, place))


def _canonical(place: str, table: dict[str, Any]) -> dict[str, Any]:
    check_keys(place, table, _GRID_KEYS)
    renamed: dict[str, Any] = {}
    for key, value in table.items():
        target = FIELD_ALIASES.get(key, key)
        if target in renamed:
            raise SpecError(f"{place}{key!r} and {target!r} are the same thing; keep one")
        renamed[target] = value
    return renamed


def _cross(table: dict[str, Any], place: str) -> Iterator[Cell]:
    for key, value in table.items():
        if value == []:
            raise SpecError(f"{place} {key}: an empty list leaves no cell; give at least one value")
    if not table:
        return
    axes = [value if isinstance(value, list) else [value] for value in table.values()]
    for values in itertools.product(*axes):
        yield dict(zip(table, values, strict=True))


def _build(cell: Cell, models: dict[str, ModelShape], machine: Machine) -> tuple[ModelShape, TrainSetup]:
    """Turn a cell's words into a model and a setup."""
    setup_fields = {key: value for key, value in cell.items() if key in _SETUP_KEYS}
    if setup_fields.get("world_size") == "gpus":
        setup_fields["world_size"] = max(len(machine.gpus), 1)
    if setup_fields.get("max_grad_norm") == "none":
        setup_fields["max_grad_norm"] = None
    setup = convert(setup_fields, TrainSetup, "")
    shape = shape_of(cell, models, machine)
    if shape.family is Family.GPT2 and setup.sequence_length > shape.max_position_embeddings:
        raise SpecError(
            f"sequence_length: {setup.sequence_length} is longer than {shape.name}'s learned positions,"
            f" max_position_embeddings {shape.max_position_embeddings}"
        )
    return shape, setup


def _spec(shape: ModelShape, setup: TrainSetup, run: RunPlan, device: Device) -> TrialSpec:
    return TrialSpec(id=trial_id(shape, setup, run, device), model=shape, setup=setup, run=run, device=device)


def _excludes(
    document: dict[str, Any], models: dict[str, ModelShape], machine: Machine
) -> list[tuple[str, dict[str, list[Any]]]]:
    """Read each [[exclude]] into its reason and, by field, the parsed values that it matches."""
    excludes = []
    for number, table in enumerate(_tables(document, "exclude"), 1):
        place = f"[[exclude]] {number}"
        table = dict(table)
        reason = table.pop("reason", None)
        if not isinstance(reason, str) or not reason.strip():
            raise SpecError(f"{place} needs a reason, which the skipped trials' records carry")
        words = _canonical(f"{place} ", table)
        matches: dict[str, list[Any]] = {}
        for key, value in words.items():
            values = value if isinstance(value, list) else [value]
            matches[key] = [_parsed(place, key, word, models, machine) for word in values]
        excludes.append((reason, matches))
    return excludes


def _parsed(place: str, key: str, word: Any, models: dict[str, ModelShape], machine: Machine) -> Any:
    if key == "family":
        return Family(word)
    if key == "vocab_size":
        return word
    if key in ("model", "params"):
        return shape_of({key: word}, models, machine).num_parameters
    fields = {key: word, **({"world_size": word, "strategy": "HYBRID_SHARD"} if key == "shard_size" else {})}
    return getattr(convert(fields, TrainSetup, place), key)


def _excluded(shape: ModelShape, setup: TrainSetup, excludes: list[tuple[str, dict[str, list[Any]]]]) -> str | None:
    for reason, matches in excludes:
        if all(_field(shape, setup, key) in values for key, values in matches.items()):
            return f"excluded: {reason}"
    return None


def _field(shape: ModelShape, setup: TrainSetup, key: str) -> Any:
    if key in ("model", "params"):
        return shape.num_parameters
    return getattr(shape, key) if key in ("family", "vocab_size") else getattr(setup, key)


def _impossible(setup: TrainSetup, run: RunPlan, device: Device, machine: Machine) -> str | None:
    if device == "cuda" and setup.world_size > len(machine.gpus):
        return f"world size {setup.world_size} needs as many GPUs; this machine has {len(machine.gpus)}"
    if device == "cpu" and run.memory_limit_bytes is not None and setup.compiles:
        return "a CPU's memory_limit follows operators, which compiled code does not call"
    return impossible(setup, device)
