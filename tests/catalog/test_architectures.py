"""Recordings that come with fsdp-bench: every model of the catalogue is predicted from its config.json, no torch."""

from pathlib import Path
from typing import Any

import pytest

from fsdp_bench.catalog import loader
from fsdp_bench.catalog.architectures import FOLDER, FOLDERS, NotRecorded, recorded_architecture
from fsdp_bench.catalog.loader import models
from fsdp_bench.catalog.lookup import model
from fsdp_bench.catalog.model_entry import ModelEntry
from fsdp_bench.catalog.recorded import read_recorded
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.recording.config import layer_kinds, loops_over_sequence
from fsdp_bench.spec.recording.model import RecordedModel
from tests.conftest import json_of, message_of, refused
from tools.recordings import LONG, LOOPED, SHORT, file_name

EVERY = pytest.mark.parametrize("entry", models(), ids=lambda entry: entry.name)

BUFFERS = {"DeepSeek-V3"}
"""Published counts that hold what is no parameter of the recorded code."""

UNTIED = {"flan-t5-small", "flan-t5-base", "flan-t5-large", "flan-t5-xl", "flan-t5-xxl"}
"""Their files hold the head apart; configuration_t5.py of transformers 5 ties it always."""


@EVERY
@pytest.mark.parametrize("length", [SHORT, LONG])
def test_every_model_has_a_recording_with_the_published_number_of_parameters(entry: ModelEntry, length: int) -> None:
    if loops_over_sequence(entry.hf_config()):
        length = LOOPED
    found = recorded_architecture(entry.hf_config(), length, entry.name)
    assert found.name == entry.name
    expected = entry.num_parameters
    if entry.name in UNTIED:
        expected -= entry.vocab_size * entry.hidden_size
    assert expected in (found.num_parameters, None) or entry.name in BUFFERS
    assert found.num_hidden_layers == entry.num_hidden_layers


def test_the_folder_holds_recordings_alone() -> None:
    assert {path.name for path in FOLDER.iterdir() if path.is_file()} == {
        path.name for path in FOLDER.glob("*.json.xz")
    }


def config(**changed: Any) -> dict[str, Any]:
    return {**loader.model("Qwen2.5-7B").hf_config(), **changed}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"model_type": "no-such"}, "model_type 'no-such' was not recorded; bert,"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu', recorded with 'silu'"),
        ({"attention_dropout": 0.1}, "attention_dropout True, recorded with None"),
        ({"architectures": ["Qwen2ForTokenClassification"]}, "recorded was Qwen2ForCausalLM"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_size": 28 * 100}, "head_width 'no multiple of 8', recorded with None"),
        ({"hidden_size": 28 * 18}, "head_width 'no multiple of 4', recorded with None"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling ['longrope']"),
        ({"num_hidden_layers": 1}, "num_hidden_layers: 1 is not allowed"),
        ({"num_hidden_layers": [28]}, "num_hidden_layers: [28] is not allowed; a positive whole number"),
        ({"num_key_value_heads": [4]}, "num_key_value_heads: [4] is not allowed; a positive whole number"),
        ({"num_key_value_heads": 5}, "num_key_value_heads: 5 is not allowed; a divisor of the 28 attention heads"),
    ],
)
def test_a_config_that_was_not_recorded_is_refused_with_the_reason(changed: dict[str, Any], expected: str) -> None:
    assert expected in message_of(lambda: recorded_architecture(config(**changed), SHORT, "mine"), NotRecorded)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"hidden_size": "wide"}, "hidden_size: 'wide' is not allowed; a positive whole number"),
        ({"num_attention_heads": 27}, "a multiple of the 27 attention heads"),
        ({"layer_types": ["full_attention"]}, "layer_types: has 1 items for 28 layers"),
        ({"layer_types": 5}, "layer_types: 5 is not allowed; a list with the kind of each layer"),
        ({"architectures": 5}, "architectures: 5 is not allowed; a list of class names"),
        ({"model_type": "*"}, "model_type '*' was not recorded"),
        ({"model_type": "/etc"}, "model_type '/etc' was not recorded"),
    ],
)
def test_a_config_that_no_model_can_have_is_refused(changed: dict[str, Any], expected: str) -> None:
    assert expected in message_of(lambda: recorded_architecture(config(**changed), SHORT, "mine"))


@pytest.mark.parametrize("kinds", [4096, "linear_attention", {"full_attention": 3}])
def test_a_config_without_a_list_of_layers_is_refused_before_it_is_recorded(kinds: object) -> None:
    with pytest.raises(SpecError, match=r"layer_types: .* is not allowed; a list with the kind of each layer"):
        loops_over_sequence({"model_type": "llama", "layer_types": kinds})
    with pytest.raises(SpecError, match=r"no_rope_layers: .* is not allowed; a list with the kind of each layer"):
        layer_kinds({"num_hidden_layers": 2, "no_rope_layers": kinds})


def test_code_that_loops_over_the_sequence_is_recorded_for_one_length() -> None:
    entry = loader.model("Qwen3-Next-80B-A3B")
    with pytest.raises(NotRecorded, match="sequences of 2048 tokens, over which its code loops; recorded with 4096"):
        recorded_architecture(entry.hf_config(), 2048, entry.name)
    found = recorded_architecture(entry.hf_config(), LOOPED, entry.name)
    assert (found.shortest_sequence, found.longest_sequence) == (LOOPED, LOOPED)


