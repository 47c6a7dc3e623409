"""Answers to report: a small plan as ``plan --json`` prints it, and committed results with hostile names."""

import json
import shutil
from functools import cache
from html.parser import HTMLParser
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


Attributes = dict[str, str | None]


class ParsedPage(HTMLParser):
    """The elements of a page with their attributes, the text outside of scripts and styles, the cells of its tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, Attributes]] = []
        self.text = ""
        self.tables: list[list[list[tuple[str, Attributes]]]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append(("", dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self._open):
            self.text += data
        if {"td", "th"} & set(self._open):
            text, attributes = self.tables[-1][-1][-1]
            self.tables[-1][-1][-1] = (text + data, attributes)

    def attributes(self, name: str) -> list[str]:
        return [value or "" for _, attributes in self.elements for key, value in attributes.items() if key == name]

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)

    def column(self, title: str, table: int = 0) -> list[tuple[str, str | None]]:
        """Return the texts of a column, and the numbers that it is sorted by."""
        head, *rows = self.tables[table]
        place = [text for text, _ in head].index(title)
        return [(row[place][0], row[place][1].get("data-number")) for row in rows]
