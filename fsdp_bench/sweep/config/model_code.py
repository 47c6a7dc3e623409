"""[models.NAME] with ``hf_config``, ``model`` or ``module``: a model that is given by its code.

A subprocess, which imports torch, says what the code builds; answers about Hugging Face's code are kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from fsdp_bench.catalog.loader import BUILT_IN
from fsdp_bench.plan.recording import kept_folder
from fsdp_bench.spec.codec import to_builtins
from fsdp_bench.spec.errors import MachineError, SpecError, install_hint, shown
from fsdp_bench.spec.files import read_document, write_atomically
from fsdp_bench.spec.lora import QUANTIZED, LoRA, parse_lora
from fsdp_bench.spec.model_code import ModelCode
from fsdp_bench.spec.subprocesses.dry_run import CodeToBuild, UserModule
from fsdp_bench.spec.subprocesses.model_code import Description, DescriptionAnswer
from fsdp_bench.spec.subprocesses.own_python import NoAnswer, ask
from fsdp_bench.sweep.config.reading import check_keys, convert
from fsdp_bench.sweep.machine import package_version, torch_version
from fsdp_bench.sweep.module_names import check_names, source_of
from fsdp_bench.version import __version__

CODE_KEYS = ("hf_config", "model", "module")
"""Keys that name a model's code. A table has one of them, or the dimensions of a benchmark model."""

ADAPTERS = {"lora": None, "qlora": QUANTIZED}
"""Keys that put PEFT's adapters into Hugging Face's code, and how these store the frozen weights."""

MORE_KEYS = {
    "hf_config": ("code", *ADAPTERS),
    "model": ("code", *ADAPTERS),
    "module": ("transformer_block", "folder"),
}
"""Further keys that go with each."""


def read_model_codes(tables: dict[str, dict[str, Any]], folder: Path) -> dict[str, ModelCode]:
    """Read the tables [models.NAME] that name a model's code. ``folder`` is the sweep file's.

    Raises:
        SpecError: naming the table and the key; also if transformers is missing, or the code fails.
        MachineError: if torch is missing.
    """
    named = {name: _fields(f"[models.{name}]", table, folder) for name, table in tables.items()}
    specs = [spec for _, spec in named.values()]
    found: dict[str, ModelCode] = {}
    for (name, (fields, _)), answer in zip(named.items(), describe(specs), strict=True):
        place = f"[models.{name}]"
        if answer.description is None:
            raise SpecError(f"{place} {answer.error}")
        built = msgspec.structs.asdict(answer.description)
        found[name] = convert({"name": name, **fields, **built}, ModelCode, place)
    return found


def _fields(place: str, table: dict[str, Any], folder: Path) -> tuple[dict[str, Any], CodeToBuild]:
    """Return the fields of ModelCode that a table gives, and the code to describe."""
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
            module = _users_module(table, folder)
            return _of_function(module), CodeToBuild(module=module)
        config, lora = _config(key, table[key], folder), _adapters(table)
        return {"code": "huggingface", "config": config, "lora": lora}, CodeToBuild(config=config, lora=lora)
    except SpecError as error:
        raise SpecError(f"{place} {error}") from None


def _config(key: str, value: str, folder: Path) -> dict[str, Any]:
    if key == "model":
        return BUILT_IN.model(value).hf_config()
    config = read_document(folder / value, "JSON")
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise SpecError(f"hf_config: {folder / value}: is not a Hugging Face config.json: it has no model_type")
    return config


def _adapters(table: dict[str, Any]) -> LoRA | None:
    given = [name for name in ADAPTERS if name in table]
    if len(given) > 1:
        raise SpecError("lora and qlora: keep one")
    return parse_lora(table[given[0]], given[0], ADAPTERS[given[0]]) if given else None


def _users_module(table: dict[str, Any], folder: Path) -> UserModule:
    where = str(folder / table.get("folder", "."))
    module = UserModule(function=table["module"], block=table.get("transformer_block"), folder=where)
    check_names(module)
    return module


def _of_function(module: UserModule) -> dict[str, Any]:
    return {
        "code": "module",
        "function": module.function,
        "transformer_block": module.block,
        "folder": module.folder,
        "source": hashlib.sha256(source_of(module).encode()).hexdigest()[:16],
    }


def describe(specs: Sequence[CodeToBuild]) -> list[DescriptionAnswer]:
    """Return what each model's code builds, or why it builds nothing. They are built without data, which takes seconds.

    Raises:
        MachineError: if torch is missing, or the code ends the process.
    """
    if specs and torch_version() is None:
        raise MachineError(f"a model that is given by its code needs torch: {install_hint('train')}")
    found = {index: known for index, spec in enumerate(specs) if (known := _kept(spec)) is not None}
    missing = [index for index in range(len(specs)) if index not in found]
    if missing:
        for index, answer in zip(missing, _ask([specs[index] for index in missing]), strict=True):
            found[index] = answer
            _keep(specs[index], answer)
    return [found[index] for index in range(len(specs))]


def _ask(specs: list[CodeToBuild]) -> list[DescriptionAnswer]:
    try:
        return ask("fsdp_bench.train.models.describe", list[DescriptionAnswer], str(os.getpid()), request=specs)
    except NoAnswer as error:
        raise MachineError(f"models: their code ended the process that builds them: {error}") from None


def _kept(spec: CodeToBuild) -> DescriptionAnswer | None:
    """Return the answer of an earlier process; None for a user's code, which may have changed."""
    path = _path(spec)
    if path is not None:
        with contextlib.suppress(OSError, msgspec.DecodeError):
            return DescriptionAnswer(description=msgspec.json.decode(path.read_bytes(), type=Description))
    return None


def _keep(spec: CodeToBuild, answer: DescriptionAnswer) -> None:
    path = _path(spec)
    if path is not None and answer.description is not None:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, msgspec.json.encode(answer.description))


def _path(spec: CodeToBuild) -> Path | None:
    folder = kept_folder()
    return folder and folder / f"{_digest(spec)}.description.json" if spec.config is not None else None


def _digest(spec: CodeToBuild) -> str:
    versions = [__version__, *map(package_version, ("torch", "transformers"))]
    return hashlib.sha256(msgspec.json.encode([to_builtins(spec), versions], order="sorted")).hexdigest()[:24]
