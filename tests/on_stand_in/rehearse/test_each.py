"""One command with several values: in its words, its environment, its configuration file; accelerate's strategy."""

from pathlib import Path
from typing import Any

import pytest

from fsdp_bench.spec.units import MIB
from tests.on_stand_in.rehearsing import SCRIPTS, rehearse, rehearse_in_own_process

READS_ALL = """
import json, os, sys
import torch
mib = 64 * int(sys.argv[1]) + 8 * int(os.environ["EIGHTS"]) + 2 * json.load(open(CONFIG))["train"]["twos"]
tensor = torch.zeros(mib << 20, dtype=torch.uint8, device="cuda")
weight = torch.nn.Parameter(torch.zeros(1, device="cuda"))
optimizer = torch.optim.SGD([weight])
for _ in range(2):
    weight.grad = torch.ones_like(weight)
    optimizer.step()
json.dump({"train": {"twos": 7}}, open(CONFIG, "w"))
"""


@pytest.mark.parametrize("place", ["beside the script", "elsewhere in a temporary folder"])
def test_a_script_sees_values_in_its_words_its_environment_and_its_file(
    place: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The user's file stays as it is, also where the script writes it. Without --env both are forks of one process."""
    is_beside = place == "beside the script"
    config = (tmp_path if is_beside else tmp_path_factory.mktemp("elsewhere")) / "config.json"
    config.write_text('{"train": {"twos": 5}}')
    (tmp_path / "script.py").write_text(READS_ALL.replace("CONFIG", repr(str(config))))
    options = ("--gpu", "L4", "--each", "n=1,2", "--edit", f"{config}:train.twos={{n}}")
    options += ("--env", "EIGHTS={n}") if is_beside else ("--env", "EIGHTS=0")
    found = rehearse_in_own_process(*options, "--", "script.py", "{n}", folder=tmp_path)
    sizes = {one["values"]["n"]: one["ranks"][0] for one in found.document["rehearsals"]}
    each = 74 if is_beside else 66
    peaks = {n: one["memory"]["peak_allocated_bytes"] // MIB for n, one in sizes.items()}
    assert peaks == {"1": each, "2": 2 * each}
    assert config.read_text() == '{"train": {"twos": 5}}'
    assert f"The script found {config} as --edit changes it" in " ".join(sizes["1"]["notes"])


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
