"""torchtitan's code of the catalogue's models, as it was recorded: lookup, refusals, and what its modules are."""

from __future__ import annotations

import pytest

from fsdp_bench.catalog.architectures import FOLDERS
from fsdp_bench.catalog.loader import models
from fsdp_bench.catalog.lookup import model
from fsdp_bench.catalog.recorded import read_recorded
from fsdp_bench.spec.recording.model import RecordedModel
from tests.conftest import json_of, refused

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
