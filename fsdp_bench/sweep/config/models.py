"""The models of a sweep file: ``model`` and ``params`` of a cell, and the tables [models.NAME].

A table has the dimensions of a benchmark model, or names its code by ``hf_config``, ``model`` or ``module``. A
subprocess, which imports torch, says what the code builds; answers about Hugging Face's code are kept.
"""

import contextlib
import hashlib
import os
import re
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

import msgspec

from fsdp_bench.catalog.hf_config import read_config
from fsdp_bench.catalog.ladder import all_sizes, nearest_size
from fsdp_bench.catalog.loader import BUILT_IN
from fsdp_bench.plan.defaults import read_adapters
from fsdp_bench.plan.recording import kept_folder
from fsdp_bench.spec.codec import from_file, to_builtins, to_json
from fsdp_bench.spec.errors import MachineError, SpecError, install_hint, nearest, shown
from fsdp_bench.spec.files import write_atomically
from fsdp_bench.spec.model import Family, ModelShape
from fsdp_bench.spec.model_code import ModelCode, TrainedModel
from fsdp_bench.spec.subprocesses.dry_run import CodeToBuild, UserModule
from fsdp_bench.spec.subprocesses.model_code import DescriptionAnswer
from fsdp_bench.spec.subprocesses.own_python import NoAnswer, ask
from fsdp_bench.spec.units import format_count, parse_count
from fsdp_bench.sweep.config.reading import check_keys, convert
from fsdp_bench.sweep.machine import Machine, package_version, torch_version
from fsdp_bench.version import __version__

CODE_KEYS = ("hf_config", "model", "module")
"""Keys that name a model's code. A table has one of them, or the dimensions of a benchmark model."""

ADAPTERS = ("lora", "qlora")
"""Keys that put PEFT's adapters into Hugging Face's code."""

MORE_KEYS = {"hf_config": ("code", *ADAPTERS), "model": ("code", *ADAPTERS), "module": ("transformer_block", "folder")}
"""Further keys that go with each."""

MODEL_KEYS = ("model", "params", "family", "vocab_size")

BYTES_PER_PARAMETER = 16
"""Bytes of an fp32 parameter, its gradient and two Adam states. ``"25% of GPU"`` counts these."""

GPT2_POSITIONS = 1024
"""Learned positions of gpt2. For a longer sequence it has as many as the sequence is long."""

_PERCENT_OF_GPU = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*% of (?:GPU|card)\s*$")


def read_models(tables: dict[str, Any], folder: Path) -> dict[str, TrainedModel]:
    """Read the tables [models.NAME]. ``folder`` is the sweep file's."""
    shapes: dict[str, TrainedModel] = {}
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise SpecError(f"models.{name}: must be a table, written [models.{name}]")
        if any(key in table for key in CODE_KEYS):
            continue
        fields = {"name": name, **table}
        check_keys(f"[models.{name}] ", fields, (*ModelShape.__struct_fields__, *CODE_KEYS))
        if "num_attention_heads" in fields:
            fields.setdefault("num_key_value_heads", fields["num_attention_heads"])
        fields.setdefault("tie_word_embeddings", fields.get("family") == "gpt2")
        fields.setdefault("max_position_embeddings", 1024)
        shapes[name] = convert(fields, ModelShape, f"[models.{name}]")
    by_code = {name: table for name, table in tables.items() if name not in shapes}
    return shapes | read_model_codes(by_code, folder)


def shape_of(cell: dict[str, Any], models: dict[str, TrainedModel], machine: Machine) -> TrainedModel:
    """Return the model of a cell. ``model`` names a table [models.NAME], ``params`` a size of the size ladder.

    A gpt2 model has as many learned positions as the cell's sequence is long, at least GPT2_POSITIONS.
    """
    if "model" in cell:
        name = cell["model"]
        if not isinstance(name, str) or name not in models:
            known = ", ".join(models) or "none is defined"
            raise SpecError(
                f"model: {shown(name)} is not defined; [models.*] of this file: {known}{nearest(str(name), models)}"
            )
        if "params" in cell:
            raise SpecError("model and params both name a size; keep one")
        return models[name]
    if "params" not in cell:
        raise SpecError('names no model; give params = "10M" (the ladder) or model = a table [models.NAME]')
    return _ladder_shape(cell, Family(cell.get("family", "llama")), machine)


def is_percent_of_gpu(params: Any) -> bool:
    """Return whether ``params`` is a size like ``"25% of GPU"``."""
    return _PERCENT_OF_GPU.match(str(params)) is not None


def _ladder_shape(cell: dict[str, Any], family: Family, machine: Machine) -> ModelShape:
    vocab_size, positions = cell.get("vocab_size"), None
    sequence_length = cell.get("sequence_length", 0)
    if family is Family.GPT2 and isinstance(sequence_length, int) and sequence_length > GPT2_POSITIONS:
        positions = sequence_length
    if vocab_size is not None and (isinstance(vocab_size, bool) or not isinstance(vocab_size, int) or vocab_size < 2):
        raise SpecError(f"vocab_size: {shown(vocab_size)} is not allowed; 2 or more")
    percent = _PERCENT_OF_GPU.match(str(cell["params"]))
    if not percent:
        return nearest_size(family, parse_count(cell["params"], "params"), vocab_size, positions)
    if not machine.gpus:
        raise SpecError(f"params: {shown(cell['params'])} needs a GPU; on a CPU give a count like '10M'")
    # The largest size of the ladder that is not above the target.
    target = machine.gpus[0].memory_bytes * float(percent.group(1)) / 100 / BYTES_PER_PARAMETER
    fitting = [shape for shape in all_sizes(family, vocab_size, positions) if shape.num_parameters <= target]
    if not fitting:
        raise SpecError(
            f"params: {shown(cell['params'])} is {format_count(target)} parameters, below the ladder's smallest"
        )
    return fitting[-1]


