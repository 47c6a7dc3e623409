"""models.toml: published sizes, names that people write, the config.json, and what cannot be expressed."""

import re
from typing import Any

import pytest

from fsdp_bench.catalog.loader import model, models
from fsdp_bench.catalog.model_entry import ModelEntry, config_names
from fsdp_bench.catalog.names import is_other_weights
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import Source
from fsdp_bench.spec.model import Family
from tests.conftest import message_of

SUPPORTED = [entry for entry in models() if entry.supported]
DATA_ONLY = [entry for entry in models() if not entry.supported]


PROMISED = (
    *("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"),
    *("Llama-2-7B", "Llama-2-13B", "Llama-2-70B", "Llama-3-8B", "Llama-3-70B"),
    *("Llama-3.1-8B", "Llama-3.1-70B", "Llama-3.1-405B", "Mistral-7B-v0.1", "Mistral-7B-v0.3"),
    *(f"Qwen2.5-{size}" for size in ("0.5B", "1.5B", "3B", "7B", "14B", "32B", "72B")),
    *(f"Qwen3-{size}" for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B")),
    *(f"t5-{size}" for size in ("small", "base", "large", "3b", "11b")),
    *("Llama-3.3-70B", "SmolLM2-135M", "SmolLM3-3B", "Ministral-8B", "Mixtral-8x7B", "Mixtral-8x22B"),
    *("Qwen3-30B-A3B", "Qwen3-235B-A22B", "Qwen3-Next-80B-A3B", "Gemma-2-27B", "Gemma-3-1B", "Gemma-3-27B-text"),
    *("Phi-3-mini-4k", "Phi-4", "OLMo-2-32B", "OLMo-3-7B", "gpt-oss-20b", "gpt-oss-120b"),
    *("DeepSeek-V2-Lite", "DeepSeek-V3", "bert-large", "ModernBERT-base", "ViT-H/14", "google/t5-v1_1-xl"),
)


def test_every_model_that_was_promised_is_there() -> None:
    assert set(PROMISED) <= {name for entry in models() for name in (entry.name, *entry.aliases)}


def test_every_model_has_a_source_of_a_day_and_a_published_count_or_says_of_what_it_is_a_part() -> None:
    for entry in models():
        assert re.match(r"^\d{4}-\d\d-\d\d$", entry.source.date), entry.name
        part = "the published count of the whole" in (entry.source.note or "")
        assert entry.num_parameters is not None or part, entry.name


@pytest.mark.parametrize("entry", SUPPORTED, ids=lambda entry: entry.name)
def test_the_count_of_what_can_be_planned_is_the_published_one(entry: ModelEntry) -> None:
    """Published: the total of the safetensors metadata on Hugging Face, or the count printed from the checkpoint."""
    assert entry.shape().num_parameters == entry.num_parameters


def test_predicted_models_are_those_of_the_built_in_families() -> None:
    assert model("mistralai/Mistral-7B-v0.1").shape().family is Family.LLAMA
    names = {entry.name for entry in SUPPORTED}
    assert names >= {"gpt2-xl", "Llama-2-7B", "Llama-3.1-405B", "Llama-3.2-1B", "Mistral-7B-v0.3"}
    assert {entry.family for entry in DATA_ONLY}.isdisjoint({"llama", "gpt2"})


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Qwen2.5-7B", "biases to the query, key and value"),
        ("Qwen3-8B", "normalises queries and keys"),
        ("t5-base", "encoder-decoder"),
        ("Mistral-Nemo-12B", "its heads are 128 wide, not hidden_size / num_attention_heads = 160"),
    ],
)
def test_a_model_that_is_only_listed_is_refused_with_the_reason(name: str, reason: str) -> None:
    with pytest.raises(SpecError, match=re.escape(reason)) as caught:
        model(name).shape()
    assert str(caught.value).startswith(f"model: {name} can be listed, not predicted or trained: ")


