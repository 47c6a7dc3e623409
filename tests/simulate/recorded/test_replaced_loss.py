"""Losses that replace a recorded model's own: the models that take them, and refusals."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_bench.catalog.architectures import recorded_architecture
from fsdp_bench.catalog.loader import models
from fsdp_bench.simulate.operators.kernels import CUDA
from fsdp_bench.simulate.wrappers.impossible import why_impossible
from fsdp_bench.spec.model_code import ModelCode
from fsdp_bench.spec.recording.model import RecordedModel
from fsdp_bench.spec.setup import Loss, TrainSetup
from tests.predicted import memory_of

BATCH, LENGTH, VOCABULARY = 2, 1024, 32000
OTHERS = [kind for kind in Loss if kind is not Loss.PLAIN]
NARROW = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
}


def recorded(name: str, **sizes: Any) -> RecordedModel:
    config = next(entry for entry in models() if entry.name == name).hf_config()
    return recorded_architecture(config | sizes, LENGTH, name)


def _setup(**fields: Any) -> TrainSetup:
    given = {"world_size": 8, "precision": "bf16-mixed", "micro_batch_size": BATCH, "sequence_length": LENGTH}
    return TrainSetup(**(given | fields))


@pytest.fixture(scope="module")
def llama() -> RecordedModel:
    return recorded("Llama-3.2-1B", **NARROW)


@pytest.mark.parametrize("precision", ["fp32", "bf16-true", "fp16-mixed"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("loss", OTHERS)
def test_every_precision_and_wrapper_takes_less_than_the_plain_loss(
    llama: RecordedModel, loss: Loss, strategy: str, precision: str
) -> None:
    setup = {"precision": precision, "strategy": strategy, "api": "fsdp2", "checkpointing": "full"}
    peaks = [memory_of(llama, _setup(loss=kind, **setup), CUDA).peak_allocated_bytes for kind in ("plain", loss)]
    assert peaks[1] < peaks[0]


@pytest.mark.parametrize("name", ["gpt2", "Qwen3-0.6B", "Mixtral-8x7B", "gpt-oss-20b", "DeepSeek-V3", "Gemma-3-1B"])
@pytest.mark.parametrize("loss", OTHERS)
def test_causal_language_models_take_every_loss(name: str, loss: Loss) -> None:
    assert why_impossible(recorded(name), _setup(loss=loss), "cuda") is None


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("t5-small", "T5ForConditionalGeneration does not predict the next token"),
        ("bert-base-uncased", "BertForMaskedLM does not predict the next token"),
        ("ViT-B-16", "ViTForImageClassification does not predict the next token"),
    ],
)
def test_other_models_keep_their_loss(name: str, said: str) -> None:
    config = next(entry for entry in models() if entry.name == name).hf_config()
    model = recorded_architecture(config, 512, name)
    assert said in str(why_impossible(model, _setup(loss="chunked", sequence_length=512), "cuda"))


def test_soft_capped_logits_are_part_of_the_model() -> None:
    """Gemma 2 computes tanh of its logits, which a loss on logits gets and a loss that includes the head leaves out."""
    gemma = recorded("Gemma-2-2B")
    assert why_impossible(gemma, _setup(loss="liger"), "cuda") is None
    assert "changes its logits after the head" in str(why_impossible(gemma, _setup(loss="liger-fused-linear"), "cuda"))


@pytest.mark.parametrize(
    ("architecture", "config", "loss", "said"),
    [
        ("LlamaForCausalLM", {}, "liger-fused-linear", None),
        ("GPT2LMHeadModel", {}, "chunked", None),
        ("Gemma2ForCausalLM", {"final_logit_softcapping": 30.0}, "liger", None),
        ("Gemma2ForCausalLM", {"final_logit_softcapping": 30.0}, "liger-fused-linear", "use liger"),
        ("GraniteForCausalLM", {"logits_scaling": 8.0}, "liger-fused-linear", "changes its logits by logits_scaling"),
        ("MixtralForCausalLM", {"output_router_logits": True}, "liger", "adds its routers' loss"),
        ("T5ForConditionalGeneration", {}, "chunked", "is no causal language model"),
    ],
)
def test_trials_refuse_what_would_be_another_loss(
    architecture: str, config: dict[str, Any], loss: str, said: str | None
) -> None:
    model = ModelCode(
        name="m", code="huggingface", architecture=architecture, num_parameters=1, num_hidden_layers=1, config=config
    )
    reason = model.why_impossible(_setup(loss=loss), "cuda")
    assert reason is None if said is None else said in str(reason)
