"""The model that a cell of a sweep trains."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from fsdp_bench.catalog.ladder import all_sizes, nearest_size
from fsdp_bench.spec.errors import SpecError, nearest, shown
from fsdp_bench.spec.model import Family, ModelShape
from fsdp_bench.spec.model_code import TrainedModel
from fsdp_bench.spec.units import format_count, parse_count
from fsdp_bench.sweep.config.model_code import CODE_KEYS, read_model_codes
from fsdp_bench.sweep.config.reading import check_keys, convert
from fsdp_bench.sweep.machine import Machine

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
