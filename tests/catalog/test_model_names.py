"""A model is found by the names that people write for it; another size or family is never proposed."""

from __future__ import annotations

import pytest

from fsdp_bench.catalog.loader import model, models
from fsdp_bench.catalog.names import is_other_weights
from fsdp_bench.spec.errors import SpecError
from tests.conftest import message_of

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


@pytest.mark.parametrize(("written", "name"), SAME.items())
def test_other_weights_of_an_architecture_are_that_architecture_and_known_as_other_weights(
    written: str, name: str
) -> None:
    assert model(written).name == name
    assert is_other_weights(written, model(written))


def test_a_models_own_names_are_no_other_weights() -> None:
    for entry in models():
        for name in (entry.name, *entry.aliases, entry.name.replace("-", " ")):
            assert not is_other_weights(name, entry)


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
