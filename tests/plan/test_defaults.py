"""Defaults of Hugging Face's code: what transformers' Trainer does, unless the user states otherwise."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from fsdp_bench import estimate
from fsdp_bench.catalog.loader import gpu
from fsdp_bench.catalog.lookup import model
from fsdp_bench.plan.defaults import Code, assumptions, default_base, trainer_defaults
from fsdp_bench.plan.prediction import answer
from fsdp_bench.plan.question import Question
from fsdp_bench.plan.remedies import smaller_bases
from fsdp_bench.spec.hardware import Hardware
from fsdp_bench.spec.lora import LoRA
from fsdp_bench.spec.recording.model import RecordedModel, lora_of
from fsdp_bench.spec.recording.recorded import RecordedCode
from fsdp_bench.spec.setup import Api, Precision, ShardingStrategy, TrainSetup, Wrap

FSDP2 = {"api": Api.FSDP2}
BARE = FSDP2 | {"strategy": ShardingStrategy.NO_SHARD}


@pytest.mark.parametrize(
    ("stated", "world_size", "expected"),
    [
        ({}, 8, FSDP2),
        ({"api": "fsdp1"}, 8, {}),
        ({"gradient_accumulation_steps": 4}, 8, FSDP2 | {"sync_every_micro_batch": False}),
        ({"gradient_accumulation_steps": 4, "sync_every_micro_batch": True}, 8, FSDP2),
        ({}, None, FSDP2 | {"sync_every_micro_batch": False}),
        ({}, 1, BARE),
        ({"offload": "none"}, 1, BARE),
        ({"offload": "params"}, 1, FSDP2),
        ({"use_orig_params": False}, 1, FSDP2),
        ({"strategy": "zero3"}, 1, FSDP2),
        ({"api": "fsdp1"}, 1, {}),
    ],
    ids=str,
)
def test_the_trainer_decides_what_the_user_does_not_state(
    stated: dict[str, Any], world_size: int | None, expected: dict[str, Any]
) -> None:
    assert trainer_defaults(Code("huggingface"), stated, world_size) == expected
    assert trainer_defaults(Code("torchtitan"), stated, world_size) == {}


def test_adapters_are_units_under_fsdp1_alone() -> None:
    adapted = Code("huggingface", has_adapters=True)
    assert trainer_defaults(adapted, {"api": "fsdp1"}, 8) == {"wrap": Wrap.BLOCK_AND_ADAPTERS}
    assert trainer_defaults(adapted, {}, 8) == FSDP2
    assert trainer_defaults(adapted, {"api": "fsdp1", "wrap": "block"}, 8) == {}


@pytest.mark.parametrize(("precision", "base"), [("bf16-mixed", "bf16"), ("bf16-true", "bf16"), ("fp32", None)])
def test_frozen_weights_are_stored_as_checkpoints_are_where_products_are_in_bf16(
    precision: str, base: str | None
) -> None:
    assert default_base(Precision.parse(precision)) == base


def with_lora(lora: LoRA) -> RecordedModel:
    """Return Llama-3.1-8B in Hugging Face's code as if it had been recorded with adapters."""
    found = model("Llama-3.1-8B", 512, code="huggingface")
    return replace(found, code=replace(found.code, origin=replace(found.code.origin, lora=lora)))


def test_an_answer_says_how_frozen_weights_are_stored() -> None:
    setup = TrainSetup(world_size=8, api=Api.FSDP2)
    assert assumptions(with_lora(LoRA(base="bf16")), setup)[1] == "frozen weights in bf16 (or base=same in --lora)"
    for other in (LoRA(), LoRA(base="nf4")):
        assert not any("frozen" in each for each in assumptions(with_lora(other), setup))


def test_advice_names_smaller_frozen_weights_where_adapters_do_not_fit() -> None:
    setup = TrainSetup(sequence_length=512, precision=Precision.parse("bf16-mixed"), **BARE)

    def advised(lora: LoRA) -> list[str]:
        question = Question(with_lora(lora), setup, Hardware.of_gpu(gpu("A10G")))
        return [text.partition(":")[0] for text in smaller_bases(answer(question))]

    assert advised(LoRA(rank=16)) == ["--lora rank=16,base=bf16", "--qlora rank=16"]
    assert advised(LoRA(rank=16, base="bf16")) == ["--qlora rank=16"]
    assert advised(LoRA(rank=16, base="nf4")) == []


@pytest.mark.parametrize(
    ("given", "base"),
    [({"lora": 16}, "bf16"), ({"lora": "16,base=same"}, None), ({"qlora": 16}, "nf4"), ({"lora": LoRA(rank=16)}, None)],
    ids=str,
)
def test_python_puts_adapters_in_as_the_command_line_does(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], base: str | None
) -> None:
    """Those in bf16 and in 4 bits come recorded, and others are recorded."""

    def record(config: dict[str, Any], length: int, progress: object, lora: LoRA, *_: object) -> RecordedCode:
        assert (config["model_type"], length, lora.base) == ("llama", 4096, None)
        return with_lora(lora).code

    monkeypatch.setattr("fsdp_bench.plan.recording.recorded_config", record)
    found = estimate("Llama-3.1-8B", gpu="RTX-4090", **given)
    assert lora_of(found.model) == LoRA(rank=16, base=base)
    assert found.setup.is_bare
    assert "with" in found.model.name


def test_python_records_a_config_that_no_recording_holds_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "attention_bias": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code = with_lora(LoRA()).code
    monkeypatch.setattr("fsdp_bench.plan.recording.recorded_config", lambda *_given: code)
    assert estimate(hf_config=tmp_path / "config.json", world_size=8).setup.api is Api.FSDP2
