"""Hugging Face's config.json: three model types read exactly, everything else refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from fsdp_bench.catalog.hf_config import read_hf_config, read_sliding_window
from fsdp_bench.catalog.loader import model
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.model import Family
from tests.conftest import json_of, message_of, run_command

# As published on Hugging Face: meta-llama/Llama-3.1-8B, mistralai/Mistral-7B-v0.1 and openai-community/gpt2, without
# the fields that say nothing about sizes (dropout, token numbers, versions).
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rope_scaling": {"factor": 8.0, "rope_type": "llama3"},
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
MISTRAL = {
    **{key: value for key, value in LLAMA.items() if key not in ("architectures", "rope_scaling")},
    **{"model_type": "mistral", "max_position_embeddings": 32768, "sliding_window": 4096, "vocab_size": 32000},
}
GPT2 = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}


def write(folder: Path, config: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("config", "name"),
    [(LLAMA, "Llama-3.1-8B"), (MISTRAL, "Mistral-7B-v0.1"), (GPT2, "gpt2")],
    ids=lambda x: str(x)[:9],
)
def test_published_files_give_the_shapes_of_the_catalogue(tmp_path: Path, config: dict[str, Any], name: str) -> None:
    shape = read_hf_config(write(tmp_path, config))
    expected = model(name).shape()
    for field in expected.__struct_fields__:
        if field != "name":
            assert getattr(shape, field) == getattr(expected, field), field
    assert shape.num_parameters == model(name).num_parameters


def test_missing_fields_have_the_defaults_of_transformers(tmp_path: Path) -> None:
    """LlamaConfig: as many key-value heads as heads; MistralConfig: 8; GPT2MLP: n_inner is 4 n_embd."""
    llama = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert read_hf_config(write(tmp_path, llama)).num_key_value_heads == 32
    mistral = {key: value for key, value in MISTRAL.items() if key != "num_key_value_heads"}
    assert read_hf_config(write(tmp_path, mistral)).num_key_value_heads == 8
    assert read_hf_config(write(tmp_path, {**MISTRAL, "num_key_value_heads": None})).num_key_value_heads == 32
    gpt2 = read_hf_config(write(tmp_path, {**GPT2, "n_inner": None}))
    assert (gpt2.family, gpt2.intermediate_size, gpt2.tie_word_embeddings) == (Family.GPT2, 3072, True)
    assert read_hf_config(write(tmp_path, {**GPT2, "n_inner": 2048})).intermediate_size == 2048


def test_the_name_is_the_files_own_or_its_folders(tmp_path: Path) -> None:
    assert read_hf_config(write(tmp_path, LLAMA)).name == tmp_path.name
    assert read_hf_config(write(tmp_path, {**LLAMA, "_name_or_path": "me/mine"})).name == "me/mine"


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({**LLAMA, "model_type": "qwen2"}, "model_type 'qwen2' is not built here; one of llama, mistral, gpt2"),
        ({**LLAMA, "model_type": ["llama"]}, "model_type ['llama'] is not built here"),
        ({**LLAMA, "num_local_experts": 8}, "num_local_experts is set, which is not built here"),
        ({}, "has no model_type; a Hugging Face config.json of llama, mistral, gpt2 has one"),
        ({"hidden_size": 1}, "has no model_type"),
        ([], "not an object"),
        ({**LLAMA, "hidden_act": "gelu"}, "hidden_act 'gelu' is not built here; one of silu"),
        ({**LLAMA, "attention_bias": True}, ": cannot be predicted or trained here: it has biases in its projections"),
        ({**LLAMA, "head_dim": 256}, ": cannot be predicted or trained here: its heads are 256 wide"),
        ({**LLAMA, "quantization_config": {"bits": 4}}, "quantization_config is set"),
        ({**LLAMA, "hidden_size": 64.5}, "hidden_size: 64.5 is not allowed; a whole number"),
        ({**LLAMA, "num_attention_heads": 33}, "hidden_size: 4096 is not a multiple of num_attention_heads 33"),
        ({"model_type": "llama", "vocab_size": 8}, "has no num_hidden_layers, hidden_size,"),
        ({**GPT2, "add_cross_attention": True}, "add_cross_attention is set"),
        ({"model_type": "gpt2", "n_embd": 8}, "has no n_layer, n_head, vocab_size, n_positions"),
    ],
)
def test_a_config_that_cannot_be_read_exactly_is_refused_in_one_line(tmp_path: Path, config: Any, part: str) -> None:
    path = write(tmp_path, config)
    message = message_of(lambda: read_hf_config(path))
    assert message.startswith(f"{path}: ")
    assert part in message


def test_a_file_that_is_not_json_or_not_there_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(SpecError, match="cannot be read: No such file"):
        read_hf_config(path)
    path.write_text("{")
    with pytest.raises(SpecError, match="is not JSON"):
        read_hf_config(path)


WINDOW = {name: value for name, value in MISTRAL.items() if name != "sliding_window"} | {
    **{"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"intermediate_size": 128, "vocab_size": 1000},
}


@pytest.mark.parametrize(
    ("more", "window"),
    [
        ({"sliding_window": 128}, 128),
        ({"sliding_window": None}, None),
        ({}, 4096),  # transformers/models/mistral/configuration_mistral.py
        ({"model_type": "llama", "sliding_window": 128}, None),
    ],
)
def test_the_window_is_hugging_faces(tmp_path: Path, more: dict[str, Any], window: int | None) -> None:
    assert read_sliding_window(write(tmp_path, {**WINDOW, **more})) == window


@pytest.mark.parametrize("window", [0, -1, "4096", 1.5, True])
def test_a_window_that_is_no_number_of_tokens_is_refused(tmp_path: Path, window: Any) -> None:
    with pytest.raises(SpecError, match="sliding_window"):
        read_sliding_window(write(tmp_path, {**WINDOW, "sliding_window": window}))


def test_commands_say_that_a_window_is_not_modelled_once_sequences_are_longer(tmp_path: Path) -> None:
    path = write(tmp_path, {**WINDOW, "sliding_window": 128})
    asked = ("--hf-config", path, "--code", "benchmark", "--world-size", 2, "--gpu", "A100-SXM-80GB", "--seq")
    assert "beyond 128 tokens" in run_command("predict", *asked, 256).stdout
    (note,) = json_of("predict", *asked, 256)["notes"]
    assert "sliding window is not modelled" in note
    assert json_of("predict", *asked, 128)["notes"] == []
    done = run_command("max-size", *asked, 256, "--dial", "micro_batch_size", "--strategy", "FULL_SHARD")
    assert done.returncode == 0, done.stderr
    assert "sliding window is not modelled" in done.stderr
