"""``fsdp-bench predict`` as a process: its JSON document, its exit codes, its text and its imports.

gpt2 has 124,439,808 parameters and Llama-3.1-8B 8,030,261,248 (their published checkpoints; tests/catalog). A
p5.48xlarge has 8 GPUs with about 85e9 usable bytes each.
"""

import json
import re
from functools import partial
from pathlib import Path

import pytest

from tests.cli.answered_once import answered_once
from tests.conftest import json_of, run_command, stdout_of
from tests.report.charts.pictures import assert_is_a_slide

GPT2 = ("--model", "gpt2", "--server", "p5.48xlarge", "--precision", "fp32")
LLAMA = ("--model", "Llama-3.1-8B", "--server", "p5.48xlarge")
LLAMA_70B = ("--model", "Llama-3.1-70B", "--server", "p5.48xlarge", "--precision", "fp32")
FP32 = ("--precision", "fp32", "--seq", "1024")
NUM_PARAMETERS = 124_439_808
CATEGORIES = {
    *("parameters", "unsharded_parameters", "gradients", "reduction_buffers"),
    *("optimizer_state", "activations", "logits", "temporary"),
}
TIMES = {
    *("step_seconds", "compute_seconds", "communication_seconds", "exposed_communication_seconds"),
    *("tokens_per_second_per_gpu", "mfu"),
}


document = partial(json_of, "predict")


def test_the_document_has_the_keys_of_the_design() -> None:
    found = document(*GPT2)
    assert {"source", "model", "setup", "server", "memory", "time", "fits", "headroom_bytes"} <= found.keys()
    assert found["source"] == "predicted"
    assert {"name", "family", "num_parameters", "num_hidden_layers", "hidden_size"} <= found["model"].keys()
    setup = ("strategy", "effective_strategy", "api", "precision", "offload", "checkpointing", "optimizer")
    assert {*setup, "world_size", "shard_size", "micro_batch_size", "sequence_length"} <= found["setup"].keys()
    assert {"name", "gpu", "gpu_memory_bytes"} <= found["server"].keys()
    assert {
        *("peak_allocated_bytes", "peak_reserved_bytes", "peak_device_bytes", "peak_host_bytes_per_node"),
        *("peak_phase", "phases", "breakdown_bytes", "communicators_bytes", "communicators"),
    } <= found["memory"].keys()
    assert {"forward", "loss", "backward", "optimizer"} <= found["memory"]["phases"].keys()
    assert set(found["memory"]["breakdown_bytes"]) == CATEGORIES
    assert found["time"].keys() >= TIMES


def test_traffic_is_printed_by_kind_with_its_time_on_the_servers_links() -> None:
    """12 blocks are gathered twice and the root once; everything is reduced once. fp32."""
    found = document(*GPT2)
    kinds = {one["kind"]: one for one in found["communication"]}
    assert {kind: (one["calls"], one["group"], one["group_size"]) for kind, one in kinds.items()} == {
        "all_gather": (25, "shard", 8),
        "reduce_scatter": (13, "shard", 8),
    }
    assert kinds["reduce_scatter"]["message_bytes"] == pytest.approx(4 * NUM_PARAMETERS, rel=1e-5)
    total = sum(one["seconds"] for one in found["communication"])
    assert found["time"]["communication_seconds"] == pytest.approx(total)  # one communicator: one after another
    time = found["time"]
    assert 0 < time["exposed_communication_seconds"] < time["communication_seconds"]
    assert time["step_seconds"] >= time["compute_seconds"] + time["exposed_communication_seconds"]
    assert time["tokens_per_second_per_gpu"] == pytest.approx(1024 / time["step_seconds"])
    assert 0 < time["mfu"] == time["hfu"] < 1
    assert (time["rates"], time["unknown"]) == ("datasheet", [])
    assert (
        total > sum(one["message_bytes"] for one in found["communication"]) * 7 / 8 / 450e9
    )  # the links' nominal rate


def test_other_weights_of_an_architecture_are_predicted_as_it_and_the_answer_says_so() -> None:
    done = run_command("predict", "--model", "meta-llama/Llama-3.1-8B-Instruct,Llama-3.1-8B", "--json")
    assert done.stderr == (
        "note: meta-llama/Llama-3.1-8B-Instruct has the architecture of Llama-3.1-8B, which is predicted\n"
    )
    tuned, base = json.loads(done.stdout)["predictions"]
    assert tuned["model"] == base["model"]
    assert tuned["model"]["name"] == "Llama-3.1-8B"