def test_the_number_of_parameters_follows_the_sizes_and_fields_without_effect_on_memory_may_differ() -> None:
    changed = {"rope_theta": 5e5, "eos_token_id": 7, "rms_norm_eps": 1e-5, "rope_scaling": {"rope_type": "yarn"}}
    small = recorded_architecture(config(vocab_size=1000, num_hidden_layers=9, **changed), SHORT, "mine")
    hidden, kv, wide = 28 * 128, 4 * 128, 18944
    block = hidden * hidden * 2 + 2 * hidden * kv + hidden + 2 * kv + 3 * hidden * wide + 2 * hidden
    assert small.num_parameters == 9 * block + 2 * 1000 * hidden + hidden


def test_a_field_that_transformers_also_takes_for_another_one_counts() -> None:
    entry = loader.model("Qwen3-30B-A3B")
    many, few = (recorded_architecture({**entry.hf_config(), "num_experts": n}, SHORT, "mine") for n in (128, 16))
    # By hand: in 48 blocks, an expert has three matrices and a row of the router.
    assert many.num_parameters - few.num_parameters == 48 * (128 - 16) * (3 * 2048 * 768 + 2048)


def test_a_sliding_window_decides_which_recording_is_meant_and_files_are_named_after_it() -> None:
    entry = loader.model("Mistral-7B-v0.1")
    # From 4096 tokens on transformers builds a mask.
    for length, limits, side in ((4095, (1, 4095), "within"), (4096, (4096, None), "beyond")):
        code = recorded_architecture(entry.hf_config(), length, entry.name).code
        assert (code.shortest, code.longest) == limits
        assert file_name(entry, code) == f"mistral.Mistral-7B-v0-1.{side}.json.xz"
        assert (FOLDER / file_name(entry, code)).exists()


def test_a_size_of_the_ladder_has_hugging_faces_code_too() -> None:
    own, theirs = model("7B"), model("7B", code="huggingface")
    assert isinstance(theirs, RecordedModel)
    assert theirs.num_parameters == own.num_parameters
    assert isinstance(model("gpt2", code="huggingface"), RecordedModel)
    with pytest.raises(SpecError, match="code: 'mine' is not allowed; huggingface, torchtitan, benchmark"):
        model("7B", code="mine")


def test_a_config_json_is_hugging_faces_code(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama", "num_hidden_layers": 16, "hidden_size": 512, "intermediate_size": 1024}')
    assert isinstance(model(path), RecordedModel)
    path.write_text('{"model_type": "lla')
    with pytest.raises(SpecError, match=str(path)):
        model(path)


RECORDED = sorted(FOLDERS["torchtitan"].glob("*.json.xz"))
TORCHTITAN = ("--code", "torchtitan", "--world-size", 8)


@pytest.mark.parametrize("entry", [entry for entry in models() if entry.family in ("llama", "qwen3")])
def test_every_llama_and_qwen3_of_the_catalogue_has_torchtitans_code(entry) -> None:  # type: ignore[no-untyped-def]
    theirs, other = (model(entry.name, 4096, code=code) for code in ("torchtitan", "huggingface"))
    assert isinstance(theirs, RecordedModel)
    assert theirs.code.origin.code == "torchtitan"
    assert theirs.num_parameters == other.num_parameters  # the same sizes: only the code is another
    assert theirs.num_hidden_layers == other.num_hidden_layers


def test_predict_says_whose_code_it_is_also_of_a_size_of_the_ladder() -> None:
    assert model("7B", 4096, code="torchtitan").kind == "Llama3Model"
    found = json_of("predict", "--model", "Qwen3-8B", *TORCHTITAN, "--api", "fsdp2")["model"]
    assert (found["code"], found["architecture"]) == ("torchtitan", "Qwen3Model")


def test_recordings_are_small_and_say_with_what_they_were_made() -> None:
    assert {path.name.partition(".")[0] for path in RECORDED} == {"llama", "qwen3"}
    for path in RECORDED:
        assert path.stat().st_size < 30_000
        assert {"torch", "torchtitan"} <= read_recorded(path).origin.versions.keys()


def test_ends_are_the_table_of_tokens_and_the_norm_with_the_head_where_it_is_not_tied() -> None:
    found = {path.name.split(".")[1]: read_recorded(path).ends for path in RECORDED}
    assert found["Llama-2-7B"] == found["Qwen3-8B"] == (("tok_embeddings",), ("norm", "lm_head"))
    assert found["Llama-3-2-1B"] is found["Qwen3-0-6B"] is None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--model", "gpt2"], "torchtitan's code of model_type 'gpt2' was not recorded; llama, qwen3 were"),
        (["--model", "Llama-3.2-1B", "--wrap", "block-and-ends", "--api", "fsdp2"], "a head that is not the table"),
        (["--model", "Llama-3.1-8B", "--lora", "16"], "adapters go into Hugging Face's code"),
        (["--model", "Llama-3.1-8B", "--wrap", "block-and-ends", "--fp32-head"], "fp32_head: the head of a recorded"),
    ],
)
def test_predict_refuses_in_one_line(options: list[str], says: str) -> None:
    assert says in refused("predict", *options, *TORCHTITAN)
