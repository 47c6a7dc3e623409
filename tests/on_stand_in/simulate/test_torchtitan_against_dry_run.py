"""Recordings of torchtitan's code against dry runs of it, really wrapped; and ends of Hugging Face's decoders."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="a dry run needs torch")
pytest.importorskip("transformers", reason="transformers knows the fields of a config.json")

from fsdp_bench.catalog.architectures import FOLDERS, recorded_architecture
from fsdp_bench.catalog.loader import models
from fsdp_bench.spec.setup import TrainSetup
from fsdp_bench.spec.subprocesses.dry_run import DryRunSpec, ModelCode
from tests.simulate.comparing import assert_recorded_equals_dry_runs

SMALL = {"hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 136}
SIZES = SMALL | {"vocab_size": 500, "num_hidden_layers": 7, "pad_token_id": 0}
ENDS = {"wrap": "block-and-ends"}

# fmt: off
CASES: list[tuple[ModelCode, str, dict[str, Any]]] = [
    # as torchtitan's trainer wraps: the table, each block, and [norm, lm_head]; the loss is behind the root
    ("torchtitan", "Llama-3.1-8B", {"api": "fsdp2", **ENDS}),
    ("torchtitan", "Llama-3.1-8B", {"api": "fsdp2", "checkpointing": "full", "reshard_last_block": False, **ENDS}),
    ("torchtitan", "Llama-3.1-8B", {"api": "fsdp2", "strategy": "HYBRID_SHARD", "shard_size": 4, **ENDS}),
    # in fp32 its sdpa_kernel allows no memory-efficient attention, so F.scaled_dot_product_attention is unfused
    ("torchtitan", "Llama-3.1-8B", {"api": "fsdp2", "precision": "fp32", "checkpointing": "selective"}),
    ("torchtitan", "Llama-3.1-8B", {"api": "fsdp1", "strategy": "SHARD_GRAD_OP", **ENDS}),
    # of one sequence its rotary positions are taken by rows, and not gathered
    ("torchtitan", "Qwen3-8B", {"api": "fsdp2", "micro_batch_size": 1, **ENDS}),
    ("torchtitan", "Qwen3-0.6B", {"api": "fsdp1", "precision": "bf16-true"}),
    # the ends of a decoder that does not say which they are, by what its modules own
    ("huggingface", "Llama-3.1-8B", {"api": "fsdp2", **ENDS}),
    ("huggingface", "Llama-3.1-8B", {"api": "fsdp1", "checkpointing": "full", **ENDS}),
]
# fmt: on


SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in CASES[:-1]]


@pytest.mark.parametrize(("code", "name", "fields"), [*SLOW, CASES[-1]])
def test_every_phase_equals_the_dry_run(code: ModelCode, name: str, fields: dict[str, Any]) -> None:
    if code == "torchtitan":
        pytest.importorskip("torchtitan", reason="its own code runs: pip install '.[torchtitan]'")
    entry = next(entry for entry in models() if entry.name == name)
    config = entry.hf_config() | SIZES
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][: config["num_hidden_layers"]]
    setup = TrainSetup(**{"world_size": 8, "sequence_length": 192, "micro_batch_size": 2, **fields})
    model = recorded_architecture(config, setup.sequence_length, name, FOLDERS[code])
    assert_recorded_equals_dry_runs(model, DryRunSpec(config=config, setup=setup, code=code))
