"""Tests that rehearse on PyTorch's CUDA build: ``make test-rehearsal`` installs it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parent / "scripts"


def _has_cuda_build() -> bool:
    spec = importlib.util.find_spec("torch")
    folder = Path(spec.origin).parent if spec is not None and spec.origin is not None else None
    return folder is not None and (folder / "lib" / "libtorch_cuda.so").exists()


on_stand_in = [
    pytest.mark.rehearsal,
    pytest.mark.skipif(not _has_cuda_build(), reason="needs PyTorch's CUDA build: make test-rehearsal"),
]
"""The marks of a file with such tests."""


@dataclass(frozen=True)
class Rehearsed:
    document: dict[str, Any]
    output: str
    """What the script printed."""
    code: int

    @property
    def peak_bytes(self) -> int:
        return int(self.document["memory"]["peak_allocated_bytes"])


def rehearse(*words: str, folder: Path | None = None, command: str = "python", **environment: str) -> Rehearsed:
    """Run ``fsdp-bench rehearse --json``; ``words`` are its options, ``--``, and what follows the command."""
    split = words.index("--") + 1
    tool = str(Path(sys.executable).parent / command)
    line = [sys.executable, "-m", "fsdp_bench", "rehearse", "--json", *words[:split], tool, *words[split:]]
    done = subprocess.run(
        line, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    document = json.loads(done.stdout) if done.stdout.startswith("{") else {}
    return Rehearsed(document, done.stderr, done.returncode)
