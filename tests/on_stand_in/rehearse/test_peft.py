"""LoRA and QLoRA as they come recorded, against rehearsals of exported scripts, by PEFT and bitsandbytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from fsdp_bench.catalog import loader
from fsdp_bench.catalog.architectures import ADAPTERS, recorded_architecture
from fsdp_bench.plan.export.chosen import Chosen, chosen_by_prediction
from fsdp_bench.plan.export.files import write
from fsdp_bench.plan.prediction import answer
from fsdp_bench.plan.question import Question
from fsdp_bench.simulate.operators.kernels import CUDA
from fsdp_bench.spec.hardware import Hardware
from fsdp_bench.spec.lora import LoRA
from fsdp_bench.spec.recording.model import RecordedModel
from fsdp_bench.spec.setup import TrainSetup
from tests.on_stand_in.plan.exporting import predicted, rehearsed
from tests.on_stand_in.rehearsing import rehearse
from tests.plan.export.settings import export
from tests.predicted import memory_of
from tests.shapes import llama_config

CONFIG = llama_config(
    **{"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 8, "vocab_size": 2000},
    **{"num_attention_heads": 16, "num_key_value_heads": 4},
)
SETUPS = {
    "fsdp1": TrainSetup(api="fsdp1", wrap="block-and-adapters", world_size=8, sequence_length=2048, precision="bf16"),
    "fsdp2": TrainSetup(api="fsdp2", world_size=8, sequence_length=2048, precision="bf16", checkpointing="full"),
    "none": TrainSetup(api="fsdp2", strategy="NO_SHARD", sequence_length=2048, precision="bf16"),
}


def _chosen(kind: str, setup: TrainSetup) -> Chosen:
    question = Question(_recorded(kind), setup, Hardware.of_gpu(loader.gpu("H100-SXM")))
    return chosen_by_prediction(answer(question), CONFIG, f"fsdp-bench predict --{kind} 16")


def _recorded(kind: str) -> RecordedModel:
    lora = LoRA(rank=16, targets=("q_proj", "v_proj"), base="nf4" if kind == "qlora" else "bf16")
    return recorded_architecture(CONFIG, 2048, kind, ADAPTERS, lora)


NOT_SPLIT = 2**20
"""kSmallSize in c10/cuda/CUDACachingAllocator.cpp: a remainder up to this stays with a large block."""

CASES = [
    ("lora", "fsdp1"),
    ("qlora", "fsdp2"),
    pytest.param("lora", "fsdp2", marks=pytest.mark.slow),
    pytest.param("qlora", "fsdp1", marks=pytest.mark.slow),
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kind", "api"), CASES)
def test_the_exported_script_needs_what_was_predicted(kind: str, api: str, tmp_path: Path) -> None:
    """But for what the allocator does not split off a block, up to 1 MiB: it depends on what loading left in its cache.

    Under QLoRA each layer has a copy of a table of 256 numbers, of which the recording counts one (bitsandbytes 0.50,
    functional.py, quantize_blockwise: ``code.to(A.device, copy=True)``).
    """
    one = _chosen(kind, SETUPS[api])
    expected, found = predicted(one), rehearsed(one, "pytorch", tmp_path)
    copies = 8 * 7 * 256 * 4 if kind == "qlora" else 0  # blocks, their linear layers
    assert found["backward"] == pytest.approx(expected["backward"] + copies, abs=2 * NOT_SPLIT)
    assert found["forward"] == pytest.approx(max(expected["forward"], expected["loss"]) + copies, abs=2 * NOT_SPLIT)


@pytest.mark.parametrize(
    ("api", "reentrant"),
    [
        *(("fsdp2", "inside"), ("fsdp1", "around")),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("fsdp1", "inside"), ("fsdp2", "around"))),
        pytest.param("none", "inside", marks=pytest.mark.slow),
    ],
)
def test_an_exported_script_with_reentrant_checkpoints_needs_what_was_predicted(
    api: str, reentrant: str, tmp_path: Path
) -> None:
    """Around units of fsdp1 the frozen blocks' inputs and their gradients stay: one hidden state a layer more.

    That is a tenth of the peak.
    """
    setup = replace(SETUPS[api], checkpointing="full", reentrant=reentrant)
    one = _chosen("lora", setup)
    found = rehearsed(one, "pytorch", tmp_path)
    assert found["backward"] == pytest.approx(predicted(one)["backward"], rel=0.005)
    if (api, reentrant) == ("fsdp1", "around"):
        hidden, blocks = 2048 * CONFIG["hidden_size"] * 2, CONFIG["num_hidden_layers"]
        usual = memory_of(_recorded("lora"), replace(setup, reentrant="no"), CUDA, rank=0).phases
        assert found["backward"] > usual["backward"] + (blocks - 2) * hidden


@pytest.mark.timeout(900)
def test_the_exported_script_of_qlora_holds_no_whole_model_in_4_bits(tmp_path: Path) -> None:
    """A rank has its shards, and one layer at a time whole: it needs less to load than all layers take in 4 bits."""
    write(export(["pytorch"], _chosen("qlora", SETUPS["fsdp2"])), tmp_path)
    given = ("--gpu", "H100-SXM", "--world-size", "8", "--steps", "1")
    found = rehearse(*given, "--", "train_fsdp.py", command="torchrun", folder=tmp_path)
    layers_in_4_bits = 8 * (2 * 1024 * 1024 + 2 * 1024 * 256 + 3 * 1024 * 3584) // 2
    assert found.document["memory"]["phases"]["load"] < layers_in_4_bits
