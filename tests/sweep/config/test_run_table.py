"""The keys of a sweep file's [run] table."""

from __future__ import annotations

import re

from fsdp_bench.spec.record import RunPlan
from fsdp_bench.sweep.config import run_table


def test_the_docstring_lists_every_key_of_run() -> None:
    listed = re.findall(r"^    (\w+)  ", run_table.__doc__ or "", re.MULTILINE)
    assert sorted(listed) == sorted(run_table.RUN_KEYS)


def test_the_docstring_states_the_defaults_that_hold() -> None:
    plan = RunPlan()
    for key in ("warmup_steps", "steps", "communication_steps", "timeout_seconds"):
        assert re.search(rf"^    {key} .*: {getattr(plan, key):g}$", run_table.__doc__ or "", re.MULTILINE), key
