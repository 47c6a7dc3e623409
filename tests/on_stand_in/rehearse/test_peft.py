"""LoRA and QLoRA as they come recorded, against rehearsals: of a loop, and of exports, by PEFT and bitsandbytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

pytest.importorskip("torch")
pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

from fsdp_bench.catalog import loader
from fsdp_bench.catalog.architectures import ADAPTERS, recorded_architecture
from fsdp_bench.plan.export.chosen import chosen_by_prediction
from fsdp_bench.plan.export.export import export
from fsdp_bench.plan.export.files import write
from fsdp_bench.plan.prediction import answer
from fsdp_bench.plan.question import Question
from fsdp_bench.simulate.operators.kernels import CUDA, kernels_on
from fsdp_bench.spec.hardware import Hardware
from fsdp_bench.spec.lora import LoRA
from fsdp_bench.spec.recording.model import RecordedModel
from fsdp_bench.spec.setup import TrainSetup
from tests.on_stand_in.plan.exporting import predicted, rehearsed
from tests.on_stand_in.rehearsing import SCRIPTS, rehearse
from tests.predicted import memory_of

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 2000,
}
"""The model of scripts/peft_loop.py."""

SETUPS = {
    "fsdp1": TrainSetup(api="fsdp1", wrap="block-and-adapters", world_size=8, sequence_length=2048, precision="bf16"),
    "fsdp2": TrainSetup(api="fsdp2", world_size=8, sequence_length=2048, precision="bf16", checkpointing="full"),
    "none": TrainSetup(api="fsdp2", strategy="NO_SHARD", sequence_length=2048, precision="bf16"),
}


GPU = "H100-SXM"


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


def _phases(kind: str, api: str, setup: TrainSetup, folder: Path, *words: str) -> list[dict[str, int]]:
    """Return the peaks by phase as predicted, and as rehearsed in the third step."""
    peaks_of = memory_of(_recorded(kind), setup, kernels_on(CUDA, loader.gpu(GPU)), rank=0).phases
    given = ("--gpu", GPU, "--world-size", str(setup.world_size), "--steps", "3")
    found = rehearse(*given, "--", str(SCRIPTS / "peft_loop.py"), kind, api, *words, command="torchrun", folder=folder)
    assert found.code == 0, found.output
    third = {span["phase"]: span["allocated_bytes"] for span in found.document["spans"] if span["step"] == 3}
    return [{phase: peaks[phase] for phase in ("forward", "backward")} for peaks in (peaks_of, third)]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kind", "api"), CASES)
def test_allocated_is_that_of_a_rehearsal_within_one_percent(kind: str, api: str, tmp_path: Path) -> None:
    words = ["checkpointing"] if SETUPS[api].checkpointing == "full" else []
    expected, found = _phases(kind, api, SETUPS[api], tmp_path, *words)
    assert expected == pytest.approx(found, rel=0.01)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kind", "api"), CASES)
def test_the_exported_script_needs_what_was_predicted(kind: str, api: str, tmp_path: Path) -> None:
    """But for what the allocator does not split off a block, up to 1 MiB: it depends on what loading left in its cache.

    Under QLoRA each layer has a copy of a table of 256 numbers, of which the recording counts one (bitsandbytes 0.50,
    functional.py, quantize_blockwise: ``code.to(A.device, copy=True)``).
    """
    question = Question(_recorded(kind), SETUPS[api], Hardware.of_gpu(loader.gpu(GPU)))
    one = chosen_by_prediction(answer(question), CONFIG, "fsdp-bench predict --lora 16")
    expected, found = predicted(one), rehearsed(one, "pytorch", tmp_path)
    copies = 8 * 7 * 256 * 4 if kind == "qlora" else 0  # blocks, their linear layers
    assert found["backward"] == pytest.approx(expected["backward"] + copies, abs=2 * NOT_SPLIT)
    assert found["forward"] == pytest.approx(max(expected["forward"], expected["loss"]) + copies, abs=2 * NOT_SPLIT)


@pytest.mark.parametrize(
    ("api", "reentrant"),
    [("fsdp2", "inside"), *(pytest.param("fsdp1", kind, marks=pytest.mark.slow) for kind in ("inside", "around"))],
)
def test_an_exported_script_with_reentrant_checkpoints_trains_adapters(
    api: str, reentrant: str, tmp_path: Path
) -> None:
    setup = replace(SETUPS[api], checkpointing="full", reentrant=reentrant)
    question = Question(_recorded("lora"), setup, Hardware.of_gpu(loader.gpu(GPU)))
    one = chosen_by_prediction(answer(question), CONFIG, "fsdp-bench predict --lora 16")
    assert rehearsed(one, "pytorch", tmp_path)["backward"] == pytest.approx(predicted(one)["backward"], rel=0.005)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("api", "reentrant"),
    [
        ("fsdp1", "around"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("fsdp1", "inside"), ("fsdp2", "inside"))),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("fsdp2", "around"), ("none", "inside"))),
    ],
)
def test_reentrant_checkpointing_allocates_what_is_predicted(api: str, reentrant: str, tmp_path: Path) -> None:
    """Around units of fsdp1 the frozen blocks' inputs and their gradients stay: one hidden state a layer more.

    That is a tenth of the peak.
    """
    setup = replace(SETUPS[api], checkpointing="full", reentrant=reentrant)
    expected, found = _phases("lora", api, setup, tmp_path, "checkpointing", reentrant)
    assert expected == pytest.approx(found, rel=0.005)
    if (api, reentrant) == ("fsdp1", "around"):
        hidden, blocks = 2048 * CONFIG["hidden_size"] * 2, CONFIG["num_hidden_layers"]
        usual = memory_of(_recorded("lora"), replace(setup, reentrant="no"), CUDA, rank=0).phases
        assert found["backward"] > usual["backward"] + (blocks - 2) * hidden


@pytest.mark.timeout(900)
def test_the_exported_script_of_qlora_holds_no_whole_model_in_4_bits(tmp_path: Path) -> None:
    """A rank has its shards, and one layer at a time whole: it needs less to load than all layers take in 4 bits."""
    question = Question(_recorded("qlora"), SETUPS["fsdp2"], Hardware.of_gpu(loader.gpu(GPU)))
    one = chosen_by_prediction(answer(question), CONFIG, "fsdp-bench predict --qlora 16")
    write(export(["pytorch"], one), tmp_path)
    given = ("--gpu", GPU, "--world-size", "8", "--steps", "1")
    found = rehearse(*given, "--", "train_fsdp.py", command="torchrun", folder=tmp_path)
    assert found.code == 0, found.output
    layers_in_4_bits = 8 * (2 * 1024 * 1024 + 2 * 1024 * 256 + 3 * 1024 * 3584) // 2
    assert found.document["memory"]["phases"]["load"] < layers_in_4_bits
