"""hf_config(): a model of the catalogue as the config.json that is published, by the names of its family."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_bench.catalog.config_names import config_names
from fsdp_bench.catalog.loader import model, models
from fsdp_bench.catalog.model_entry import ModelEntry
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import Source

SOURCE = Source(title="a test", date="2026-11-23")


def entry(**fields: Any) -> ModelEntry:
    sizes = {"num_hidden_layers": 6, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    return ModelEntry(**{"name": "x", "source": SOURCE, "vocab_size": 100, **sizes, **fields})


def test_the_names_are_those_of_the_published_file() -> None:
    """Published: config.json of openai-community/gpt2, Qwen/Qwen3-30B-A3B and google/flan-t5-small."""
    gpt2 = model("gpt2").hf_config()
    assert gpt2["architectures"] == ["GPT2LMHeadModel"]
    assert (gpt2["n_layer"], gpt2["n_embd"], gpt2["n_head"], gpt2["n_positions"]) == (12, 768, 12, 1024)
    t5 = model("flan-t5-small").hf_config()
    assert t5["model_type"] == "t5"
    assert (t5["d_model"], t5["d_ff"], t5["d_kv"], t5["num_layers"], t5["num_decoder_layers"]) == (512, 1024, 64, 8, 8)
    assert t5["feed_forward_proj"] == "gated-gelu"
    qwen = model("Qwen3-30B-A3B").hf_config()
    assert (qwen["num_experts"], qwen["num_experts_per_tok"], qwen["moe_intermediate_size"]) == (128, 8, 768)


def test_every_model_states_its_architecture_and_no_name_stands_for_two_fields() -> None:
    for each in models():
        names = config_names(each.family)
        assert len(set(names.values())) == len(names)
        assert each.hf_config()["architectures"], each.name


def test_null_and_a_layer_pattern_are_written_out() -> None:
    assert model("Mistral-7B-v0.3").hf_config()["sliding_window"] is None
    assert model("Mistral-7B-v0.1").hf_config()["sliding_window"] == 4096
    pattern = ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"]
    assert model("Ministral-8B").hf_config()["layer_types"] == pattern * 9


def test_key_value_heads_are_written_though_the_entry_leaves_them_out() -> None:
    """MistralConfig's default is 8, not the number of attention heads."""
    assert entry(family="mistral").hf_config()["num_key_value_heads"] == 4
    assert "num_key_value_heads" not in entry(family="gpt2").hf_config()


def test_an_unknown_family_has_the_common_names_and_the_architecture_it_states() -> None:
    assert "architectures" not in entry(family="granite").hf_config()
    written = entry(
        family="granite", architecture="GraniteForCausalLM", config={"residual_multiplier": 0.2}
    ).hf_config()
    assert written["architectures"] == ["GraniteForCausalLM"]
    assert (written["hidden_size"], written["residual_multiplier"]) == (64, 0.2)


def test_a_field_is_given_once_and_a_vocabulary_where_there_is_one() -> None:
    with pytest.raises(SpecError, match=r"config\.n_embd: is not allowed; the entry has a field of its own"):
        entry(family="gpt2", config={"n_embd": 32})
    with pytest.raises(SpecError, match="has no `vocab_size`"):
        entry(family="llama", vocab_size=None)
    assert entry(family="vit", vocab_size=None).hf_config()["hidden_size"] == 64


def test_a_config_that_changes_modules_is_not_predicted_as_if_it_did_not() -> None:
    plain = {"family": "llama", "max_position_embeddings": 128}
    assert entry(**plain, config={"rope_theta": 1e6}).supported
    changed = entry(**plain, config={"hidden_act": "gelu"})
    assert changed.unsupported_because == "its config sets hidden_act, which the llama family here does not know"
