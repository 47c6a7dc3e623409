"""What the tests of several rooms share."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

TINY_MODEL = """
[models.tiny]
family = "llama"
num_hidden_layers = 2
hidden_size = 32
num_attention_heads = 2
intermediate_size = 64
vocab_size = 128
"""

RUN_ON_CPU = {"device": '"cpu"', "steps": "1", "communication_steps": "0", "steps_without_communication": "0"}


@pytest.fixture
def write_sweep(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a sweep file for the tiny model on a CPU."""

    def write(grid: str, run: str = "", name: str = "tiny") -> Path:
        path = tmp_path / f"{name}.toml"
        defaults = "\n".join(
            f"{key} = {value}" for key, value in RUN_ON_CPU.items() if not re.search(rf"^{key} *=", run, re.MULTILINE)
        )
        path.write_text(f"[run]\n{defaults}\n{run}\n[grid]\nmodel = 'tiny'\nsequence_length = 16\n{grid}\n{TINY_MODEL}")
        return path

    return write


def command(*words: object) -> list[str]:
    """Return the command line of fsdp-bench as a real process."""
    return [sys.executable, "-m", "fsdp_bench.cli.main", *map(str, words)]


def run_command(*words: object, timeout: float = 240, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run fsdp-bench to its end."""
    return subprocess.run(command(*words), capture_output=True, text=True, timeout=timeout, cwd=cwd)
