"""LoRA as it is written; setups that Hugging Face's models and users' functions are trained in; what is refused."""

from typing import Any

import pytest

from fsdp_bench.spec.codec import from_json, to_json
from fsdp_bench.spec.lora import LoRA, parse_lora
from fsdp_bench.spec.model_code import ModelCode
from fsdp_bench.spec.setup import TrainSetup
from tests.conftest import message_of

WRITTEN = {
    "16": LoRA(rank=16),
    " rank = 4 , targets = q_proj + v_proj ": LoRA(rank=4, targets=("q_proj", "v_proj")),
    "targets=all-linear,dropout=0.05,alpha=32,bias=all": LoRA(
        targets=("all-linear",), dropout=0.05, alpha=32.0, bias="all"
    ),
    "8,base=bf16,modules-to-save=lm_head": LoRA(base="bf16", modules_to_save=("lm_head",)),
}


@pytest.mark.parametrize("text", WRITTEN)
def test_fields_are_read_and_written(text: str) -> None:
    lora = parse_lora(text, "lora")
    assert lora == WRITTEN[text]
    assert parse_lora(lora.text(), "lora") == lora
    assert from_json(to_json(lora), LoRA) == lora


def test_qlora_is_a_base_in_4_bits() -> None:
    lora = parse_lora("16", "qlora", base="nf4")
    assert lora == LoRA(rank=16, base="nf4")
    assert (lora.title, LoRA(rank=16).title) == ("QLoRA rank=16", "LoRA rank=16")
    assert lora.packages == ("peft", "bitsandbytes")


def test_frozen_weights_are_stored_as_the_option_says_or_by_the_default() -> None:
    assert parse_lora("16", "lora", default_base="bf16").base == "bf16"
    assert parse_lora("16,base=same", "lora", default_base="bf16").base is None
    assert parse_lora("16", "qlora", base="nf4", default_base="bf16").base == "nf4"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "lora: '' is not allowed; a rank, or fields like rank=16"),
        ("x", "lora: rank: 'x' is not allowed; a whole number"),
        ("rank=0", "lora: rank: 0 is not allowed; 1 or more"),
        ("rank=1.5", "a whole number"),
        ("8,rank=9", "lora: rank is given twice"),
        ("ranks=8", "lora: has no field 'ranks' (did you mean 'rank'?)"),
        ("dropout=2", "dropout: 2.0 is not allowed"),
        ("dropout=nan", "dropout: nan is not allowed"),
        ("alpha=0", "alpha: 0.0 is not allowed"),
        ("bias=some", "bias: 'some' is not allowed; one of none, all, lora_only"),
        ("base=int3", "base: 'int3' is not allowed; one of bf16, nf4, same"),
        ("targets=q_proj+", "targets: an empty name is not allowed"),
        ("targets=all-linear+q_proj", "all-linear stands for all linear layers"),
    ],
)
def test_a_wrong_value_is_refused_and_named(text: str, expected: str) -> None:
    assert expected in message_of(lambda: parse_lora(text, "lora"))


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
