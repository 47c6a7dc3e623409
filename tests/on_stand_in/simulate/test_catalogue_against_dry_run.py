"""Recordings of the catalogue against dry runs of transformers' and torchtitan's code."""

from typing import Any

import pytest

from fsdp_bench.catalog.architectures import FOLDERS, recorded_architecture
from fsdp_bench.catalog.loader import models
from fsdp_bench.spec.setup import TrainSetup
from fsdp_bench.spec.subprocesses.dry_run import DryRunSpec, ModelCode
from tests.simulate.comparing import assert_recorded_equals_dry_runs

NARROW = {"hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 500, "pad_token_id": 0}
T5 = {"d_model": 64, "num_heads": 2, "d_kv": 24, "d_ff": 112, "num_layers": 8, "num_decoder_layers": 8}

# fmt: off
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    # embed_scale is a buffer of the GPU: casting it makes a tensor there (a fake constant of the host made none)
    ("Gemma-2-2B", NARROW | {"head_dim": 24, "intermediate_size": 136, "num_hidden_layers": 8},
     {"api": "fsdp2", "precision": "fp32/bf16/fp16", "wrap": "none"}),
    # flan-t5 does not scale what its decoder returns (T5Config.scale_decoder_outputs)
    ("flan-t5-small", T5 | {"vocab_size": 600}, {"api": "fsdp1", "precision": "bf16-mixed", "micro_batch_size": 4}),
    # ShardedGradScaler.scale returns the dtype of the loss
    ("t5-small", T5 | {"vocab_size": 600}, {"api": "fsdp1", "precision": "fp16-mixed", "checkpointing": "full"}),
    # the experts' biases (e_score_correction_bias) are buffers in every layer
    ("DeepSeek-V3", {"num_hidden_layers": 12, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2,
                     "vocab_size": 400, "intermediate_size": 80, "moe_intermediate_size": 40, "n_routed_experts": 32},
     {"api": "fsdp1", "precision": "bf16-mixed", "strategy": "SHARD_GRAD_OP"}),
    # _lazy_init allocates the units before _root_pre_forward casts the images
    ("ViT-B-16", {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 280, "image_size": 112,
                  "patch_size": 14, "num_labels": 36},
     {"api": "fsdp1", "precision": "fp16-mixed", "wrap": "none", "offload": "params", "micro_batch_size": 3}),
    # under DistributedDataParallel a model casts images itself
    ("ViT-B-16", {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "image_size": 64,
                  "patch_size": 16, "num_labels": 7},
     {"api": "fsdp2", "strategy": "NO_SHARD", "precision": "bf16-true", "micro_batch_size": 4}),
    # fully_shard in one dtype has no MixedPrecisionPolicy, and casts nothing at blocks
    ("OLMo-2-7B", NARROW | {"num_key_value_heads": 4, "intermediate_size": 200, "num_hidden_layers": 8},
     {"api": "fsdp2", "precision": "bf16-true", "micro_batch_size": 4}),
    # another loss than the model's own; Gemma 2 changes its logits, a mixture's head is as others' (its experts: bf16)
    ("Llama-3.1-8B", NARROW | {"intermediate_size": 136, "num_hidden_layers": 8},
     {"api": "fsdp1", "loss": "chunked", "micro_batch_size": 2, "checkpointing": "full"}),
    ("Qwen3-0.6B", NARROW | {"intermediate_size": 136, "num_hidden_layers": 8},
     {"api": "fsdp2", "loss": "chunked", "precision": "fp32", "gradient_accumulation_steps": 2}),
    ("Gemma-2-2B", NARROW | {"head_dim": 24, "intermediate_size": 136, "num_hidden_layers": 8},
     {"api": "fsdp2", "loss": "chunked", "micro_batch_size": 2, "strategy": "SHARD_GRAD_OP"}),
    ("gpt2", {"n_embd": 96, "n_head": 4, "n_layer": 8, "vocab_size": 500},
     {"api": "fsdp2", "loss": "chunked", "micro_batch_size": 2, "strategy": "NO_SHARD"}),
    ("Mixtral-8x7B", NARROW | {"intermediate_size": 136, "num_hidden_layers": 8},
     {"api": "fsdp1", "loss": "chunked", "offload": "params", "precision": "bf16-mixed"}),
    # linear attention is a loop over parts of the sequence, whose layers alternate with full attention
    ("Qwen3-Next-80B-A3B", NARROW | {"head_dim": 16, "intermediate_size": 96, "num_experts": 32, "num_hidden_layers": 8,
                                     "num_experts_per_tok": 4, "moe_intermediate_size": 32,
                                     "shared_expert_intermediate_size": 40, "linear_num_key_heads": 2,
                                     "linear_num_value_heads": 4, "linear_key_head_dim": 16,
                                     "linear_value_head_dim": 24},
     {"api": "fsdp2", "precision": "bf16-mixed", "checkpointing": "full", "sequence_length": 4096}),
]
# fmt: on
"""Each row was once predicted wrong."""

SMALL = {"hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 136}
SIZES = SMALL | {"vocab_size": 500, "num_hidden_layers": 7, "pad_token_id": 0}

ENDS = {"wrap": "block-and-ends"}
# fmt: off
OF_TORCHTITAN: list[tuple[ModelCode, str, dict[str, Any]]] = [
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


@pytest.mark.parametrize(
    ("code", "name", "sizes", "fields"),
    [
        *(
            pytest.param(
                "huggingface", *case, id=f"{case[0]}-{case[2]['api']}-{case[2].get('loss', 'own')}", marks=marks
            )
            for case, marks in zip(CASES, [(), (), *([pytest.mark.slow] * len(CASES))], strict=False)
        ),
        *(
            pytest.param(code, name, SIZES, {"micro_batch_size": 2, **fields}, marks=marks)
            for (code, name, fields), marks in zip(OF_TORCHTITAN, [*([pytest.mark.slow] * 8), ()], strict=True)
        ),
    ],
)
def test_every_phase_equals_the_dry_run(
    code: ModelCode, name: str, sizes: dict[str, Any], fields: dict[str, Any]
) -> None:
    if code == "torchtitan":
        pytest.importorskip("torchtitan", reason="its own code runs: pip install '.[torchtitan]'")
    entry = next(entry for entry in models() if entry.name == name)
    config = entry.hf_config() | sizes
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][: config["num_hidden_layers"]]
    setup = TrainSetup(**{"world_size": 8, "sequence_length": 192, **fields})
    model = recorded_architecture(config, setup.sequence_length, name, FOLDERS[code])
    assert_recorded_equals_dry_runs(model, DryRunSpec(config=config, setup=setup, code=code))
