"""A plan for a real script: its winner, rehearsed by itself, has the memory and the speed that the plan says."""

import json
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from fsdp_bench.rehearse.run import RunningRehearsal
from tests.conftest import run_command
from tests.on_stand_in.rehearsing import _start_in_fork, rehearse

SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model = nn.Sequential(nn.Embedding(1024, 512), *(nn.Linear(512, 512) for _ in range(2))).to("cuda", torch.bfloat16)
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
for _ in range(9):
    model(torch.zeros(int(sys.argv[1]), 1024, dtype=torch.long, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_the_winner_rehearsed_by_itself_is_as_the_plan_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "script.py").write_text(dedent(SCRIPT))
    monkeypatch.setattr(RunningRehearsal, "__init__", _start_in_fork)
    torchrun = str(Path(sys.executable).parent / "torchrun")
    asked = ("--tokens", "1T", "--server", "p5.48xlarge,a3-highgpu-8g", "--nodes", "1", "--each", "batch=1,4")
    done = run_command("plan", "--json", *asked, "--", torchrun, "script.py", "{batch}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    winner = plan["winner"]
    assert (plan["source"], plan["num_offers"], winner["values"]) == ("rehearsed", 4, {"batch": "4"})
    where = ("--server", winner["server"], "--nodes", str(winner["num_nodes"]))
    alone = rehearse("--time", *where, "--", "script.py", "4", command="torchrun", folder=tmp_path).document
    assert winner["memory"]["peak_allocated_bytes"] == alone["memory"]["peak_allocated_bytes"]
    assert winner["memory"]["peak_reserved_bytes"] == alone["memory"]["peak_reserved_bytes"]
    assert winner["tokens_per_second_per_gpu"] == alone["time"]["tokens_per_second_per_gpu"]
    assert winner["tokens_per_step"] == 4 * 1024 * 8
