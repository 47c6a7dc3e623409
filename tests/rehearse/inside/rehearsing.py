"""Runs a script as ``fsdp-bench rehearse`` runs it inside the user's Python, with the CPU's torch and no stand-in."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
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
    folder: Path, script: str, *arguments: str, rank: int = 0, world_size: int | None = 8, **changes: Any
) -> Ran:
    """Run a script; return its report, what it printed, and the exit code."""
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
    words = [sys.executable, str(INSIDE), str(folder / "plan.json")]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    report = folder / "report.json"
    return Ran(json.loads(report.read_text()) if report.exists() else {}, done.stdout + done.stderr, done.returncode)
