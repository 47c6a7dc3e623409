"""Reads a Hugging Face config.json: its fields; for the benchmark's code the sizes of llama, mistral or gpt2."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdp_bench.catalog.model_entry import FAMILIES, ModelEntry, config_names
from fsdp_bench.spec.checked import build
from fsdp_bench.spec.errors import LONGEST_VALUE, SpecError, shortened, shown
from fsdp_bench.spec.files import read_document
from fsdp_bench.spec.model import ModelShape

_REQUIRED = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)
"""Fields that a config.json must have. The others have defaults."""

_ACTIVATIONS = {
    "llama": ("hidden_act", ("silu",)),
    "mistral": ("hidden_act", ("silu",)),
    "gpt2": ("activation_function", ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")),
}
_OTHER_MODULES = (
    "add_cross_attention",
    "is_encoder_decoder",
    "quantization_config",
    "vision_config",
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
    "kv_lora_rank",
    "num_nextn_predict_layers",
)
"""Keys of a config that describe modules which llama, mistral and gpt2 do not have."""
_MISTRAL_SLIDING_WINDOW = 4096
"""MistralConfig's default, used if the file does not set it."""
_MISTRAL_KEY_VALUE_HEADS = 8
"""MistralConfig's default, used if the file does not set it. LlamaConfig's default is the number of attention heads."""


def read_hf_config(path: Path) -> ModelShape:
    """Read the dimensions in a config.json, without its sliding window. Raises SpecError, naming file and fault."""
    config = _load(path)
    model_type = config.get("model_type")
    if model_type is None:
        raise SpecError(f"{path}: has no model_type; a Hugging Face config.json of {', '.join(FAMILIES)} has one")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise SpecError(f"{path}: model_type {shown(model_type)} is not built here; one of {', '.join(FAMILIES)}")
    try:
        _refuse_variants(config)
        fields = _common_fields(config)
        name = config.get("_name_or_path") or path.absolute().parent.name
        name = shortened(name, LONGEST_VALUE) if isinstance(name, str) else name
        entry = {"name": name, "family": model_type, "source": {"title": str(path), "date": ""}, **fields}
        read = build(ModelEntry, entry)
        if (reason := read.unsupported_because) is not None:
            raise SpecError(f"cannot be predicted or trained here: {reason}")
        return read.shape()
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from None


def read_config(path: Path) -> dict[str, Any]:
    """Return the fields of a Hugging Face config.json. Raises SpecError, naming the file, if it is none."""
    config = _load(path)
    if not isinstance(config.get("model_type"), str):
        raise SpecError(f"{path}: is not a Hugging Face config.json: it has no model_type")
    return config


def config_name(config: Mapping[str, Any], path: Path) -> str:
    """Return the name of a config.json's model: its own, else the folder's or the file's."""
    name = config.get("_name_or_path") or (path.absolute().parent.name if path.stem == "config" else path.stem)
    return shortened(name, LONGEST_VALUE) if isinstance(name, str) else path.stem


def read_sliding_window(path: Path) -> int | None:
    """Return a config.json's sliding window in tokens; None if there is none. Raises SpecError for a bad file."""
    config = _load(path)
    if config.get("model_type") != "mistral":
        return None
    window = config.get("sliding_window", _MISTRAL_SLIDING_WINDOW)
    if window is not None and (type(window) is not int or window < 1):
        raise SpecError(f"{path}: sliding_window {window!r} is not allowed; a positive number, or null")
    return window


def sliding_window_note(window: int) -> str:
    """Return the note for a sequence longer than the window: predictions do not model the window."""
    return (
        f"beyond {window} tokens the model's sliding window is not modelled: attention is predicted over all earlier"
        " tokens. flash_attention_2 with a window computes less, so the step takes less time; under sdpa Hugging Face"
        " passes a mask, which rules out the flash kernel: it takes more time, and memory for the mask"
    )


def _load(path: Path) -> dict[str, Any]:
    config = read_document(path, "JSON")
    if not isinstance(config, dict):
        raise SpecError(f"{path}: is not a Hugging Face config.json: not an object")
    return config


def _refuse_variants(config: dict[str, Any]) -> None:
    """Refuse settings that add or change modules without changing the dimensions that are read here."""
    field, known = _ACTIVATIONS[config["model_type"]]
    if config.get(field, known[0]) not in known:
        raise SpecError(f"{field} {shown(config[field])} is not built here; one of {', '.join(known)}")
    for field in _OTHER_MODULES:
        if config.get(field):
            raise SpecError(f"{field} is set, which is not built here")


def _common_fields(config: dict[str, Any]) -> dict[str, Any]:
    """Return the common fields that a config.json sets, and defaults of transformers for what it leaves out."""
    names = config_names(config["model_type"])
    fields = {field: config[name] for field, name in names.items() if config.get(name) is not None}
    if config["model_type"] == "gpt2":
        fields.setdefault("tie_word_embeddings", True)  # PretrainedConfig's default, which GPT-2's files leave out
        if isinstance(fields.get("hidden_size"), int):
            fields.setdefault("intermediate_size", 4 * fields["hidden_size"])  # GPT2MLP: n_inner is null
    if config["model_type"] == "mistral" and "num_key_value_heads" not in config:
        fields["num_key_value_heads"] = _MISTRAL_KEY_VALUE_HEADS
    if missing := [names[field] for field in _REQUIRED if field not in fields]:
        raise SpecError(f"has no {', '.join(missing)}")
    return fields
