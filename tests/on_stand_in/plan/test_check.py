"""A check of a real script: it resumes after an interrupt, and names the line that grew."""

import sys
from pathlib import Path
from typing import Any

import pytest

from fsdp_bench.plan.check import check
from fsdp_bench.rehearse.run import RunningRehearsal
from fsdp_bench.report.text.check import answer
from tests.on_stand_in.rehearsing import _start_in_fork

SCRIPT = """
import sys
import torch

def cache(rows):
    return torch.empty(rows, 1024, device="cuda")

kept = cache(int(sys.argv[1]))
weight = torch.nn.Parameter(kept[:8].clone())
optimizer = torch.optim.AdamW([weight])
for step in range(4):
    weight.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_check_resumes_and_names_the_line_that_grew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1,024 rows of 1,024 numbers of 4 bytes become twice as many, in a line that moves down by two."""
    script, file = tmp_path / "train.py", tmp_path / "recipes.toml"
    script.write_text(SCRIPT)
    options = 'gpu = "L4"\nsteps = 2\n'
    recipes = [f'[recipes.of-{rows}]\ncommand = "{sys.executable} train.py {rows}"\n{options}' for rows in (1024, 2048)]
    file.write_text("".join(recipes))
    started = 0
    is_interrupted = True

    def start(*given: Any, **named: Any) -> None:
        nonlocal started
        if started and is_interrupted:
            raise KeyboardInterrupt
        started += 1
        _start_in_fork(*given, **named)

    monkeypatch.setattr(RunningRehearsal, "__init__", start)
    with pytest.raises(KeyboardInterrupt):
        check(file, update=True)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["recipes.toml", "train.py"]
    is_interrupted = False
    found = check(file, update=True)
    assert (started, answer(found)) == (2, "2 recipes checked: all pass")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["recipes.baseline.json", "recipes.toml", "train.py"]

    script.write_text(f'"""Docs."""\n\n{SCRIPT.replace("empty(rows", "empty(2 * rows")}')
    file.write_text(recipes[0])
    (row,) = check(file).rows
    assert started == 3
    assert row.gate is not None
    assert row.gate.comparison is not None
    assert [(one.name, one.difference) for one in row.gate.grown] == [("allocated", 2**22)]  # of a segment of 20 MiB
    (grown,) = (one for one in row.gate.comparison.lines if one.difference)
    assert (grown.name, grown.difference) == ("train.py:8", 2**22)
    assert grown.before is not None
    assert (grown.before.line, grown.before.text) == (6, 'return torch.empty(rows, 1024, device="cuda")')
