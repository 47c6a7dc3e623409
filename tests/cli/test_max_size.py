"""``fsdp-bench max-size`` as a process: its JSON document, agreement with ``predict``, its text and exit codes."""

import json
import re
from functools import partial
from pathlib import Path

import pytest

from tests.cli.answered_once import answered_once
from tests.conftest import json_of, run_command, stdout_of

ONE_CELL = ("--strategy", "full_shard", "--checkpointing", "full")
G5 = ("--server", "g5.48xlarge")
SETUP = {"strategy", "precision", "offload", "checkpointing", "api", "optimizer", "effective_strategy"}
ANSWER = {"max_parameters", "num_hidden_layers", "hidden_size", "limited_by", "memory", "model", "source", "next"}


document, predicted = partial(json_of, "max-size"), partial(json_of, "predict")


def test_a_cell_has_its_setup_and_what_was_found() -> None:
    """tests/test_same_answer.py holds what was found to predict's answers."""
    found = document(*G5, *ONE_CELL)
    assert (found["server"]["name"], found["server"]["gpu"], found["source"]) == ("g5.48xlarge", "A10G", "predicted")
    assert found["nothing_fits"] is None
    (cell,) = found["cells"]
    assert cell.keys() >= SETUP | ANSWER
    assert cell["precision"] == "bf16-mixed"
    assert cell["runs_parameters"] >= cell["max_parameters"]


def test_the_named_need_with_the_headroom_is_enough_gpu_memory() -> None:
    """The need that is named, with what is kept free, is enough as --gpu-memory; a little less is not."""
    words = ("--server", "p5.48xlarge", "--of", "micro_batch_size", "--model", "Llama-3.1-8B", *ONE_CELL)
    small = document(*words, "--gpu-memory", "24GiB", code=3)
    (cell,) = small["cells"]
    needed = cell["next"]["needed_bytes"]
    assert cell["next"]["headroom_bytes"] == small["server"]["gpu_memory_bytes"] - needed < 0
    assert small["nothing_fits"]["needed_bytes"] == needed
    model = ("--model", "Llama-3.1-8B", "--precision", "bf16-mixed")
    kept = predicted("--server", "p5.48xlarge", *model, *ONE_CELL, code=0)["required_headroom_bytes"]
    assert kept > 2**30
    for memory, code in ((needed + kept, 0), (needed + kept - 2 * 2**20, 3)):
        document(*words, "--gpu-memory", f"{memory}B", code=code)


def test_headroom_is_printed_for_known_and_unknown_communicators() -> None:
    """Shard groups of four of eight GPUs: what HYBRID_SHARD's communicators take is not documented."""
    words = ("--server", "p5.48xlarge", "--nodes", 2, "--shard-size", 4, "--checkpointing", "full")
    words = (*words, "--strategy", "FULL_SHARD,HYBRID_SHARD")
    with answered_once():
        found = document(*words)["cells"]
        text = " ".join(run_command("max-size", *words).stdout.split())
    cells = {cell["strategy"]: cell["memory"]["communicators_bytes"] for cell in found}
    assert cells["FULL_SHARD"]["low"] > 0
    assert cells["HYBRID_SHARD"] is None
    kept = [cell["required_headroom_bytes"] / 2**30 for cell in found]
    assert f"{min(kept):.1f} to {max(kept):.1f} GiB of each GPU kept free, for CUDA and NCCL (an assumption" in text
    assert text.count("users see 1 to 3 GiB") == 1


def test_one_rank_alone_keeps_nothing_free_for_nccl_and_does_not_speak_of_it() -> None:
    text = " ".join(run_command("max-size", "--gpu", "H100-SXM", "--world-size", 1, *ONE_CELL[2:]).stdout.split())
    assert "1.5 GiB of each GPU kept free, for CUDA (an assumption); --headroom" in text


@pytest.mark.parametrize("shard_size", [3, 8])
def test_the_fewest_gpus_of_a_shard_size_are_multiples_of_it(shard_size: int) -> None:
    words = ("--gpu", "H100-SXM", "--model", "gpt2", "--of", "gpus", "--strategy", "HYBRID_SHARD")
    (cell,) = document(*words, "--shard-size", shard_size, "--checkpointing", "full")["cells"]
    assert cell["fits_value"] == 2 * shard_size


