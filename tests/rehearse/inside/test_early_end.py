"""A script that is ended from outside reports what was seen until then."""

from __future__ import annotations

from pathlib import Path

from tests.rehearse.inside.rehearsing import run_inside

ENDED_IN_ITS_THIRD_STEP = """
import os, time, torch
from fsdp_bench_rehearsal.main import END_SIGNAL

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(10):
    try:
        model(torch.ones(1, 4)).sum().backward()
        if step == 2:
            os.kill(os.getpid(), END_SIGNAL)
            time.sleep(600)
        optimizer.step()
    except BaseException:
        print("caught")
"""


def test_a_script_reports_its_steps_when_it_is_ended(tmp_path: Path) -> None:
    ran = run_inside(tmp_path, ENDED_IN_ITS_THIRD_STEP, steps=None)
    assert (ran.report["outcome"], ran.report["num_steps"], ran.code) == ("interrupted", 2, 0)
    assert "caught" not in ran.output
