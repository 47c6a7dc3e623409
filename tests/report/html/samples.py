"""Answers to report: a small plan as ``plan --json`` prints it, and committed results with hostile names."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

from fsdp_bench.catalog.loader import BUILT_IN
from fsdp_bench.catalog.lookup import model
from fsdp_bench.plan.purchase.document import document
from fsdp_bench.plan.purchase.goal import Goal
from fsdp_bench.plan.purchase.planner import plan
from fsdp_bench.plan.purchase.searched import ServerType
from fsdp_bench.spec.codec import to_json
from fsdp_bench.spec.setup import Api, Precision, ShardingStrategy

RESULTS = Path(__file__).parents[3] / "results" / "xeon-2-cores"
SCRIPT = "<script>window.hacked = 1</script>"
IMAGE = "\"><img src=x onerror='window.hacked = 1'>"
STYLE = "</style></title><svg onload=window.hacked=1>{{ 7 * 7 }}"
FIXED: dict[str, Any] = {
    "precision": Precision.parse("bf16-mixed"),
    "sequence_length": 2048,
    "micro_batch_size": 1,
    "strategy": ShardingStrategy.FULL_SHARD,
    "api": Api.FSDP2,
}


@cache
def plan_text() -> str:
    """Return a plan as JSON: three offers with a price, and a kind of server that is left out."""
    kinds = []
    for name in ("p4d.24xlarge", "p3dn.24xlarge"):
        server = BUILT_IN.server(name)
        kinds.append(ServerType(server, BUILT_IN.gpu(server.gpu), BUILT_IN.price(server), server.gpus_per_node))
    goal = Goal(model=model("1B", 2048), fixed=FIXED, tokens=10**10)
    return to_json(document(plan(goal, kinds, (1, 2, 4)))).decode()


def plan_file(folder: Path, **changes: Any) -> Path:
    path = folder / "plan.json"
    path.write_text(json.dumps({**json.loads(plan_text()), **changes}))
    return path


def accumulating_plan(folder: Path) -> Path:
    """Write a plan whose winner has three micro-batches drawn of eight."""
    plan = json.loads(plan_text())
    setup = {**plan["winner"]["setup"], "gradient_accumulation_steps": 8}
    memory = plan["winner_step"]["memory"]
    *once, last = [{**phase, "width": phase["width"] / 3} for phase in memory["phases"]]
    step = {**plan["winner_step"], "num_micro_batches": 3, "memory": {**memory, "phases": [*once * 3, last]}}
    return plan_file(folder, winner={**plan["winner"], "setup": setup}, winner_step=step)


def hostile_sweep(folder: Path) -> Path:
    """Copy a committed sweep, and give its trials names, reasons and devices that a browser would run."""
    home = folder / "sweep"
    shutil.copytree(RESULTS / "t5", home)
    for path in sorted((home / "trials").glob("*.json")):
        record = json.loads(path.read_text())
        record["model"]["name"] = SCRIPT
        record["suspect"] = [IMAGE]
        for rank in record["ranks"]:
            rank["environment"]["torch"] = STYLE
        path.write_text(json.dumps(record))
    machine = json.loads((home / "machine.json").read_text())
    machine["cpu_name"] = IMAGE
    (home / "machine.json").write_text(json.dumps(machine))
    return home