# The architectures are those of the model cards and config.json files on Hugging Face; DeepSeek's table of distilled
# models is in the README of deepseek-ai/DeepSeek-R1.
SAME = {
    "meta-llama/Llama-3.1-8B-Instruct": "Llama-3.1-8B",
    "meta-llama/Meta-Llama-3-70B-Instruct": "Llama-3-70B",
    "Llama-2-7b-chat-hf": "Llama-2-7B",
    "Qwen2.5-7B-Instruct": "Qwen2.5-7B",
    "Qwen/Qwen3-8B-Base": "Qwen3-8B",
    "Qwen/Qwen2.5-Coder-32B-Instruct": "Qwen2.5-32B",
    "mistralai/Mistral-7B-Instruct-v0.3": "Mistral-7B-v0.3",
    "mistralai/Mixtral-8x7B-Instruct-v0.1": "Mixtral-8x7B",
    "google/gemma-2-9b-it": "Gemma-2-9B",
    "deepseek-ai/DeepSeek-V2-Lite-Chat": "DeepSeek-V2-Lite",
    "DeepSeek-R1-Distill-Llama-8B": "Llama-3.1-8B",
    "deepseek-ai/DeepSeek-R1-Distill-Llama-70B": "Llama-3.3-70B-Instruct",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": "Qwen2.5-7B",
    "DeepSeek-R1-Distill-Qwen-32B": "Qwen2.5-32B",
}


@pytest.mark.parametrize("written", SAME)
def test_other_weights_of_an_architecture_are_that_architecture_and_known_as_other_weights(written: str) -> None:
    assert model(written).name == SAME[written]
    assert is_other_weights(written, model(written))


def test_a_models_own_names_are_no_other_weights() -> None:
    for entry in models():
        for name in (entry.name, *entry.aliases, entry.name.replace("-", " ")):
            assert not is_other_weights(name, entry)
    assert model("llama 3.1 8b") is model("LLAMA-3.1-8b") is model("meta-llama/Meta-Llama-3.1-8B")


@pytest.mark.parametrize(
    ("tuned", "base", "parameters"),
    [
        # The checkpoints' counts: the distilled model has a head of its own, the Instruct model a larger vocabulary.
        ("DeepSeek-R1-Distill-Qwen-1.5B", "Qwen2.5-1.5B", 1_777_088_000),
        ("mistralai/Mixtral-8x22B-Instruct-v0.1", "Mixtral-8x22B-v0.1", 140_630_071_296),
    ],
)
def test_tuned_weights_with_other_sizes_are_a_model_of_their_own(tuned: str, base: str, parameters: int) -> None:
    assert model(tuned) is not model(base)
    assert model(tuned).num_parameters == parameters


@pytest.mark.parametrize(
    "written",
    [
        "Llama-3.1-9B",
        "Llama-3.1-7",  # begins the name of a model ten times as large
        "Qwen2.5-VL-7B-Instruct",  # reads images
        "Phi-4-mini-instruct",
        "Mistral-7B-v0.4",
        "Qwen-7B",
        "bert-base-cased",
        "gpt3",
    ],
)
def test_another_size_or_family_is_not_proposed_and_the_ways_out_are_named(written: str) -> None:
    message = message_of(lambda: model(written))
    assert "did you mean" not in message
    assert all(way in message for way in ("fsdp-bench models", "--hf-config", "fsdp-bench record"))


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("Lama-3.1-8B", "Llama-3.1-8B"),
        ("Llama-3.1-8", "Llama-3.1-8B"),
        ("Mitsral-7B-v0.3", "Mistral-7B-v0.3"),
        ("Qwen2.5-0.5", "Qwen2.5-0.5B"),
        ("unsloth/Llama-3.1-8B-Instruct", "Llama-3.1-8B"),  # another owner's copy: probably, but nothing says so
        ("google/gemma-3-4b-it", "Gemma-3-4B-text"),
    ],
)
def test_a_slip_a_copy_and_a_part_of_a_name_are_answered_with_the_one_model_they_can_mean(
    written: str, name: str
) -> None:
    with pytest.raises(SpecError, match=f"did you mean '{name}'"):
        model(written)


def entry(**fields: Any) -> ModelEntry:
    sizes = {"num_hidden_layers": 6, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    return ModelEntry(
        **{"name": "x", "source": Source(title="a test", date="2026"), "vocab_size": 100, **sizes, **fields}
    )


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
