"""One command with several values: in its words, its environment, its configuration file; accelerate's strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fsdp_bench.spec.units import MIB
from tests.on_stand_in.rehearsing import SCRIPTS, rehearse, rehearse_in_own_process

READS_ALL = """
import json, os, sys
import torch
mib = 64 * int(sys.argv[1]) + 8 * int(os.environ["EIGHTS"]) + 2 * json.load(open("config.json"))["train"]["twos"]
tensor = torch.zeros(mib << 20, dtype=torch.uint8, device="cuda")
weight = torch.nn.Parameter(torch.zeros(1, device="cuda"))
optimizer = torch.optim.SGD([weight])
for _ in range(2):
    weight.grad = torch.ones_like(weight)
    optimizer.step()
json.dump({"train": {"twos": 7}}, open("config.json", "w"))
"""


def test_a_script_sees_values_in_its_words_its_environment_and_its_file(tmp_path: Path) -> None:
    """The user's file stays as it is, also where the script writes it."""
    (tmp_path / "script.py").write_text(READS_ALL)
    config = tmp_path / "config.json"
    config.write_text('{"train": {"twos": 5}}')
    options = ("--gpu", "L4", "--each", "n=1,2", "--env", "EIGHTS={n}", "--edit", "config.json:train.twos={n}")
    found = rehearse_in_own_process(*options, "--", "script.py", "{n}", folder=tmp_path)
    sizes = {one["values"]["n"]: one["ranks"][0]["memory"] for one in found.document["rehearsals"]}
    assert {n: memory["peak_allocated_bytes"] // MIB for n, memory in sizes.items()} == {"1": 74, "2": 148}
    assert config.read_text() == '{"train": {"twos": 5}}'


def test_accelerate_takes_every_strategy_by_one_word() -> None:
    """Fewer shards are more memory; on two nodes a hybrid strategy has half as many as the others."""
    words = ("launch", "--config_file", str(SCRIPTS / "fsdp2.yaml"), str(SCRIPTS / "accelerate_loop.py"))
    found = rehearse(
        "--server",
        "p5.48xlarge",
        "--nodes",
        "2",
        "--steps",
        "2",
        "--strategy",
        "all",
        "--",
        *words,
        command="accelerate",
    )
    peaks: dict[str, Any] = {
        one["values"]["strategy"]: one["ranks"][0]["memory"]["steady_state"]["allocated_bytes"]
        for one in found.document["rehearsals"]
    }
    assert peaks["FULL_SHARD"] < peaks["HYBRID_SHARD"] < peaks["NO_SHARD"]
    assert peaks["FULL_SHARD"] < peaks["SHARD_GRAD_OP"] < peaks["_HYBRID_SHARD_ZERO2"] < peaks["NO_SHARD"]
