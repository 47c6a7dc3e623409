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
        ("predict --model Llama-3.1-8B --lora 16 --gpu H100-SXM --api fsdp1 --wrap block", "with uniform dtype"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, words: str, expected: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    ended = run_command(*words.split(), cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.count("\n") == 1
    assert expected in ended.stderr


def test_a_plan_with_adapters_needs_no_units_that_fsdp1_refuses() -> None:
    """The fastest that a setting can be is FSDP1's computation, whose units flatten no adapters in fp32 with bf16."""
    words = "plan --model Llama-3.1-8B --qlora 16 --server g5.48xlarge --nodes 1 --strategy FULL_SHARD --api fsdp2"
    found = run_command(*words.split(), "--checkpointing", "full", "--batch", "1", "--offload", "none", "--json")
    assert found.returncode == 0, found.stdout
    assert json.loads(found.stdout)["winner"]["setup"]["api"] == "fsdp2"
