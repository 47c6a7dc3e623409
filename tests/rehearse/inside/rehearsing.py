"""Runs scripts as ``fsdp-bench rehearse`` does inside the user's Python, with torch's CPU build and no stand-in."""

import json
import os
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

from fsdp_bench.rehearse.run import INSIDE
from tests.train.ranks import FORK_SERVER


@dataclass(frozen=True)
class Ran:
    report: dict[str, Any]
    output: str
    code: int


def run_inside(
    folder: Path, script: str, *arguments: str, rank: int = 0, world_size: int | None = 8, **changes: Any
) -> Ran:
    """Run a script in a fork of a process that has imported torch; return its report, its output and its exit code."""
    (folder / "script.py").write_text(dedent(script))
    plan = plan_of(folder, "script.py", *arguments, rank=rank, world_size=world_size, **changes)
    (folder / "plan.json").write_text(json.dumps(plan))
    code = run_fork(become_a_rehearsal, folder, folder)
    report = folder / "report.json"
    output = (folder / "output.txt").read_text()
    return Ran(json.loads(report.read_text()) if report.exists() else {}, output, code)


def plan_of(scratch: Path, *words: str, **changes: Any) -> dict[str, Any]:
    """Return the plan of a command without a launcher, which reports into ``scratch``."""
    return {
        "launcher": "none",
        "words": words,
        "rank": 0,
        "world_size": 8,
        "gpus_per_node": 8,
        "steps": 2,
        "ends_early": False,
        "report": str(scratch / "report.json"),
        "snapshot": None,
        "random_weights": False,
        "random_data": None,
        "balanced_routing": False,
        "stops_at_unsupported": True,
        "notes_work": False,
        "strategy": None,
        "edited": {},
        "messages": {},
        **changes,
    }


def run_fork(target: Callable[..., None], *arguments: object) -> int:
    """Call a function in a fork of a process that has imported torch; return its exit code."""
    process = FORK_SERVER.Process(target=target, args=arguments)
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def become_a_rehearsal(folder: Path, scratch: Path, prepare: Callable[[Path], None] = lambda _scratch: None) -> None:
    """Run the plan in ``scratch`` with a working directory, after ``prepare``, and end this process with it."""
    output = os.open(scratch / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(output, number)
    os.chdir(folder)
    sys.argv, sys.path[0] = [str(INSIDE), str(scratch / "plan.json")], str(INSIDE.parent)
    try:
        prepare(scratch)
        runpy.run_path(str(INSIDE), run_name="__main__")
    finally:
        os._exit(1)  # INSIDE ends its process itself
