"""``fsdp-bench compare`` as a process: options in quotes, files, its JSON document and its errors."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import json_of, run_command, stdout_of

BOTH = ("--model", "gpt2", "--server", "p5.48xlarge")


def test_options_in_quotes_add_to_those_of_both_and_count_first() -> None:
    found = json_of("compare", "--api fsdp2 --batch 2", "--strategy zero2", *BOTH, "--batch", 4)
    differ = {one["name"]: (one["a"], one["b"]) for one in found["fields"]}
    assert differ == {
        "api": ("fsdp2", "fsdp1"),
        "micro_batch_size": (2, 4),
        "strategy": ("FULL_SHARD", "SHARD_GRAD_OP"),
    }
    memory = found["memory"]
    allocated = next(one for one in memory["peaks"] if one["name"] == "allocated")
    assert sum(one["difference_bytes"] for one in memory["categories"]) == allocated["difference_bytes"]
    assert found["why"]


def test_the_numbers_are_those_of_predict(tmp_path: Path) -> None:
    """From options or from the file that predict prints, the same setup is the same thing."""
    path = tmp_path / "predicted.json"
    path.write_text(run_command("predict", *BOTH, "--checkpointing", "full", "--json").stdout)
    printed = stdout_of("compare", path, "--checkpointing full", *BOTH)
    assert printed.startswith("nothing differs between A and B (predicted)\n")


def test_empty_quotes_are_the_options_of_both() -> None:
    printed = stdout_of("compare", "", "--compile", *BOTH)
    assert "compile  off  on" in printed
    assert "adamw-foreach, compile on" in " ".join(printed.split())
