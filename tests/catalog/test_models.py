"""models.toml: sizes that give the published parameter counts, and honesty about what cannot be expressed."""

from __future__ import annotations

import re

import pytest

from fsdp_bench.catalog.loader import model, models
from fsdp_bench.catalog.model_entry import ModelEntry
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.model import Family

SUPPORTED = [entry for entry in models() if entry.supported]
DATA_ONLY = [entry for entry in models() if not entry.supported]


@pytest.mark.parametrize(
    "name",
    [
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
    ],
)
def test_every_model_that_was_promised_is_there(name: str) -> None:
    assert name in (model(name).name, *model(name).aliases)


def test_every_model_has_a_source_with_a_date_and_a_published_count_or_says_of_what_it_is_a_part() -> None:
    for entry in models():
        assert entry.source.title, entry.name
        assert re.match(r"^\d{4}-\d\d-\d\d$", entry.source.date), entry.name
        part = "the published count of the whole" in (entry.source.note or "")
        assert entry.num_parameters is not None or part, entry.name


@pytest.mark.parametrize("entry", SUPPORTED, ids=lambda entry: entry.name)
def test_the_count_of_what_can_be_planned_is_the_published_one(entry: ModelEntry) -> None:
    """Published: the total of the safetensors metadata on Hugging Face, or the count printed from the checkpoint."""
    assert entry.shape().num_parameters == entry.num_parameters


COUNTED = [entry for entry in DATA_ONLY if entry.family in ("mistral", "qwen2", "qwen3", "t5")]


@pytest.mark.parametrize("entry", COUNTED, ids=lambda entry: entry.name)
def test_the_sizes_of_what_is_data_only_give_the_published_count(entry: ModelEntry) -> None:
    """Counted here from the modules of transformers (modeling_mistral, _qwen2, _qwen3, _t5), apart from the code.

    test_built_models builds these and the other families with transformers.
    """
    count = count_t5(entry) if entry.family == "t5" else count_decoder(entry)
    assert count == entry.num_parameters


def count_decoder(entry: ModelEntry) -> int:
    """Embedding, blocks of attention and SwiGLU with two norms, a last norm, a head unless it is tied."""
    hidden, heads = entry.hidden_size, entry.num_attention_heads
    head_dim = entry.head_dim or hidden // heads
    queries, keys = heads * head_dim, (entry.num_key_value_heads or heads) * head_dim
    block = 2 * hidden * queries + 2 * hidden * keys + 3 * hidden * entry.intermediate_size + 2 * hidden
    if entry.attention_bias:
        block += queries + 2 * keys  # Qwen 2.5: none on the output projection
    if entry.family == "qwen3":
        block += 2 * head_dim  # q_norm and k_norm
    embeddings = entry.vocab_size * hidden * (1 if entry.tie_word_embeddings else 2)
    return embeddings + entry.num_hidden_layers * block + hidden


def count_t5(entry: ModelEntry) -> int:
    """A shared embedding, two stacks of blocks without biases, 32 relative position buckets a head in each stack.

    T5 v1.1 and Flan-T5 have gated feed-forward layers, and a head of their own.
    """
    hidden, heads = entry.hidden_size, entry.num_attention_heads
    attention = 4 * hidden * heads * entry.head_dim
    feed_forward = (3 if "feed_forward_proj" in entry.config else 2) * hidden * entry.intermediate_size
    encoder = entry.num_hidden_layers * (attention + feed_forward + 2 * hidden)
    decoder = entry.num_decoder_layers * (2 * attention + feed_forward + 3 * hidden)
    embeddings = entry.vocab_size * hidden * (1 if entry.tie_word_embeddings else 2)
    return embeddings + encoder + decoder + 2 * (32 * heads + hidden)


def test_predicted_models_are_those_of_the_built_in_families() -> None:
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


def test_names_are_read_in_any_case_and_as_on_hugging_face() -> None:
    assert model("LLAMA-3.1-8b") is model("meta-llama/Llama-3.1-8B") is model("meta-llama/Meta-Llama-3.1-8B")
    assert model("mistralai/Mistral-7B-v0.1").shape().family is Family.LLAMA
