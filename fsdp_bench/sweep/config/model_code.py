"""[models.NAME] with ``hf_config``, ``model`` or ``module``: a model that is given by its code."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from fsdp_bench.catalog.loader import BUILT_IN
from fsdp_bench.spec.codec import read_document
from fsdp_bench.spec.errors import SpecError, shown
from fsdp_bench.spec.lora import QUANTIZED, LoRA, parse_lora
from fsdp_bench.spec.model_code import ModelCode
from fsdp_bench.spec.subprocesses.description import DescriptionSpec
from fsdp_bench.spec.subprocesses.dry_run import UserModule
from fsdp_bench.sweep.config.reading import check_keys, convert
from fsdp_bench.sweep.describing import describe
from fsdp_bench.sweep.module_names import check_names, source_of

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


def _fields(place: str, table: dict[str, Any], folder: Path) -> tuple[dict[str, Any], DescriptionSpec]:
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
            return _of_function(module), DescriptionSpec(module=module)
        config, lora = _config(key, table[key], folder), _adapters(table)
        return {"code": "huggingface", "config": config, "lora": lora}, DescriptionSpec(config=config, lora=lora)
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
