"""``fsdp-bench dry-run`` in one process: what it prints, and what it refuses in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_bench.spec.subprocesses.dry_run import CATEGORIES
from tests.conftest import json_of, run_command, stdout_of

USERS = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    def forward(self, x):
        return self.layer(x)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.register_buffer("scale", torch.ones(1))
    def forward(self, tokens):
        x = self.embedding(tokens) * self.scale
        for block in self.blocks:
            x = block(x)
        return {"loss": x.square().mean(), "hidden": x}

def transformer():
    with torch.device("meta"):
        return Model(), {"tokens": torch.zeros(2, 8, dtype=torch.int64)}

def linear():
    return nn.Linear(100, 100, bias=False), torch.zeros(10, 100)
"""


pytestmark = pytest.mark.usefixtures("one_dry_run_process")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("users")
    (folder / "users.py").write_text(USERS)
    return folder


def test_json_has_the_names_of_the_prediction_and_adds_up() -> None:
    document = json_of("dry-run", "--params", "10M", "--world-size", 8, "--seq", 64, tells_progress=True)
    memory = document["memory"]
    assert document["source"] == "dry-run"
    assert document["device"] == "fake"
    assert document["setup"]["world_size"] == document["setup"]["shard_size"] == 8
    assert set(memory["phases"]) == {"forward", "loss", "backward", "optimizer"}
    assert set(memory["breakdown_bytes"]) == set(CATEGORIES)
    assert sum(memory["breakdown_bytes"].values()) == memory["peak_allocated_bytes"]
    assert memory["phases"][memory["peak_phase"]] == memory["peak_allocated_bytes"]


def test_its_page_says_what_ran_on_what_and_what_was_predicted(tmp_path: Path) -> None:
    words = ["--params", "10M", "--server", "p5.48xlarge", "--seq", 64, "--strategy", "SHARD_GRAD_OP"]
    (tmp_path / "dry.json").write_text(run_command("dry-run", *words, "--json").stdout)
    assert run_command("report", "dry.json", "--html", "dry.html", cwd=tmp_path).returncode == 0
    page = (tmp_path / "dry.html").read_text()
    assert "on p5.48xlarge (8 H100-SXM)" in page
    assert "Fits (predicted): needs" in page  # the verdict is about reserved memory, which no dry run has
    assert "Peak of each phase, on one GPU (dry run)" in page
    assert "SHARD_GRAD_OP, fsdp1, bf16-mixed" in page
    assert "GiB of each GPU, for CUDA and NCCL (an assumption" in page


def test_the_table_names_the_source_and_the_trace_has_every_change(tmp_path: Path) -> None:
    trace = tmp_path / "trace.txt"
    words = ("--params", "10M", "--world-size", 2, "--seq", 64, "--api", "fsdp2", "--precision", "fp32")
    printed = stdout_of("dry-run", *words, "--trace", trace)
    for part in ("dry run with torch", "cuda kernels", "peak allocated", "backward", "unsharded parameters"):
        assert part in " ".join(printed.split())
    lines = trace.read_text().splitlines()
    assert "== backward" in lines
    assert any("aten::_scaled_dot_product" in line for line in lines)


def test_a_users_module_is_run_with_its_blocks_as_units(folder: Path) -> None:
    words = ("--module", "users:transformer", "--transformer-block", "users:Block", "--world-size", 4)
    document = json_of("dry-run", *words, cwd=folder, tells_progress=True)
    # By hand: an embedding of 50 x 32; in each block attention 4 x 32 x 32 + 4 x 32, feed-forward
    # 2 x 32 x 64 + 64 + 32, and two norms of 2 x 32. Four bytes each, on four ranks.
    assert document["model"]["num_parameters"] == 50 * 32 + 2 * (4 * 32 * 32 + 4 * 32 + 2 * 32 * 64 + 96 + 128)
    assert document["memory"]["resident"]["parameters_bytes"] == document["model"]["num_parameters"]


def test_a_plain_module_under_ddp_holds_parameters_gradients_and_one_bucket(folder: Path) -> None:
    words = ("--module", "users:linear", "--wrap", "none", "--api", "fsdp2", "--strategy", "ddp", "--optimizer", "sgd")
    document = json_of("dry-run", *words, "--world-size", 2, cwd=folder, tells_progress=True)
    # 100 x 100 fp32 parameters, their gradients and DDP's bucket; SGD's foreach step needs nothing more.
    assert document["memory"]["phases"]["optimizer"] == 3 * 100 * 100 * 4
