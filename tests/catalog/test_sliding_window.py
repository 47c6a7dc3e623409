"""A sliding window is not modelled: every command says so, once sequences are longer than it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdp_bench.catalog.hf_config import read_sliding_window
from fsdp_bench.spec.errors import SpecError
from tests.conftest import json_of, run_command
from tests.shapes import llama_config

MISTRAL = llama_config(
    **{"model_type": "mistral", "num_hidden_layers": 2, "intermediate_size": 128, "vocab_size": 1000},
    **{"max_position_embeddings": 32768, "tie_word_embeddings": False, "architectures": ["MistralForCausalLM"]},
)
WORDS = ("--world-size", 2, "--gpu", "A100-SXM-80GB")


def _config(folder: Path, **more: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**MISTRAL, **more}))
    return path


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
    assert read_sliding_window(_config(tmp_path, **more)) == window


@pytest.mark.parametrize("window", [0, -1, "4096", 1.5, True])
def test_a_window_that_is_no_number_of_tokens_is_refused(tmp_path: Path, window: Any) -> None:
    with pytest.raises(SpecError, match="sliding_window"):
        read_sliding_window(_config(tmp_path, sliding_window=window))


def test_predict_notes_a_sequence_beyond_the_window_in_text_and_json(tmp_path: Path) -> None:
    path = _config(tmp_path, sliding_window=128)
    asked = ("predict", "--hf-config", path, "--code", "benchmark", *WORDS)
    text = run_command(*asked, "--seq", 256).stdout
    assert "beyond 128 tokens" in text
    (note,) = json_of(*asked, "--seq", 256)["notes"]
    assert "sliding window is not modelled" in note
    assert json_of(*asked, "--seq", 128)["notes"] == []


def test_max_size_says_it_on_standard_error(tmp_path: Path) -> None:
    path = _config(tmp_path, sliding_window=128)
    asked = ("max-size", "--hf-config", path, "--code", "benchmark", *WORDS, "--dial", "micro_batch_size")
    done = run_command(*asked, "--seq", 256, "--strategy", "FULL_SHARD")
    assert done.returncode == 0, done.stderr
    assert "sliding window is not modelled" in done.stderr
