"""Real training scripts, unmodified, as one rank: Trainer, Accelerate, PEFT, torch.compile; and scripts that fail."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.on_stand_in.rehearsing import KINDS, rehearse, rehearse_in_own_process, rehearse_kind, rehearse_script

GPU = ("--gpu", "H100-SXM", "--steps", "3")
WORLDS = dict.fromkeys(KINDS, (2, 4096)) | {"trainer": (2, 8, 64, 4096)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_script_runs_unmodified_in_worlds_of_all_sizes(kind: str, tmp_path: Path) -> None:
    peaks = []
    for world_size in WORLDS[kind]:
        found = rehearse_kind(kind, *GPU, "--world-size", str(world_size), folder=tmp_path)
        assert found.document["fits"] is True
        assert (found.document["outcome"], found.document["num_steps"]) == ("stopped", 3)
        assert found.document["world_size"] == world_size
        peaks.append(found.peak_bytes)
        if kind in ("trainer", "lora"):  # from_config makes the model in host memory, in fp32: 3.1 GB in a real run
            host = found.document["host"]
            assert host["peak_bytes_of_real_run"] - host["peak_bytes"] > 2.8e9
    # Of 4096 ranks some hold padding alone, which is gathered, too.
    assert len(peaks) == 2 or peaks[0] > peaks[1] > peaks[2]
    assert peaks[0] > peaks[-1]


def test_compiled_blocks_keep_less_than_eager_ones_and_twice_the_same(tmp_path: Path) -> None:
    """Inductor's partitioner recomputes what is cheap; the kernels are compiled for the GPU that is named."""
    eager, first, second = (
        rehearse_kind("compiled", *GPU, "--world-size", "8", folder=tmp_path, COMPILE=choice) for choice in "011"
    )
    assert first.peak_bytes < 0.95 * eager.peak_bytes
    assert first.document["spans"] == second.document["spans"]
    assert first.document["memory"] == second.document["memory"]


def test_what_does_not_fit_ends_with_the_line_that_asked_for_too_much(tmp_path: Path) -> None:
    small = ("--gpu-memory", "6GiB", "--headroom", "1GiB")
    found = rehearse_kind("trainer", *GPU, *small, "--world-size", "16", folder=tmp_path, code=3)
    failure = found.document["failure"]
    assert found.document["outcome"] == "out_of_memory"
    assert failure["message"].startswith("CUDA out of memory. Tried to allocate")
    assert failure["user_line"]["file"].endswith("trainer_fsdp.py")
    assert f"{os.sep}torch{os.sep}" not in failure["line"]["file"]
    assert "trainer_fsdp.py" in failure["traceback"]


def test_a_limit_for_ci_decides_the_exit_code(tmp_path: Path) -> None:
    given = (*GPU, "--world-size", "64")
    rehearse_kind("fsdp2", *given, "--max-gpu-memory", "30GiB", folder=tmp_path, code=0)
    rehearse_kind("fsdp2", *given, "--max-gpu-memory", "10GiB", folder=tmp_path, code=3)


def test_the_script_reads_the_peak_that_is_reported(tmp_path: Path) -> None:
    """Peaks are read between phases, which resets PyTorch's counters; the script must not notice."""
    found = rehearse_kind("fsdp2", *GPU, "--world-size", "64", folder=tmp_path)
    own = [int(line.split()[2]) for line in found.output.splitlines() if line.startswith("step ")]
    of_steps = {span["step"]: 0 for span in found.document["spans"]}
    for span in found.document["spans"]:
        of_steps[span["step"]] = max(of_steps[span["step"]], span["allocated_bytes"])
    assert own == [of_steps[1], max(of_steps[1], of_steps[2])]  # the third step ends the script before it prints