# -- models that are given by their code ------------------------------------------------------------------------------


def read_model_codes(tables: dict[str, dict[str, Any]], folder: Path) -> dict[str, ModelCode]:
    """Read the tables [models.NAME] that name a model's code; ``folder`` is the sweep file's.

    Raises SpecError, naming table and key, also if transformers is missing or code fails; MachineError without torch.
    """
    specs = {name: _code_of(f"[models.{name}]", table, folder) for name, table in tables.items()}
    found: dict[str, ModelCode] = {}
    for (name, spec), answer in zip(specs.items(), describe(list(specs.values())), strict=True):
        if answer.described is None:
            raise SpecError(f"[models.{name}] {answer.error}")
        source = spec.module and hashlib.sha256(source_of(spec.module).encode()).hexdigest()[:16]
        found[name] = msgspec.structs.replace(answer.described, name=name, source=source)
    return found


def _code_of(place: str, table: dict[str, Any], folder: Path) -> CodeToBuild:
    given = [key for key in CODE_KEYS if key in table]
    if len(given) > 1:
        raise SpecError(f"{place} {' and '.join(given)} each name the code; keep one")
    (key,) = given
    check_keys(f"{place} ", table, (key, *MORE_KEYS[key]))
    for name, value in table.items():
        if not isinstance(value, str) and name not in ADAPTERS:
            raise SpecError(f"{place} {name}: {shown(value)} is not allowed; a text")
    if table.get("code", "huggingface") != "huggingface":
        raise SpecError(f"{place} code: {shown(table['code'])} is not allowed; huggingface")
    try:
        if key == "module":
            where = str(folder / table.get("folder", "."))
            module = UserModule(function=table["module"], block=table.get("transformer_block"), folder=where)
            return CodeToBuild(module=module)
        config = BUILT_IN.model(table[key]).hf_config() if key == "model" else read_config(folder / table[key])
        return CodeToBuild(config=config, lora=read_adapters(table.get("lora"), table.get("qlora")))
    except SpecError as error:
        raise SpecError(f"{place} {error}") from None


def describe(specs: Sequence[CodeToBuild]) -> list[DescriptionAnswer]:
    """Return what each code builds without data, or why it cannot. Raises MachineError without torch."""
    if specs and torch_version() is None:
        raise MachineError(f"a model that is given by its code needs torch: {install_hint('train')}")
    found: dict[int, DescriptionAnswer] = {}
    for index, spec in enumerate(specs):
        if (path := _kept(spec)) is not None and (described := from_file(path, ModelCode)) is not None:
            found[index] = DescriptionAnswer(described=described)
    missing = [index for index in range(len(specs)) if index not in found]
    for index, answer in zip(missing, _ask([specs[index] for index in missing]) if missing else (), strict=True):
        found[index] = answer
        if (path := _kept(specs[index])) is not None and answer.described is not None:
            with contextlib.suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(path, to_json(answer.described))
    return [found[index] for index in range(len(specs))]


def _ask(specs: list[CodeToBuild]) -> list[DescriptionAnswer]:
    try:
        return ask("fsdp_bench.train.models.describe", list[DescriptionAnswer], str(os.getpid()), request=specs)
    except NoAnswer as error:
        raise MachineError(f"models: their code ended the process that builds them: {error}") from None


def _kept(spec: CodeToBuild) -> Path | None:
    """Return the file in which an answer is kept; None for a user's code, which may change."""
    folder = kept_folder()
    if folder is None or spec.config is None:
        return None
    versions = [__version__, *map(package_version, ("torch", "transformers"))]
    digest = hashlib.sha256(msgspec.json.encode([to_builtins(spec), versions], order="sorted")).hexdigest()[:24]
    return folder / f"{digest}.description.json"


def source_of(module: UserModule) -> str:
    """Return the text of the file with the user's function; nothing if it is no file of Python's."""
    name = module.function.partition(":")[0]
    found = _find(name, [module.folder, *sys.path])
    if found is None:
        raise SpecError(f"module: cannot import {name}")
    if found.origin is None or not found.origin.endswith(".py"):
        return ""
    try:
        return Path(found.origin).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise SpecError(f"module: {found.origin}: cannot be read: {error.strerror}") from None


def _find(module: str, folders: list[str]) -> ModuleSpec | None:
    """Return the spec of a module without importing its packages."""
    found, where = None, list(folders)
    parts = module.split(".")
    for index in range(len(parts)):
        found = PathFinder.find_spec(".".join(parts[: index + 1]), where)
        if found is None:
            return None
        where = list(found.submodule_search_locations or [])
    return found