def test_unknown_values_are_null() -> None:
    alone = document("--model", "gpt2")
    assert (alone["fits"], alone["headroom_bytes"]) == (None, None)
    assert set(alone["server"].values()) == {None}
    assert alone["memory"]["peak_device_bytes"] is None
    assert alone["communication"] == []
    assert alone["time"].pop("unknown") == ["the hardware"]
    assert alone["time"].pop("cpu_optimizer_seconds") == 0  # nothing is offloaded
    assert set(alone["time"].values()) == {None}
    somewhere = document("--model", "gpt2", "--gpu", "A100-SXM-80GB", "--world-size", "8")
    time = somewhere["time"]
    assert time["unknown"] == ["all_gather (shard)", "reduce_scatter (shard)"]
    assert time["compute_seconds"] > 0
    assert {time[name] for name in TIMES - {"compute_seconds"}} == {None}
    assert {one["seconds"] for one in somewhere["communication"]} == {None}
    on_cpu = document(*GPT2, "--kernels", "cpu")
    assert (on_cpu["kernels"], on_cpu["fits"], on_cpu["memory"]["peak_reserved_bytes"]) == ("cpu", None, None)


def test_exit_code_3_says_that_it_does_not_fit() -> None:
    """Parameters, gradients and two moments, all in fp32: 16 x 8.03e9 = 128e9 bytes, more than the card's 85e9."""
    words = ("predict", *LLAMA, *FP32, "--strategy", "ddp")
    with answered_once():
        found, printed = json_of(*words, code=3), stdout_of(*words, code=3)
    assert found["fits"] is False
    assert found["headroom_bytes"] < 85e9 - 16 * 8.03e9
    assert found["memory"]["peak_reserved_bytes"] is None  # it never got so far
    assert found["memory"]["out_of_memory"]["reserved_bytes"] <= found["server"]["gpu_memory_bytes"]
    assert printed.startswith("does not fit (predicted): ")
    assert "mostly optimizer state" in " ".join(printed.split("\n\n")[0].split())  # 8 of the 16 bytes a parameter


def test_host_memory_counts_who_builds_the_model() -> None:
    """One copy in fp32 is 4 bytes a parameter; every rank of a node of 8 makes 8 of them."""
    for load, copies in (("meta", 0), ("rank-0", 1), ("every-rank", 8)):
        memory = document(*GPT2, "--load", load)["memory"]
        assert memory["peak_host_bytes_per_node"] == copies * 4 * NUM_PARAMETERS
    # A GPU's name does not tell how many ranks share a node's memory.
    words = ("--model", "gpt2", "--gpu", "h100-sxm", "--world-size", "8", "--load", "every-rank")
    assert document(*words)["memory"]["peak_host_bytes_per_node"] is None


def test_the_setup_tells_what_really_runs() -> None:
    setup = document("--model", "gpt2")["setup"]
    assert (setup["strategy"], setup["effective_strategy"], setup["shard_size"]) == ("FULL_SHARD", "NO_SHARD", 1)
    hybrid = document(*GPT2, "--nodes", "2", "--strategy", "hsdp")["setup"]
    assert (hybrid["world_size"], hybrid["shard_size"]) == (16, 8)
    assert document(*GPT2, "--compile", "--wrap", "size")["for_eager"] is True
    assert document("--model", "gpt2", "--server", "p5.48xlarge", "--compile")["for_eager"] is False


def test_several_setups_are_one_document_and_one_table_where_what_cannot_run_has_its_reason() -> None:
    words = ("predict", "--model", "gpt2", "--gpu", "h100-sxm", "--world-size", 2, "--strategy", "all")
    with answered_once():
        predictions, printed = json_of(*words)["predictions"], stdout_of(*words)
    names = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]
    assert [found["setup"]["strategy"] for found in predictions] == names
    assert [found["impossible"] is None for found in predictions] == [True, True, True, False, False]
    assert "needs at least 2 groups of at least 2 ranks" in predictions[3]["impossible"]
    assert (predictions[3]["memory"], predictions[3]["fits"]) == (None, None)
    assert predictions[3].keys() == predictions[0].keys()
    rows = [line.split()[0] for line in printed.splitlines() if line.startswith(("FULL_", "SHARD_", "NO_"))]
    assert rows == names[:3]
    assert "in all rows: " in printed
    assert "fits yes" in " ".join(printed.split())
    assert printed.count("impossible: ") == 2
    assert printed.startswith("of the 3 that fit, ")


def test_one_of_several_setups_that_fits_is_enough_for_exit_code_0() -> None:
    assert run_command("predict", *LLAMA, *FP32, "--strategy", "ddp,zero3").returncode == 0
    assert run_command("predict", *LLAMA, "--strategy", "ddp", "--api", "all").returncode == 3


