"""No printed line is longer than the terminal's width, or than 80 columns without a terminal."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from fsdp_bench.cli.main import COMMANDS as NAMES
from tests.cli.answered_once import printed_at
from tests.conftest import run_command

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results" / "xeon-2-cores"
P5 = ("--server", "p5.48xlarge", "--nodes", 2)
FEW = ("--strategy", "zero3,zero2", "--checkpointing", "full")
COMMANDS = {
    "one setup": ("predict", "--model", "Llama-3.1-8B", "--server", "g5.48xlarge"),
    "setups": ("predict", "--model", "Llama-3.1-8B", *P5, "--strategy", "all", "--api", "all", "--precision", "all"),
    "offload": ("predict", "--model", "Llama-3.1-8B", *P5, "--offload", "all", "--checkpointing", "all"),
    "sizes": ("max-size", "--server", "g5.48xlarge", "--offload", "all", "--strategy", "full_shard,hsdp"),
    "nothing fits": ("max-size", "--server", "g5.48xlarge", "--batch", 64, "--strategy", "ddp"),
    "servers": ("servers",),
    "server": ("servers", "p4d.24xlarge"),
    "models": ("models",),
    "model": ("models", "Qwen3-8B"),
    "trials": ("report", RESULTS / "cpu"),
    "communication": ("report", RESULTS / "cpu", "--communication"),
    "results": ("validate", "--against", RESULTS / "emulation-check"),
    "differences": (
        *("compare", "--strategy ddp --api fsdp2", "--checkpointing full --nodes 2"),
        *("--model", "gpt2", "--server", "p5.48xlarge"),
    ),
    "wide": (
        *("predict", "--model", "gpt2,gpt2-medium", "--server", "p5.48xlarge,p4d.24xlarge"),
        *("--precision", "bf16-mixed,bf16-mixed-bf16-reduce", "--wrap", "block,none", "--optimizer", "adamw,sgd"),
    ),
    "numbers": (
        *("predict", "--model", "gpt2", "--server", "p5.48xlarge"),
        *("--batch", "1,2,4", "--nodes", "1,2", "--seq", "256,512", "--compile", "on,off"),
    ),
    "lengths": ("max-size", "--server", "p5.48xlarge", "--seq", "4096,8192", *FEW),
    "batches": (
        *("max-size", "--server", "p5.48xlarge", "--batch", "1,2", "--columns", "batch,fits_value,needs,mfu"),
        *FEW,
    ),
    "cells": ("sweep", ROOT / "sweeps" / "quick.toml", "--list"),
}


@cache
def _printed(name: str) -> dict[int, str]:
    found = {}
    for columns, done in printed_at((80, 120), *COMMANDS[name]):
        assert done.returncode in (0, 3), done.stderr
        found[columns] = done.stdout
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_no_line_is_longer_than_the_terminal(name: str) -> None:
    for columns, text in _printed(name).items():
        lines = text.splitlines()
        assert len(lines) > 3
        assert [line for line in lines if len(line) > columns] == []
        is_one_column = re.search(r"^setup +needs ", text, re.MULTILINE) is not None  # instead of five
        assert is_one_column == (name == "wide" and columns == 80)


def test_names_that_are_needed_to_act_are_whole_at_80_columns() -> None:
    """Names of strategies, servers and models are never cut, so that users can type them again."""
    predicted = _printed("setups")[80]
    assert "_HYBRID_SHARD_ZERO2 (8)" in predicted
    assert "bf16-mixed-bf16-reduce" in predicted
    assert "left out at 80 columns: " in predicted


@pytest.mark.parametrize("command", NAMES)
def test_help_fits_80_columns_and_has_an_example(command: str) -> None:
    shown = run_command(command, "--help").stdout
    assert f"\n  fsdp-bench {command}" in shown
    assert [line for line in shown.splitlines() if len(line) > 80] == []
