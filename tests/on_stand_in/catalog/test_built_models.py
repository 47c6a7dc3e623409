"""Every model of models.toml, built by transformers from hf_config(): the published count, and no misspelt field."""

import dataclasses
from typing import Any

import pytest

from fsdp_bench.catalog.loader import models
from fsdp_bench.catalog.model_entry import ARCHITECTURES, COMMON_FIELDS, ModelEntry, config_names

torch = pytest.importorskip("torch", reason="models are built with torch")
transformers = pytest.importorskip("transformers", reason="models are built with Hugging Face's transformers")

EVERY = pytest.mark.parametrize("entry", models(), ids=lambda entry: entry.name)

ANYWHERE = {"model_type", "architectures", "num_labels", "tie_word_embeddings", "head_dim"}
"""Not fields of every configuration class: the base class takes them, and attention reads head_dim where it is set."""


def config_of(entry: ModelEntry) -> Any:
    """Return the configuration, by the class that AutoConfig finds for the model_type."""
    if entry.family not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {entry.family}; 5.23 has")
    return transformers.AutoConfig.for_model(**entry.hf_config())


def num_checkpoint_elements(model: Any) -> int:
    """Return the number of elements that a checkpoint holds: parameters, a tied one once, and saved buffers."""
    saved = model.state_dict().keys()
    buffers = sum(buffer.numel() for name, buffer in model.named_buffers() if name in saved)
    return buffers + sum(parameter.numel() for parameter in model.parameters())


@EVERY
def test_transformers_builds_the_published_number_of_parameters(entry: ModelEntry) -> None:
    """Published: safetensors metadata or a printed count; a part of a model has none, and is only built."""
    config = config_of(entry)
    with torch.device("meta"):
        model = getattr(transformers, config.architectures[0])(config)
    built = num_checkpoint_elements(model)
    if entry.family == "t5" and not entry.tie_word_embeddings and config.tie_word_embeddings:
        # configuration_t5.py of transformers 5 ties the head always; the files of T5 v1.1 and Flan-T5 hold it apart.
        built += config.vocab_size * config.d_model
    assert entry.num_parameters in (built, None)


@pytest.mark.parametrize(
    ("name", "vision", "published"),
    [
        ("Gemma-3-4B-text", "gemma3", 4_300_079_472),
        ("Gemma-3-12B-text", "gemma3", 12_187_325_040),
        ("Gemma-3-27B-text", "gemma3", 27_432_406_640),
        ("Llama-4-Scout-text", "llama4", 108_641_793_536),
    ],
)
def test_a_language_model_and_its_vision_encoder_have_the_published_count(
    name: str, vision: str, published: int
) -> None:
    """Published: safetensors metadata of google/gemma-3-4b-pt, -12b-pt, -27b-pt and meta-llama/Llama-4-Scout-17B-16E.

    The sizes of the vision encoders are those of the vision_config of these repositories.
    """
    (entry,) = (entry for entry in models() if entry.name == name)
    config_of(entry)
    config = transformers.AutoConfig.for_model(vision, text_config=entry.hf_config(), vision_config=VISION[vision])
    with torch.device("meta"):
        model = {"gemma3": "Gemma3ForConditionalGeneration", "llama4": "Llama4ForConditionalGeneration"}[vision]
        built = getattr(transformers, model)(config)
    assert num_checkpoint_elements(built) == published


VISION = {
    "gemma3": {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "image_size": 896,
        "patch_size": 14,
        "vision_use_head": False,
    },
    "llama4": {
        "model_type": "llama4_vision_model",
        "hidden_size": 1408,
        "intermediate_size": 5632,
        "num_hidden_layers": 34,
        "num_attention_heads": 16,
        "image_size": 336,
        "patch_size": 14,
        "projector_input_dim": 4096,
        "projector_output_dim": 4096,
        "vision_output_dim": 4096,
    },
}


@EVERY
def test_every_field_is_one_of_the_configuration_class_and_keeps_its_value(entry: ModelEntry) -> None:
    """A misspelt field would be stored by transformers and ignored by its code."""
    config = config_of(entry)
    known = {field.name for field in dataclasses.fields(config)} | set(config.attribute_map) | ANYWHERE
    for name, value in entry.hf_config().items():
        assert name in known, name
        if name != "tie_word_embeddings" or entry.family != "t5":  # T5Config: tied always
            assert getattr(config, name) == value, name


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_the_names_of_the_common_fields_are_those_of_transformers(model_type: str) -> None:
    """attribute_map of each configuration class maps common names to the family's own."""
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}; 5.23 has")
    kind = transformers.CONFIG_MAPPING[model_type]
    for field, name in config_names(model_type).items():
        if field in kind.attribute_map:
            assert name == kind.attribute_map[field]
    own = {field.name for field in dataclasses.fields(kind)} - {"tie_word_embeddings"}
    assert own.isdisjoint(field for field in COMMON_FIELDS if field not in config_names(model_type))