def test_the_lines_that_hold_memory_are_known_where_another_stream_delays_frees(tmp_path: Path) -> None:
    """As in FSDP1, which calls record_stream: requested bytes fall when a free completes, after it is requested."""
    lines = (
        "import torch",
        "kept = torch.empty(3 << 20, dtype=torch.uint8, device='cuda')",
        "used = torch.empty(64 << 20, dtype=torch.uint8, device='cuda')",
        "other = torch.cuda.Stream()",
        "with torch.cuda.stream(other):",
        "    used.zero_()",
        "used.record_stream(other)",
        "del used",
        "more = torch.empty(64 << 20, dtype=torch.uint8, device='cuda')",
    )
    (tmp_path / "script.py").write_text("\n".join(lines))
    found = rehearse("--gpu", "H100-SXM", "--", "script.py", folder=tmp_path)
    held = [(line["user_line"]["line"], line["num_bytes"]) for line in found.document["memory"]["lines_at_peak"][:2]]
    assert held == [(3, 64 << 20), (2, 3 << 20)]


def test_a_step_that_repeats_the_one_before_is_the_last_one_unless_a_number_is_asked_for(tmp_path: Path) -> None:
    words = ("--server", "p5.48xlarge")
    short, asked = (rehearse_kind("fsdp2", *words, *more, folder=tmp_path) for more in ((), ("--steps", "4")))
    assert [found.document["num_steps"] for found in (short, asked)] == [3, 4]
    kept = ("peak_allocated_bytes", "peak_reserved_bytes", "num_alloc_retries", "steady_state", "lines_at_peak")
    assert [short.document["memory"][key] for key in kept] == [asked.document["memory"][key] for key in kept]


def test_several_ranks_are_rehearsed_in_turn(tmp_path: Path) -> None:
    given = ("--gpu", "H100-SXM", "--steps", "1", "--world-size", "8", "--ranks", "0,7")
    found = rehearse_kind("fsdp2", *given, folder=tmp_path)
    assert [one["rank"] for one in found.document["ranks"]] == [0, 7]


def test_from_pretrained_reads_a_checkpoint_or_makes_the_model_from_its_configuration(tmp_path: Path) -> None:
    _save_a_model_and_its_configuration(tmp_path, TRAIN_PRETRAINED)
    given = ("--gpu", "H100-SXM", "--steps", "1")
    read = rehearse(*given, "--", "train.py", "checkpoint", folder=tmp_path)
    made = rehearse(*given, "--random-weights", "--", "train.py", "configuration", folder=tmp_path)
    rehearse(*given, "--", "train.py", "configuration", folder=tmp_path, code=1)
    assert read.peak_bytes == made.peak_bytes
    assert "--random-weights" in made.document["notes"][0]


@pytest.mark.slow
def test_a_quantized_model_is_made_as_its_checkpoint_is_read(tmp_path: Path) -> None:
    _save_a_model_and_its_configuration(tmp_path, TRAIN_QUANTIZED)
    given = ("--gpu", "H100-SXM", "--steps", "1")
    read = rehearse(*given, "--", "train.py", "checkpoint", folder=tmp_path)
    made = rehearse(*given, "--random-weights", "--", "train.py", "configuration", folder=tmp_path)
    assert made.document["memory"] == read.document["memory"]


def _save_a_model_and_its_configuration(folder: Path, train: str) -> None:
    (folder / "save.py").write_text(SAVE)
    subprocess.run([sys.executable, "save.py"], cwd=folder, check=True, capture_output=True)
    (folder / "train.py").write_text(train)


