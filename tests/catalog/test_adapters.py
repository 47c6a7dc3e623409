"""Recordings with PEFT's adapters: what holds for which adapters, and that nothing has to be installed for them."""

import json
from pathlib import Path
from typing import Any

import pytest

from fsdp_bench.catalog.architectures import ADAPTERS, USUAL, NotRecorded, folder_of
from fsdp_bench.catalog.loader import model, models
from fsdp_bench.catalog.lookup import adapted_model
from fsdp_bench.catalog.recorded import read_recorded
from fsdp_bench.spec.lora import LoRA
from tests.conftest import json_of, stdout_of
from tools.recordings import LONG, SHORT, file_name

LLAMA = "Llama-3.1-8B"
HIDDEN, KEYS, INSIDE, LAYERS = 4096, 1024, 14336, 32
"""Llama-3.1-8B's config.json: 8 heads of 128 for keys and values."""
ALL = "q_proj+k_proj+v_proj+o_proj+gate_proj+up_proj+down_proj"


def trained(rank: int, targets: str) -> int:
    """Return the parameters of adapters: for each linear layer rank x (its inputs + its outputs)."""
    kv = HIDDEN + KEYS
    each = {"q_proj": 2 * HIDDEN, "k_proj": kv, "v_proj": kv, "o_proj": 2 * HIDDEN}
    return LAYERS * rank * sum(each.get(name, HIDDEN + INSIDE) for name in targets.split("+"))


@pytest.mark.parametrize("usual", USUAL, ids=lambda usual: folder_of(usual).name)
@pytest.mark.parametrize("rank", [8, 64])
def test_usual_adapters_of_any_rank_are_found(usual: LoRA, rank: int) -> None:
    named = ALL if usual.targets else "q_proj+v_proj"
    for targets in (usual.targets, tuple(named.split("+"))):
        lora = LoRA(rank=rank, alpha=32, targets=targets, base=usual.base)
        found = adapted_model(LLAMA, 1024, lora)
        assert found.num_trained_parameters == trained(rank, named)
        assert found.num_parameters - found.num_trained_parameters == 8_030_261_248  # Hugging Face's model card
        assert found.code.origin.lora == lora
        assert found.name == f"{LLAMA} with {lora.title}"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"targets": ("q_proj", "k_proj")}, "targets 'q_proj+k_proj', recorded with "),
        ({"dropout": 0.1}, "dropout 0.1, recorded with 0"),
        ({"bias": "all"}, "bias all"),
        ({"modules_to_save": ("lm_head",)}, "modules_to_save lm_head"),
        ({"rank": 1}, "adapters of rank 1"),
        ({"base": None}, "was not recorded"),
    ],
)
def test_other_adapters_are_not_taken_for_usual_ones(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(NotRecorded, match=r"Llama-3.1-8B with LoRA") as caught:
        adapted_model(LLAMA, 1024, LoRA(**{"base": "bf16", **fields}))
    assert said in str(caught.value)


def test_weights_whose_last_block_of_scales_is_not_full_are_not_taken_for_others(tmp_path: Path) -> None:
    """bitsandbytes quantizes the scales of 64 x 256 weights together: 128 x 64 are half as many."""
    config = model(LLAMA).hf_config() | {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4}
    config |= {"head_dim": 16, "intermediate_size": 512, "num_hidden_layers": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(NotRecorded, match="weights in 4 bits that are no multiple of 16384"):
        adapted_model(tmp_path / "config.json", 1024, LoRA(base="nf4"))
    assert adapted_model(tmp_path / "config.json", 1024, LoRA(base="bf16")).hidden_size == 128


def test_every_recording_is_found_for_the_model_that_it_is_named_after_and_says_with_what_it_was_made() -> None:
    for usual in USUAL:
        for path in folder_of(usual).glob("*.json.xz"):
            recorded = read_recorded(path)
            assert path.stat().st_size < 200_000
            assert {"torch", "transformers", *usual.packages} <= recorded.origin.versions.keys()
            assert folder_of(recorded.origin.lora, ADAPTERS) == path.parent
            (entry,) = (each for each in models() if file_name(each, recorded) == path.name)
            length = LONG if recorded.architecture.side == "beyond" else SHORT
            assert adapted_model(entry.name, length, usual).code.architecture == recorded.architecture


@pytest.mark.parametrize(
    "words",
    [
        f"max-size --model {LLAMA} --lora 16 --gpu RTX-4090 --of sequence_length",
        "predict --model Llama-3.1-70B --qlora 16 --gpu H100-SXM --seq 1024 --checkpointing full",
    ],
)
def test_commands_answer_without_recording(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsdp_bench.plan.recording.recorded_config", None)
    assert "fits" in stdout_of(*words.split(), cwd=tmp_path)


def test_a_plan_with_adapters_needs_no_units_that_fsdp1_refuses() -> None:
    """The fastest that a setting can be is FSDP1's computation, whose units flatten no adapters in fp32 with bf16."""
    words = "plan --model Llama-3.1-8B --qlora 16 --server g5.48xlarge --nodes 1 --strategy FULL_SHARD --api fsdp2"
    found = json_of(*words.split(), "--checkpointing", "full", "--batch", "1", "--offload", "none")
    assert found["winner"]["setup"]["api"] == "fsdp2"