def test_a_model_of_few_positions_is_asked_for_no_more_than_it_has(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 128, "n_head": 2, "vocab_size": 1000, "n_positions": 300}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ("--gpu", "A10G", "--world-size", 8, "--hf-config", tmp_path / "config.json", *ONE_CELL)
    (cell,) = document(*words, "--of", "num_hidden_layers")["cells"]
    assert cell["setup"]["sequence_length"] == 288  # the last multiple of 32: for these the code was recorded
    (cell,) = document(*words, "--of", "sequence_length")["cells"]
    assert cell["fits_value"] == 256  # the last multiple of 128
    text = run_command("max-size", *words, "--of", "num_hidden_layers").stdout
    assert f"{tmp_path.name} with other depths: GPT2LMHeadModel, 128 wide" in " ".join(text.split())


def test_a_batch_that_alone_does_not_fit_says_what_it_needs_and_what_would_help() -> None:
    words = (*G5, *ONE_CELL, "--batch", 64, "--seq", 8192)
    printed = stdout_of("max-size", *words, code=3)
    first, *rest = re.sub(r"\n +(?! *(--|more))", " ", printed).splitlines()
    # 64 x 8192 tokens x 32000 words: 12 bytes for each of the logits in backward are 187.5 GiB.
    sentence = r"nothing fits: the smallest model, llama-\S+M, needs (\d+\.\d) GiB of 22\.1 GiB in phase backward, "
    found = re.fullmatch(sentence + r"mostly logits \(predicted\)", first)
    assert found
    assert 187.5 < float(found[1]) < 250  # what is reserved is more than what is live, by a part of it
    assert any("--loss chunked" in line and "(predicted)" in line for line in rest[:3])
    assert any("more GPUs do not help: --nodes 2 still needs" in line for line in rest[:4])
    failed = document(*words, code=3)
    assert failed["cells"][0]["max_parameters"] is None
    assert failed["nothing_fits"]["category"] == "logits"
    assert failed["nothing_fits"]["needed_bytes"] > 12 * 64 * 8192 * 32000


def test_no_picture_is_drawn_where_nothing_fits(tmp_path: Path) -> None:
    path = tmp_path / "none.png"
    done = run_command("max-size", *G5, *ONE_CELL, "--batch", 4096, "--chart", path)
    assert (done.returncode, path.exists()) == (3, False)
    assert "no picture" in done.stderr


TORCHTITAN_ON_V100 = ("--server", "p3dn.24xlarge", "--model", "Llama-3.2-1B", "--code", "torchtitan", *ONE_CELL)
"""Code that is not recorded as on GPUs without FlashAttention."""


def test_what_was_recorded_with_flash_attention_is_unknown_in_16_bits_on_a_gpu_without() -> None:
    words = (*TORCHTITAN_ON_V100, "--of", "micro_batch_size")
    found = document(*words, "--precision", "fp32,bf16-mixed")["cells"]
    assert [cell["max_parameters"] is None for cell in found] == [False, True]
    assert "no FlashAttention for this GPU" in found[1]["unknown"]
    assert found[0].keys() == found[1].keys()
    assert stdout_of("max-size", *words).startswith("p3dn.24xlarge: unknown what fits (predicted)")


def test_several_servers_are_several_answers_of_which_one_may_be_that_nothing_fits() -> None:
    words = ("max-size", *G5, "--server", "p5.48xlarge", "--server", "g5.48xlarge", *ONE_CELL, "--batch", 24)
    with answered_once():
        found, printed = json_of(*words)["servers"], stdout_of(*words)
    assert [one["server"]["name"] for one in found] == ["g5.48xlarge", "p5.48xlarge"]
    assert "g5.48xlarge: nothing fits (predicted)" in printed
    assert "p5.48xlarge: largest model that fits (predicted): llama-" in printed


def test_assumptions_are_noted() -> None:
    words = ("--compile", "--wrap", "size", "--expandable-segments", "--load", "rank-0")
    text = " ".join(run_command("max-size", *G5, *ONE_CELL, *words).stdout.split())
    assert "this is the prediction for eager" in text
    assert "expandable segments" in text
    assert "built in host memory first, by rank 0" in text


def test_the_host_memory_that_limits_offload_is_printed() -> None:
    offloaded = (*ONE_CELL, "--offload", "params")
    alone = run_command("max-size", "--gpu", "H100-SXM", "--world-size", "8", *offloaded)
    assert "host memory is not known" in " ".join(alone.stdout.split())
    (cell,) = document("--server", "p5.48xlarge", *offloaded)["cells"]
    assert cell["limited_by"]["words"].startswith("host memory: ")
    # A node of 2048 GiB; fp32 parameters, gradients and two moments are 16 bytes a parameter, pinned ones more.
    assert cell["memory"]["peak_host_bytes_per_node"] <= 2048 * 1024**3
    assert cell["max_parameters"] < 2048 * 1024**3 / 16
