"""Builds a Hugging Face model and a batch from the fields of its config.json."""

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn

from fsdp_bench.spec.errors import MachineError, SpecError, install_hint, shown
from fsdp_bench.spec.recording.config import PER_LAYER, ConfigClass, enough_layers, period
from fsdp_bench.train.models import flash_attn_package

ATTENTION = "attn_implementation"
"""The field of a config.json that chooses transformers' code of attention."""

AS_IN_TRAINING = {"use_cache": False}
"""TrainingArguments.use_cache: the Trainer of transformers 5 turns the cache of keys and values off."""


def build(config: Mapping[str, Any]) -> tuple[nn.Module, str]:
    """Return an initialized model and its class's name.

    Raises MachineError without transformers, SpecError for a config that it refuses.
    """
    uses_package = config.get(ATTENTION) == flash_attn_package.NAME and flash_attn_package.is_replaced()
    made = _config({name: value for name, value in config.items() if name != ATTENTION} if uses_package else config)
    import transformers

    architectures = config.get("architectures") or []
    name = architectures[0] if architectures else _causal_lm(transformers, made)
    kind = getattr(transformers, str(name), None)
    if kind is None:
        raise SpecError(f"architectures: transformers {transformers.__version__} has no {shown(name)}")
    if made.is_encoder_decoder and getattr(made, "decoder_start_token_id", None) is None:
        made.decoder_start_token_id = 0  # whichever: T5's _shift_right wants one
    try:
        model = kind._from_config(made)
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        raise SpecError(f"{name}: transformers cannot build it: {text}") from error
    if uses_package:
        flash_attn_package.use_package(model, str(name))
    return model, str(name)


def _causal_lm(transformers: Any, config: Any) -> str:
    try:
        kind = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError:
        raise SpecError(f"architectures: not given, and {type(config).__name__} has no causal language model") from None
    return str(kind.__name__)


def config_class(model_type: str) -> ConfigClass:
    """Return what a model_type's class does with a config.json.

    Raises MachineError without transformers, SpecError for an unknown model_type.
    """
    made = _config({"model_type": model_type})
    patterns = {name: list(getattr(made, name)) for name in PER_LAYER if getattr(made, name, None)}
    part = (getattr(made, "rope_parameters", None) or {}).get("partial_rotary_factor")
    return ConfigClass(
        defaults={**{field.name: _plain(field) for field in dataclasses.fields(made)}, "partial_rotary_factor": part},
        other_names={other: name for other, name in made.attribute_map.items() if other != name},
        patterns={name: kinds[: period(kinds)] for name, kinds in patterns.items()},
    )


def _plain(field: dataclasses.Field[Any]) -> Any:
    """Return a field's default, if JSON can express it."""
    value = field.default_factory() if callable(field.default_factory) else field.default
    return value if isinstance(value, str | int | float | bool | list | dict) else None


def layers_of(config: Mapping[str, Any]) -> tuple[dict[str, int], int]:
    """Return the numbers of blocks, by what their list's name contains (``decoder``, or none), and how many to record.

    Raises SpecError for a config that transformers does not know or refuses.
    """
    made = _config(config)
    count = made.num_hidden_layers
    counts = {"": count}
    if (decoder := getattr(made, "num_decoder_layers", None)) is not None:
        counts["decoder"] = decoder
    lists = [getattr(made, name) for name in PER_LAYER if getattr(made, name, None)]
    kinds = [" ".join(map(str, each)) for each in zip(*lists, strict=True)]
    first = int(getattr(made, "first_k_dense_replace", 0) or 0) + (2 if decoder is not None else 1)
    return counts, min(enough_layers(kinds, first), *counts.values())


def learned_positions(model: nn.Module) -> int | None:
    """Return for how many positions a model has learned an embedding; None where positions are computed."""
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if isinstance(module, nn.Embedding) and (last == "wpe" or "position" in last):
            return module.num_embeddings
    return None


def sliding_window_of(config: Mapping[str, Any]) -> int | None:
    """Return how many tokens some layers of a model see; None where all see everything."""
    made = _config(config)
    window, kinds = getattr(made, "sliding_window", None), getattr(made, "layer_types", None)
    has_window = isinstance(window, int) and (kinds is None or "sliding_attention" in kinds)
    return window if has_window else None


def with_layers(config: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Return a config.json with so many layers, in an encoder and in a decoder."""
    made = _config(config)
    names = getattr(made, "attribute_map", {})
    fields = {**config, names.get("num_hidden_layers", "num_hidden_layers"): count}
    if getattr(made, "num_decoder_layers", None) is not None:
        fields["num_decoder_layers"] = count
    for name in PER_LAYER:
        if getattr(made, name, None):
            fields[name] = list(getattr(made, name))[:count]
    return fields


def _config(config: Mapping[str, Any]) -> Any:
    """Return transformers' config.

    Raises MachineError without transformers, SpecError for a config that it refuses.
    """
    try:
        import transformers
    except ImportError:
        raise MachineError(f"a Hugging Face model's code needs transformers: {install_hint('hf')}") from None
    fields = {**config, **AS_IN_TRAINING}
    model_type = fields.pop("model_type", None)
    try:
        return transformers.AutoConfig.for_model(model_type, **fields)
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        raise SpecError(f"model_type {shown(model_type)}: transformers refuses it: {text}") from error


def batch_of(model: Any, batch: int, length: int, device: str | None = None) -> dict[str, torch.Tensor]:
    """Return a batch as a data loader makes it: full sequences, so that there is no attention mask."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    config, integers = model.config, partial(torch.zeros, dtype=torch.int64, device=device)
    if "pixel_values" in _parameters_of(model):
        size = config.image_size if isinstance(config.image_size, int) else config.image_size[0]
        pixels = torch.empty(batch, config.num_channels, size, size, dtype=torch.float32, device=device)
        return {"pixel_values": pixels, "labels": integers(batch)}
    return {"input_ids": integers(batch, length), "labels": integers(batch, length)}


def largest_integers(model: Any) -> dict[str, int]:
    """Return how many values the integers of a batch can have, by name."""
    config = model.config
    is_image = "pixel_values" in _parameters_of(model)
    vocab_size = 0 if is_image else config.get_text_config().vocab_size
    return {"input_ids": vocab_size, "labels": config.num_labels if is_image else vocab_size, "pixel_values": 0}


def import_code(config: Mapping[str, Any]) -> None:
    """Import the code of a config.json, before forks. Raises MachineError, SpecError as ``build``."""
    with torch.device("meta"):
        build(with_layers(config, 1))


def _parameters_of(model: nn.Module) -> set[str]:
    return set(inspect.signature(model.forward).parameters)


@contextmanager
def unpacked_sequences() -> Iterator[None]:
    """Let transformers see on tensors without data what it sees on real ones: sequences that are not packed.

    It takes fake tensors for tracing (utils/import_utils.py, is_tracing), where it cannot look at position ids. Then
    masking_utils.find_packed_sequence_indices always returns a mask, and attention runs another kernel. The flash-attn
    package is replaced besides, by what needs no GPU (flash_attn_package.py).
    """
    try:
        from transformers import masking_utils
    except ImportError:
        yield
        return
    original = masking_utils.find_packed_sequence_indices

    def never_packed(position_ids: torch.Tensor) -> None:
        original(position_ids)

    with (
        mock.patch.object(masking_utils, "find_packed_sequence_indices", never_packed),
        flash_attn_package.flash_attn_replaced(),
    ):
        yield
