"""ModelCode: which setups Hugging Face's models and users' functions are trained in, and what a trial is known by."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_bench.spec.lora import LoRA
from fsdp_bench.spec.model_code import ModelCode
from fsdp_bench.spec.setup import TrainSetup


def model(**fields: Any) -> ModelCode:
    given = {"name": "m", "code": "huggingface", "architecture": "LlamaForCausalLM", "num_parameters": 1}
    return ModelCode(**{**given, "num_hidden_layers": 1, "config": {}, **fields})


def reason(made: ModelCode, **fields: Any) -> str | None:
    return made.why_impossible(TrainSetup(**{"world_size": 8, "precision": "bf16-mixed", **fields}), "cuda")


@pytest.mark.parametrize("api", ["fsdp1", "fsdp2"])
def test_units_of_the_ends_are_for_hugging_faces_models_with_a_head_of_their_own(api: str) -> None:
    ends = {"api": api, "wrap": "block-and-ends"}
    assert reason(model(), **ends) is None
    assert "tie_word_embeddings" in str(reason(model(config={"tie_word_embeddings": True}), **ends))
    users = model(code="module", config=None, function="mine:build")
    assert reason(users, **ends) == "wrap: block-and-ends is not for m; use block or none"


def test_the_adapters_are_part_of_what_a_trial_is() -> None:
    assert "lora" not in model().decisive()
    assert model(lora=LoRA(rank=4)).decisive()["lora"] == LoRA(rank=4)


def test_a_model_with_adapters_takes_other_losses() -> None:
    assert reason(model(lora=LoRA()), api="fsdp2", loss="chunked") is None


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"precision": "fp32"}, "4-bit numbers"),
        ({"wrap": "size"}, "use block or none or block-and-adapters"),
        ({"api": "fsdp1"}, "uniform dtype"),
        ({"api": "fsdp1", "precision": "bf16-true", "use_orig_params": False}, "uniform `requires_grad`"),
    ],
)
def test_adapters_that_cannot_be_trained_are_refused(fields: dict[str, Any], said: str) -> None:
    assert said in str(reason(model(lora=LoRA(base="nf4")), **{"api": "fsdp2", **fields}))
