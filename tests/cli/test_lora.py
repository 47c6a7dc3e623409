"""A plan with adapters; and a config.json that tests give adapters to."""

from __future__ import annotations

import json

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


def test_a_plan_with_adapters_needs_no_units_that_fsdp1_refuses() -> None:
    """The fastest that a setting can be is FSDP1's computation, whose units flatten no adapters in fp32 with bf16."""
    words = "plan --model Llama-3.1-8B --qlora 16 --server g5.48xlarge --nodes 1 --strategy FULL_SHARD --api fsdp2"
    found = run_command(*words.split(), "--checkpointing", "full", "--batch", "1", "--offload", "none", "--json")
    assert found.returncode == 0, found.stdout
    assert json.loads(found.stdout)["winner"]["setup"]["api"] == "fsdp2"
