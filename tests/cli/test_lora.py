"""``--lora`` and ``--qlora``: what is refused, in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import run_command

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 200,
    "max_position_embeddings": 512,
}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("predict --hf-config config.json --lora rank=0", "lora: rank: 0 is not allowed; 1 or more"),
        (
            "max-size --gpu H100-SXM --of micro_batch_size --hf-config config.json --lora ra=0",
            "has no field 'ra'",
        ),
        ("predict --hf-config config.json --lora 16 --qlora 8", "--lora and --qlora: keep one"),
        ("predict --hf-config config.json --qlora 16,base=bf16", "qlora: its base is nf4"),
        ("predict --params 7B --lora 16", "lora: adapters go into Hugging Face's code"),
        ("dry-run --params 7B --lora 16", "lora: adapters go into Hugging Face's code"),
        ("predict --recorded x.json --qlora 16", "qlora: adapters go into Hugging Face's code"),
        ("predict --hf-config config.json --code benchmark --lora 16", "lora: adapters go into Hugging Face's code"),
        ("dry-run --module a:b --lora 16", "--module and --lora each name a model"),
        ("record --module a:b --lora 16", "lora: goes with --hf-config"),
        ("record --hf-config config.json --lora 16 --qlora 16", "keep one"),
        ("predict --params 7B --wrap block-and-adapters", "the model has no frozen parameters"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, words: str, expected: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    ended = run_command(*words.split(), cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.count("\n") == 1
    assert expected in ended.stderr