@pytest.mark.parametrize(
    "words",
    [
        (*LLAMA, *FP32, "--strategy", "ddp"),
        (*LLAMA, *FP32, "--strategy", "zero2", "--batch", "4"),
        (*LLAMA, "--nodes", "4", "--seq", "32768"),
        pytest.param((*LLAMA_70B, "--nodes", "2", "--seq", "8192", "--batch", "2"), marks=pytest.mark.slow),
    ],
)
def test_remedies_that_are_said_to_fit_do_fit(words: tuple[str, ...]) -> None:
    printed = stdout_of("predict", *words, code=3)
    promised = re.findall(r"^  (--.*): fits, reserved", printed.replace("\n    ", " "), re.MULTILINE)
    assert promised
    for switches in promised:
        assert run_command("predict", *replaced(words, switches.split())).returncode == 0


def replaced(words: tuple[str, ...], switches: list[str]) -> list[str]:
    """Return the words with other options, each with its value, in place of those of the same name."""
    options = dict(zip(words[::2], words[1::2], strict=True)) | dict(zip(switches[::2], switches[1::2], strict=True))
    return [word for option in options.items() for word in option]


def test_assumptions_are_notes_of_the_document() -> None:
    found = document(*LLAMA, "--seq", 200_000, "--compile", "--wrap", "size", code=3)
    compiled, _, beyond = found["notes"]  # the other is about cuDNN's attention
    assert compiled.endswith("for eager")
    assert beyond == "200000 tokens are beyond the 131072 positions of Llama-3.1-8B"
    assert run_command("predict", *GPT2, "--compile", "--wrap", "size").stdout.startswith(
        "in eager it fits (predicted): "
    )


def test_a_prediction_in_float8_says_what_its_rates_rest_on() -> None:
    given = ("--model", "Llama-3.1-8B", "--code", "benchmark", "--server", "p5en.48xlarge", "--api", "fsdp2")
    words = (*given, "--compile", "--float8", "tensorwise", "--checkpointing", "full", "--batch", 2)
    (said,) = (note for note in document(*words)["notes"] if note.startswith("float8: "))
    assert "one H100 of 700 W, which H200-SXM is taken to reach, too" in said
    assert said in " ".join(stdout_of("predict", *words).split())


def test_a_picture_leaves_standard_output_to_the_document(tmp_path: Path) -> None:
    printed = stdout_of("predict", *GPT2, "--json", "--chart", tmp_path / "step.png")
    assert json.loads(printed)["source"] == "predicted"
    assert_is_a_slide(tmp_path / "step.png")


def test_a_setup_that_runs_with_retries_does_not_fit_and_is_said_to_run() -> None:
    words = ("--model", "gpt2-xl", "--server", "p5.48xlarge", "--precision", "bf16-mixed", "--seq", 1024)
    ample = document(*words)
    size = ample["memory"]["needed_bytes"] + ample["required_headroom_bytes"] - 2**20
    printed = stdout_of("predict", *words, "--gpu-memory", f"{size}B", code=3)
    retries = r"does not fit, but runs with \d allocation retr(y|ies) in the first 4 steps, none later"
    assert re.match(rf"{retries} \(predicted\): ", " ".join(printed.split()))
    assert "without the time of the retries" not in printed  # later steps have none
    several = run_command("predict", *words, "--gpu-memory", f"{size}B", "--strategy", "zero3,ddp")
    assert "NO: retries" in several.stdout


