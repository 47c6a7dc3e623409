"""The command line as a process: its imports, its messages, its exit codes; and what commands print at a width."""

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fsdp_bench.cli.main import COMMANDS as NAMES
from fsdp_bench.cli.main import main
from fsdp_bench.plan import rehearse_command
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.subprocesses.rehearsal import RehearsedGpu
from tests.cli.answered_once import answered_once, printed_at
from tests.conftest import run_command, run_process, stdout_of

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results" / "xeon-2-cores"
PREDICT = ["predict", "--model", "Llama-3.1-8B", "--server", "p5.48xlarge"]
MAX_SIZE = ["max-size", "--server", "g5.48xlarge", "--strategy", "full_shard", "--checkpointing", "full"]


@pytest.mark.parametrize(
    ("words", "table"),
    [
        (["--help"], []),
        (PREDICT, []),
        ([*PREDICT, "--json"], []),
        pytest.param([*PREDICT, "--strategy", "ddp"], [], marks=pytest.mark.slow),
        ([*PREDICT, "--strategy", "all"], ["rich"]),
        (MAX_SIZE, ["rich"]),
    ],
    ids=lambda words: " ".join(words),
)
def test_nothing_heavy_is_loaded_and_rich_only_for_a_table(words: list[str], table: list[str]) -> None:
    program = (
        "import sys, fsdp_bench, fsdp_bench.cli.main as main\n"
        "fsdp_bench.estimate, fsdp_bench.largest_model\n"
        f"main.cli.main({words}, standalone_mode=False)\n"
        "print([m for m in ('torch', 'pandas', 'matplotlib', 'numpy', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].endswith(str(table))


def test_no_arguments_at_all_print_the_help() -> None:
    done = run_process()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == run_command("--help").stdout


@pytest.mark.parametrize(
    ("gpu", "code", "form"), [("L4", 3, ()), ("L4", 3, ("--json",)), ("H100-SXM", 0, ()), ("no-such", 2, ("--json",))]
)
def test_the_exit_code_holds_where_nobody_reads_the_output(
    monkeypatch: pytest.MonkeyPatch, gpu: str, code: int, form: tuple[str, ...]
) -> None:
    """As in ``fsdp-bench predict ... | head -1``, whose pipe is closed before all is written, and in ``>&-``."""
    reader, output = os.pipe()
    os.close(reader)
    with open(output, "w", buffering=1) as closed:
        for stdout in (closed, None):
            monkeypatch.setattr(sys, "stdout", stdout)
            with pytest.raises(SystemExit) as ended:
                main(["predict", "--model", "Llama-3.2-1B", "--gpu", gpu, "--batch", "4", *form])
            assert ended.value.code == code


def test_a_process_prints_what_a_call_prints_and_ends_with_its_code() -> None:
    too_large = ("predict", "--model", "llama-2-70b", "--gpu", "l4", "--world-size", "1", "--strategy", "ddp")
    for words, code in ((("servers", "g5.48xlarge"), 0), (too_large, 3), (("swep",), 2)):
        process, call = run_process(*words), run_command(*words)
        assert process.returncode == call.returncode == code
        assert (process.stdout, process.stderr) == (call.stdout, call.stderr)


def test_doctor_tells_what_a_sweep_will_do() -> None:
    with answered_once():
        done, document = run_command("doctor"), run_command("doctor", "--json")
    assert done.returncode == 0
    for word in ("processor", "host memory", "cgroup limit", "torch", "gloo", "a sweep will"):
        assert word in done.stdout
    assert '"will"' in document.stdout


def test_status_of_results_that_were_copied_counts_their_records() -> None:
    """Committed results have no progress.json."""
    home = RESULTS
    printed = stdout_of("status", home)
    count = len(list((home / "cpu" / "trials").glob("*.json")))
    assert f"{home / 'cpu'}: {count} records: {count} ok; how many trials the sweep has is unknown" in " ".join(
        printed.split()
    )
    sweeps = json.loads(run_command("status", home, "--json").stdout)["sweeps"]
    assert {sweep["state"] for sweep in sweeps} == {"unknown"}


@pytest.mark.parametrize(("gpu", "name"), [("H100-SXM", "NVIDIA H100 80GB HBM3"), ("H100-SXM-96GB", "H100-SXM-96GB")])
def test_a_rehearsed_gpu_without_a_product_name_has_the_catalogue_s(
    gpu: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[RehearsedGpu] = []

    def instead(_command: Any, stand_in: RehearsedGpu, *_others: Any) -> Any:
        seen.append(stand_in)
        raise SpecError("enough")

    monkeypatch.setattr(rehearse_command, "rehearse", instead)
    (tmp_path / "train.py").touch()
    assert "enough" in run_command("rehearse", "--gpu", gpu, "--", sys.executable, tmp_path / "train.py").stderr
    assert [one.product_name for one in seen] == [name]


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
