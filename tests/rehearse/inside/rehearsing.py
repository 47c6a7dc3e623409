"""Runs a script as ``fsdp-bench rehearse`` runs it inside the user's Python, with the CPU's torch and no stand-in.

Each script has a process of its own, forked from one that has imported torch: importing it takes longer than a script.
"""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import Any

from fsdp_bench.rehearse.run import INSIDE


@dataclass(frozen=True)
class Ran:
    report: dict[str, Any]
    output: str
    code: int


def run_inside(
    folder: Path,
    script: str,
    *arguments: str,
    rank: int = 0,
    world_size: int | None = 8,
    forked: bool = True,
    **changes: Any,
) -> Ran:
    """Run a script; return its report, what it printed, and the exit code. Without ``forked`` as a new Python."""
    (folder / "script.py").write_text(dedent(script))
    plan: dict[str, Any] = {
        "launcher": "none",
        "words": ["script.py", *arguments],
        "rank": rank,
        "world_size": world_size,
        "gpus_per_node": 8,
        "steps": 2,
        "report": str(folder / "report.json"),
        "snapshot": None,
        "random_weights": False,
        "balanced_routing": False,
        "stops_at_unsupported": True,
        "notes_work": False,
        **changes,
    }
    (folder / "plan.json").write_text(json.dumps(plan))
    code = _with_torch().run(folder) if forked else _run_new(folder)
    report = folder / "report.json"
    output = (folder / "output.txt").read_text()
    return Ran(json.loads(report.read_text()) if report.exists() else {}, output, code)


def _run_new(folder: Path) -> int:
    with (folder / "output.txt").open("w") as output:
        words = [sys.executable, str(INSIDE), str(folder / "plan.json")]
        return subprocess.run(words, cwd=folder, stdout=output, stderr=output, check=False).returncode


_FORKS = """
import os, runpy, sys
import torch, torch.distributed.fsdp
for folder in map(str.rstrip, sys.stdin):
    child = os.fork()
    if child == 0:
        output = os.open(f"{folder}/output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number in (1, 2):
            os.dup2(output, number)
        os.chdir(folder)
        inside = sys.argv[1]
        sys.argv, sys.path[0] = [inside, f"{folder}/plan.json"], os.path.dirname(inside)
        try:
            runpy.run_path(inside, run_name="__main__")
        finally:
            os._exit(1)  # it ends its process itself
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class _Forks:
    """A process that has imported torch, and forks one for each folder that it is told."""

    def __init__(self) -> None:
        words = [sys.executable, "-c", _FORKS, str(INSIDE)]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, folder: Path) -> int:
        """Run the plan of a folder; return the exit code."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(folder, file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def end(self) -> None:
        """End the process, and wait until it has ended."""
        self._process.communicate()


@cache
def _with_torch() -> _Forks:
    forks = _Forks()
    atexit.register(forks.end)
    return forks
