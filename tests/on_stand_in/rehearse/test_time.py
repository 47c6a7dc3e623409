"""The time of a rehearsed step: against predict's with the same rates, and of scripts that predict does not know."""

import json
from pathlib import Path
from typing import Any

import pytest

from fsdp_bench.catalog.loader import BUILT_IN
from fsdp_bench.catalog.lookup import find_placement
from fsdp_bench.plan.question import Question, speed_of
from fsdp_bench.plan.speed import Speed
from fsdp_bench.spec.codec import from_builtins
from fsdp_bench.spec.model import ModelShape
from fsdp_bench.spec.setup import TrainSetup
from tests.on_stand_in.rehearsing import KINDS, SCRIPTS, Rehearsed, rehearse, rehearse_kind

SERVER = ("--time", "--steps", "3", "--server", "p5.48xlarge")
MODELS = {
    "llama": {"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256},
    "gpt2": {"num_key_value_heads": 32, "intermediate_size": 16384, "vocab_size": 50304, "tie_word_embeddings": True},
}


def model_of(family: str) -> dict[str, Any]:
    sizes = {"num_hidden_layers": 3, "hidden_size": 4096, "num_attention_heads": 32, "max_position_embeddings": 4096}
    return {"name": f"small-{family}", "family": family, **sizes, **MODELS[family]}


def rehearsed(folder: Path, family: str, nodes: int, setup: dict[str, Any]) -> Rehearsed:
    (folder / "spec.json").write_text(json.dumps({"model": model_of(family), "setup": setup}))
    script = str(SCRIPTS / "benchmark_model.py")
    return rehearse(*SERVER, "--nodes", str(nodes), "--", script, "spec.json", folder=folder)


def predicted(family: str, nodes: int, setup: dict[str, Any]) -> Speed:
    hardware = find_placement(None, "p5.48xlarge", nodes, None, None, BUILT_IN).hardware
    return speed_of(Question(from_builtins(model_of(family), ModelShape), from_builtins(setup, TrainSetup), hardware))


def setup_of(nodes: int = 1, **changes: Any) -> dict[str, Any]:
    sizes = {"world_size": 8 * nodes, "sequence_length": 4096, "micro_batch_size": 1, "precision": "bf16-mixed"}
    return sizes | changes


SAME = 0.005
"""What is left: copies of FSDP's argument lists to the GPU, a few tiny operators, and Python's float32 sums."""

SETUPS = [
    ("llama", 1, {"api": "fsdp1", "checkpointing": "none"}),
    ("llama", 1, {"api": "fsdp2", "checkpointing": "full"}),
    pytest.param("gpt2", 1, {"api": "fsdp1", "checkpointing": "full"}, marks=pytest.mark.slow),
    ("gpt2", 1, {"api": "fsdp2", "checkpointing": "none"}),
    ("llama", 2, {"strategy": "HYBRID_SHARD", "api": "fsdp2"}),
    ("llama", 1, {"strategy": "NO_SHARD"}),
    pytest.param("gpt2", 1, {"strategy": "NO_SHARD", "api": "fsdp2"}, marks=pytest.mark.slow),
    ("llama", 1, {"optimizer": "adamw-fused", "api": "fsdp2", "gradient_accumulation_steps": 2}),
    ("gpt2", 1, {"max_grad_norm": 1.0}),
    ("llama", 1, {"offload": "params", "api": "fsdp2"}),
    pytest.param("gpt2", 1, {"forward_prefetch": True}, marks=pytest.mark.slow),
    ("gpt2", 2, {"backward_prefetch": "BACKWARD_POST", "use_orig_params": False}),
    pytest.param("llama", 1, {"wrap": "block-and-ends"}, marks=pytest.mark.slow),
    ("llama", 1, {"loss": "liger-fused-linear"}),
    ("llama", 1, {"compile": True, "checkpointing": "full", "api": "fsdp2"}),
]


@pytest.mark.parametrize(("family", "nodes", "changes"), SETUPS, ids=str)
def test_a_step_takes_as_long_as_predicted_with_the_same_rates(
    family: str, nodes: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    setup = setup_of(nodes, **changes)
    found, expected = rehearsed(tmp_path, family, nodes, setup).document["time"], predicted(family, nodes, setup)
    assert found["unknown"] == {}
    assert found["step_seconds"] == pytest.approx(expected.time.step_seconds, rel=SAME)
    assert found["compute_seconds"] == pytest.approx(expected.time.compute_seconds, rel=SAME)
    assert found["communication_seconds"] == pytest.approx(expected.time.communication_seconds, rel=SAME)
    assert found["tokens_per_step"] == 4096 * setup.get("gradient_accumulation_steps", 1)
    assert found["mfu"] == pytest.approx(expected.mfu, rel=SAME)
    assert found["hfu"] == pytest.approx(expected.hfu, rel=SAME)


def test_an_operator_that_keeps_the_state_of_random_numbers_is_named_for_what_it_runs(tmp_path: Path) -> None:
    """Compiled attention with dropout: graphsafe_run_with_rng_state, a higher-order operator."""
    setup = setup_of(compile=True, checkpointing="full")
    found = rehearsed(tmp_path, "gpt2", 1, setup).document["time"]
    assert found["unknown"] == {}
    attention = [part["count"] for part in found["parts"] if part["name"] == "aten::scaled_dot_product_attention"]
    assert attention == [6]  # of three blocks, each once more in backward


TOKENS = {"trainer": 2048, "lora": 2048, "fsdp2": 4096}
"""Those of a step, where a rehearsal can tell."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_script_has_a_time_whatever_trains_it(kind: str, tmp_path: Path) -> None:
    found = rehearse_kind(kind, *SERVER, folder=tmp_path)
    time = found.document["time"]
    assert time["unknown"] == {}
    assert 0 < time["exposed_communication_seconds"] < time["communication_seconds"] < time["step_seconds"]
    assert time["compute_seconds"] < time["step_seconds"]
    assert 0.05 < time["mfu"] <= time["hfu"] < 0.8
    assert kind not in TOKENS or time["tokens_per_step"] == TOKENS[kind]
    kernels = [part["name"] for part in time["parts"] if part["name"].startswith("triton_")]
    assert bool(kernels) == (kind == "compiled")


PLAIN = """
import torch
torch.set_float32_matmul_precision({precision!r})
x, weight = torch.randn(256, 256, device="cuda"), torch.nn.Parameter(torch.randn(256, 256, device="cuda"))
optimizer = torch.optim.SGD([weight])
for _ in range(4):
    y = x @ weight
    {extra}
    y.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
SORTED = "torch.randn(1 << 20, device='cuda').sort()"
GRAPH = """
    torch.cuda.synchronize()
    if "graph" not in globals():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            z = x + x
    graph.replay()
"""


@pytest.mark.parametrize(
    ("precision", "extra", "unknown"),
    [
        ("highest", "pass", {}),
        ("highest", SORTED, {"aten::sort": 1}),
        ("highest", GRAPH, {"cudaGraphLaunch": 1}),
        ("high", "pass", {"aten::mm in TF32": 2}),
    ],
    ids=["known", "operator", "graph", "tf32"],
)
def test_what_has_no_known_time_is_named(precision: str, extra: str, unknown: dict[str, int], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PLAIN.format(precision=precision, extra=extra))
    given = ("--time", "--tokens-per-step", "256", "--gpu", "H100-SXM")
    time = rehearse(*given, "--", "train.py", folder=tmp_path).document["time"]
    assert time["unknown"] == unknown
    assert unknown or time["tokens_per_second_per_gpu"] == pytest.approx(256 / time["step_seconds"])
    assert (time["step_seconds"] is None) == bool(unknown)
    assert time["at_least_seconds"] > 0


ASYNCHRONOUS = """
import torch, torch.distributed as dist
dist.init_process_group("nccl")
torch.cuda.set_device(0)
x, big = torch.nn.Parameter(torch.randn(1 << 24, device="cuda")), torch.empty(1 << 28, device="cuda")
optimizer = torch.optim.SGD([x])
for _ in range(3):
    work = dist.all_reduce(big, async_op=True)
    (x * 2).sum().backward()
    {wait}
    optimizer.step()
    optimizer.zero_grad()
"""


def test_an_asynchronous_collective_ends_where_the_script_waits_for_it(tmp_path: Path) -> None:
    seconds = []
    for wait in ("work.wait()", "pass"):
        (tmp_path / "train.py").write_text(ASYNCHRONOUS.format(wait=wait))
        found = rehearse(*SERVER, "--", "train.py", command="torchrun", folder=tmp_path)
        time = found.document["time"]
        assert [part["count"] for part in time["parts"] if part["name"] == "all_reduce"] == [1]
        seconds.append(time["step_seconds"])
    waits, does_not = seconds
    assert waits > does_not


def test_a_pipelines_bubble_follows_from_its_schedule(tmp_path: Path) -> None:
    """Two equal stages and two micro-batches: a third of the step, as (p - 1) / (m + p - 1) says.

    Stages tell each other the shapes that they send, and so both are run without being asked for.
    """
    script = str(SCRIPTS / "pipeline.py")
    found = rehearse(*SERVER, "--", script, "1f1b", "2", command="torchrun", folder=tmp_path)
    stages = found.document["ranks"]
    assert [one["rank"] for one in stages] == [0, 4]
    for one in stages:
        time = one["time"]
        assert time["unknown"] == {}
        bubble = time["parts_seconds"]["waiting_for_ranks"] / time["step_seconds"]
        assert bubble == pytest.approx(1 / 3, abs=0.03)  # FSDP's collectives, the optimizer and messages come on top
