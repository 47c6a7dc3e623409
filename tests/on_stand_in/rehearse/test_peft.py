"""LoRA and QLoRA: predictions against rehearsals of a loop and of what is exported, with PEFT and bitsandbytes."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

from fsdp_bench.catalog import loader
from fsdp_bench.plan.estimate import predict_memory
from fsdp_bench.plan.export.chosen import chosen_by_prediction
from fsdp_bench.plan.question import Question, answer
from fsdp_bench.simulate.operators.kernels import CUDA, kernels_on
from fsdp_bench.spec.lora import LoRA
from fsdp_bench.spec.recording.model import RecordedModel
from fsdp_bench.spec.setup import TrainSetup
from fsdp_bench.train.recording.subjects import huggingface
from tests.on_stand_in.plan.exporting import predicted, rehearsed
from tests.on_stand_in.rehearsing import SCRIPTS, rehearse
from tests.simulate.recorded.recording import record_here

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
}
"""The model of scripts/peft_loop.py."""

VARIANTS = {"fsdp1": ("bf16", "bf16 adapters apart"), "fsdp2": ("bf16", "bf16 cast at blocks")}
"""The variants of a recording that the setups below use. All variants take a minute more."""

SETUPS = {
    "fsdp1": TrainSetup(api="fsdp1", wrap="block-and-adapters", world_size=8, sequence_length=2048, precision="bf16"),
    "fsdp2": TrainSetup(api="fsdp2", world_size=8, sequence_length=2048, precision="bf16", checkpointing="full"),
}


GPU = "H100-SXM"


@cache
def _recorded(kind: str, api: str) -> RecordedModel:
    lora = LoRA(rank=16, targets=("q_proj", "v_proj"), base="nf4" if kind == "qlora" else "bf16")
    return record_here(huggingface, CONFIG, 2048, lora, variants=VARIANTS[api])


CASES = [
    ("lora", "fsdp1"),
    ("qlora", "fsdp2"),
    pytest.param("lora", "fsdp2", marks=pytest.mark.slow),
    pytest.param("qlora", "fsdp1", marks=pytest.mark.slow),
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kind", "api"), CASES)
def test_allocated_is_that_of_a_rehearsal_within_one_percent(kind: str, api: str, tmp_path: Path) -> None:
    setup = SETUPS[api]
    kernels = kernels_on(CUDA, loader.gpu(GPU))
    predicted = predict_memory(_recorded(kind, api), setup, kernels, rank=0).phases
    words = [str(SCRIPTS / "peft_loop.py"), kind, api, *(["checkpointing"] if setup.checkpointing == "full" else [])]
    given = ("--gpu", GPU, "--world-size", "8", "--steps", "3")
    found = rehearse(*given, "--", *words, command="torchrun", folder=tmp_path)
    assert found.code == 0, found.output
    third = {span["phase"]: span["allocated_bytes"] for span in found.document["spans"] if span["step"] == 3}
    for phase in ("forward", "backward"):
        assert predicted[phase] == pytest.approx(third[phase], rel=0.01), phase


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kind", "api"), CASES)
def test_the_exported_script_needs_what_was_predicted(kind: str, api: str, tmp_path: Path) -> None:
    """To the byte; of QLoRA each layer has a copy of a table of 256 numbers, of which the recording counts one.

    bitsandbytes 0.50, functional.py, quantize_blockwise: ``code.to(A.device, copy=True)``.
    """
    question = Question(_recorded(kind, api), SETUPS[api], loader.gpu(GPU))
    one = chosen_by_prediction(answer(question), CONFIG, "fsdp-bench predict --lora 16")
    expected, found = predicted(one), rehearsed(one, "pytorch", tmp_path)
    copies = 8 * 7 * 256 * 4 if kind == "qlora" else 0  # blocks, their linear layers
    assert found["backward"] == expected["backward"] + copies
    assert found["forward"] == max(expected["forward"], expected["loss"]) + copies
