"""LoRA and QLoRA as they come recorded: against rehearsals of a real loop, with PEFT's and bitsandbytes' CUDA code."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

from fsdp_bench.catalog import loader
from fsdp_bench.catalog.adapters import ADAPTERS
from fsdp_bench.catalog.architectures import recorded_architecture
from fsdp_bench.plan.estimate import predict_memory
from fsdp_bench.simulate.operators.kernels import CUDA, kernels_on
from fsdp_bench.spec.lora import LoRA
from fsdp_bench.spec.recording.model import RecordedModel
from fsdp_bench.spec.setup import TrainSetup
from tests.on_stand_in.rehearsing import SCRIPTS, rehearse

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

SETUPS = {
    "fsdp1": TrainSetup(api="fsdp1", wrap="block-and-adapters", world_size=8, sequence_length=2048, precision="bf16"),
    "fsdp2": TrainSetup(api="fsdp2", world_size=8, sequence_length=2048, precision="bf16", checkpointing="full"),
}


def _recorded(kind: str) -> RecordedModel:
    lora = LoRA(rank=16, targets=("q_proj", "v_proj"), base="nf4" if kind == "qlora" else "bf16")
    return recorded_architecture(CONFIG, 2048, kind, ADAPTERS, lora)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kind", "api"),
    [
        ("lora", "fsdp1"),
        ("qlora", "fsdp2"),
        pytest.param("lora", "fsdp2", marks=pytest.mark.slow),
        pytest.param("qlora", "fsdp1", marks=pytest.mark.slow),
    ],
)
def test_allocated_is_that_of_a_rehearsal_within_one_percent(kind: str, api: str, tmp_path: Path) -> None:
    gpu = "H100-SXM"
    setup = SETUPS[api]
    kernels = kernels_on(CUDA, loader.gpu(gpu))
    predicted = predict_memory(_recorded(kind), setup, kernels, rank=0).phases
    words = [str(SCRIPTS / "peft_loop.py"), kind, api, *(["checkpointing"] if setup.checkpointing == "full" else [])]
    given = ("--gpu", gpu, "--world-size", "8", "--steps", "3")
    found = rehearse(*given, "--", *words, command="torchrun", folder=tmp_path)
    assert found.code == 0, found.output
    third = {span["phase"]: span["allocated_bytes"] for span in found.document["spans"] if span["step"] == 3}
    for phase in ("forward", "backward"):
        assert predicted[phase] == pytest.approx(third[phase], rel=0.01), phase