@pytest.mark.parametrize(("width", "layers"), [(2**18, 8), (2**20, 8), (2**20, 200), (2**24, 1000)])
@pytest.mark.parametrize("more", [(), ("--expandable-segments",)])
def test_absurd_sizes_are_answered_or_refused_in_one_line(
    width: int, layers: int, more: tuple[str, ...], tmp_path: Path
) -> None:
    """Peaks of 4 TiB to an exbibyte on one GPU; what is predicted is printed with what it needs, and larger than it."""
    config = {"model_type": "llama", "num_hidden_layers": layers, "vocab_size": 32000, "max_position_embeddings": 4096}
    config |= dict.fromkeys(("hidden_size", "intermediate_size"), width)
    config |= dict.fromkeys(("num_attention_heads", "num_key_value_heads"), width // 128)
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ("--hf-config", tmp_path / "config.json", "--server", "p5.48xlarge", "--strategy", "NO_SHARD", *more)
    words += ("--api", "fsdp1")
    done = run_command("predict", *words, "--json")
    if width < 2**24:
        memory = json.loads(done.stdout)["memory"]
        assert done.returncode == 3
        assert 0 < memory["peak_allocated_bytes"] <= memory["needed_bytes"]
    else:
        assert (done.returncode, done.stderr) == (2, "")
        assert "GiB on one GPU is not predicted; up to 3.4e+07 GiB" in json.loads(done.stdout)["error"]


def test_time_over_pcie_says_what_it_rests_on() -> None:
    words = ("predict", "--model", "gpt2", "--precision", "bf16-mixed", "--seq", 512, "--server")
    printed, alone, nvlink = (
        run_command(*words, *where).stdout
        for where in (("g5.48xlarge",), ("g5.48xlarge", "--world-size", 1), ("p5.48xlarge",))
    )
    assert "tokens/s per GPU" in printed
    assert "NCCL's model of its links, over PCIe perhaps far too fast" in " ".join(printed.split())
    assert "PCIe" not in alone + nvlink


def test_compiled_blocks_are_predicted_and_the_answer_says_what_they_are() -> None:
    done = run_command("predict", *LLAMA, "--compile", "--batch", 2)
    text = " ".join(done.stdout.split())
    assert not done.stdout.startswith("in eager")
    assert "compiled blocks as torch 2.13.0 compiles them" in text
    assert "(predicted, for compiled blocks)" in text


def test_a_power_limit_is_part_of_the_hardware_and_slows_matrix_products_alone() -> None:
    """An H100's run at a constant voltage: (500 - 72) of (700 - 72) W of power above the static one is the clock."""
    asked = (*LLAMA, "--cuda", "12.8")
    limited, default = document(*asked, "--power", "500W"), document(*asked)
    assert (limited["server"]["gpu_power_watts"], default["server"]["gpu_power_watts"]) == (500, 700)
    assert limited["server"]["gpu_power_source"]["title"] == "as stated, --power"
    slow, fast = (one["time"]["parts_seconds"] for one in (limited, default))
    ratios = {part: slow[part] / fast[part] for part in ("matrix_products", "attention", "optimizer")}
    assert ratios.pop("matrix_products") == pytest.approx(628 / 428, rel=0.02)  # few are bound by memory
    assert list(ratios.values()) == pytest.approx([1.0, 1.0], rel=0.03)  # other collectives run beside them
    assert limited["memory"] == default["memory"]
    text = " ".join(run_command("predict", *asked, "--power", "500W").stdout.split())
    assert "hardware 1 x p5.48xlarge (8 x H100-SXM at 500 W)" in text
    assert "power limit 500 W of each GPU: as stated, --power" in text
    assert "at 700 W" not in run_command("predict", *asked).stdout


def test_an_unknown_version_of_cuda_is_in_the_range_with_its_evidence() -> None:
    """The slow end is that of --cuda 12.4, or a little slower."""
    unknown, newer, older = (document(*LLAMA, *cuda)["time"] for cuda in ((), ("--cuda", "13.0"), ("--cuda", "12.4")))
    assert unknown["step_seconds"] == newer["step_seconds"]
    assert unknown["step_seconds_range"][0] == newer["step_seconds_range"][0]
    attention = older["parts_seconds"]["attention"] - newer["parts_seconds"]["attention"]  # CUDA 13's is cuDNN's
    longest = unknown["step_seconds_range"][1]
    ratio = newer["step_seconds_range"][1] / newer["step_seconds"]
    slowest = (older["step_seconds"] - attention) * ratio
    assert slowest <= longest <= 1.02 * slowest  # collectives hide behind some of the longer products
    text = " ".join(run_command("predict", *LLAMA).stdout.split())
    assert "CUDA before 12.5 would take" in text
    assert "matrix products at 57% of the peak, not 75% (pytorch/pytorch issue 100850" in text
    older_text = " ".join(run_command("predict", *LLAMA, "--cuda", "12.4").stdout.split())
    assert "CUDA 12.4: matrix products at 57% of the peak, with the older cuBLAS (pytorch/pytorch" in older_text
    assert "would take" not in older_text
    limited = " ".join(run_command("predict", *LLAMA, "--power", "500W").stdout.split())
    assert "CUDA before 12.5 would take" not in limited  # at 500 W both reach what the power allows


def test_the_parts_of_a_step_add_up_and_an_older_cublas_is_slower() -> None:
    """Host work and the optimizer are among them; ``--cuda`` says which cuBLAS multiplies."""
    steps = {}
    for version in ("12.1", "12.8"):
        time = document(*LLAMA, "--cuda", version)["time"]
        assert sum(time["parts_seconds"].values()) == pytest.approx(time["step_seconds"])
        assert {"optimizer", "waiting_for_host", "matrix_products"} <= set(time["parts_seconds"])
        steps[version] = time["step_seconds"]
        shortest, longest = time["step_seconds_range"]
        assert shortest < time["step_seconds"] < longest
    assert steps["12.1"] > steps["12.8"]
    offloaded = document(*LLAMA, "--offload", "params")["time"]
    assert offloaded["parts_seconds"]["cpu_optimizer"] > 0.5 * offloaded["step_seconds"]
    assert sum(offloaded["parts_seconds"].values()) == pytest.approx(offloaded["step_seconds"])