SAVE = """
from transformers import AutoModelForCausalLM
from transformers.models.llama import LlamaConfig
config = LlamaConfig(hidden_size=512, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=8,
                     num_key_value_heads=4, vocab_size=1000)
AutoModelForCausalLM.from_config(config).save_pretrained("checkpoint")
config.save_pretrained("configuration")
"""
TRAIN_PRETRAINED = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16).cuda()
optimizer = torch.optim.AdamW(model.parameters())
tokens = torch.randint(0, 1000, (1, 512)).cuda()
model(input_ids=tokens, labels=tokens).loss.backward()
optimizer.step()
"""


def test_a_script_that_fails_by_itself_ends_with_1_and_its_line(tmp_path: Path) -> None:
    found = rehearse_script(tmp_path, 'import torch\nraise KeyError("no such thing")\n', code=1)
    assert (found.document["failure"]["type"], found.document["failure"]["user_line"]["line"]) == ("KeyError", 2)
    assert found.document["fits"] is None


INTERRUPTED = """
import os, signal, time, torch
model = torch.nn.Linear(1024, 1024, device="cuda")
optimizer = torch.optim.AdamW(model.parameters())
for step in range(10):
    model(torch.ones(1, 1024, device="cuda")).sum().backward()
    if step == 2:
        os.kill(os.getppid(), signal.SIGTERM)  # handled as Ctrl-C, which tests in the background ignore
        time.sleep(600)
    optimizer.step()
"""


def test_an_interrupted_rehearsal_says_what_it_has_seen(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(INTERRUPTED)
    found = rehearse_in_own_process("--gpu", "H100-SXM", "--", "script.py", folder=tmp_path, code=130)
    assert (found.document["outcome"], found.document["fits"]) == ("interrupted", None)
    assert found.document["num_steps"] == 2
    assert found.document["memory"]["steady_state"]["allocated_bytes"] > 4 * 4 * 1024**2  # AdamW: 16 B a parameter


def test_a_node_has_the_gpus_of_the_world_and_no_more(tmp_path: Path) -> None:
    found = rehearse_script(
        tmp_path,
        """
        import torch
        print("has", torch.cuda.device_count(), torch.cuda.get_device_name(7), torch.cuda.get_device_capability())
        torch.cuda.set_device(8)
        """,
        code=1,
    )
    assert "has 8 NVIDIA H100 80GB HBM3 (9, 0)" in found.output
    assert "invalid device ordinal" in found.document["failure"]["message"]


def test_ranks_of_a_node_use_their_own_gpu(tmp_path: Path) -> None:
    script = """
        import os, torch
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        model = torch.nn.Linear(1024, 1024, device="cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            model(torch.ones(1, 1024, device="cuda")).sum().backward()
            optimizer.step()
        """
    first, last = rehearse_script(tmp_path, script), rehearse_script(tmp_path, script, "--rank", "7")
    assert first.document["memory"]["peak_allocated_bytes"] == last.document["memory"]["peak_allocated_bytes"] > 0


def test_a_gpu_runs_what_was_compiled_for_its_generation(tmp_path: Path) -> None:
    """PyTorch is not compiled for 8.9: CUB has to find the kernels for 8.6, as on a real L4."""
    (tmp_path / "script.py").write_text("import torch; torch.nn.Embedding(9, 64).cuda()(torch.arange(9).cuda()).sort()")
    rehearse("--gpu", "L4", "--", "script.py", folder=tmp_path)


@pytest.mark.parametrize("given", ["", "0", "GPU-8d3b1f0c"])
def test_a_choice_among_this_machines_gpus_does_not_count(tmp_path: Path, given: str) -> None:
    script = "import torch; torch.cuda.set_device(5); torch.ones(1).cuda(); print('GPUs:', torch.cuda.device_count())"
    (tmp_path / "script.py").write_text(script)
    words = ("--gpu", "L4", "--world-size", "8", "--", "script.py")
    found = rehearse(*words, command="torchrun", folder=tmp_path, CUDA_VISIBLE_DEVICES=given)
    assert "GPUs: 8" in found.output


TRAIN_QUANTIZED = """
import sys, torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
model = AutoModelForCausalLM.from_pretrained(
    sys.argv[1], device_map={"": 0}, dtype=torch.bfloat16, quantization_config=BitsAndBytesConfig(load_in_4bit=True))
model = get_peft_model(model, LoraConfig(target_modules="all-linear"))
optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad])
tokens = torch.randint(0, 1000, (1, 512)).cuda()
model(input_ids=tokens, labels=tokens).loss.backward()
optimizer.step()
"""
