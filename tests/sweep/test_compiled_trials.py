"""Compiled trials: slow, because each rank compiles. In ``make validate``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fsdp_bench.spec.rank_report import Outcome
from fsdp_bench.spec.record import TrialRecord, read_record
from tests.conftest import run_command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def records_of(folder: Path) -> dict[tuple[str, bool], TrialRecord]:
    records = [read_record(path.read_bytes(), path.name) for path in (folder / "trials").glob("*.json")]
    return {(record.setup.api.value, record.setup.compile): record for record in records}


def test_compiled_trials_train_as_eager_ones_and_their_peak_on_a_cpu_is_unknown(
    write_sweep: Callable[..., Path], tmp_path: Path
) -> None:
    # In bf16 compiled kernels round once, and eager ones after each operator.
    grid = "world_size = 2\nprecision = 'fp32'\nloss = 'plain'\napi = ['fsdp1', 'fsdp2']\ncompile = [false, true]"
    file = write_sweep(grid, "communication_steps = 1\ntimeout_seconds = 400")
    done = run_command("sweep", file, "--results", tmp_path, "--machine", "m")
    assert done.returncode == 0, done.stderr
    records = records_of(tmp_path / "m" / "tiny")
    for api in ("fsdp1", "fsdp2"):
        eager, compiled = records[api, False], records[api, True]
        assert compiled.outcome is Outcome.OK
        for one, other in zip(eager.ranks, compiled.ranks, strict=True):
            assert other.losses == pytest.approx(one.losses, rel=1e-5)
            assert other.memory.peak_allocated_bytes is None
            # The first step compiles; a fallback to eager would not take a hundred times the others.
            assert other.warmup_seconds[0] > 10 * other.step_seconds[-1]


def test_a_budget_and_compiled_code_do_not_go_together_on_a_cpu(
    write_sweep: Callable[..., Path], tmp_path: Path
) -> None:
    file = write_sweep("world_size = 1\ncompile = [false, true]", "memory_limit = '1GiB'")
    done = run_command("sweep", file, "--results", tmp_path, "--machine", "m", "--no-charts")
    assert done.returncode == 0, done.stderr
    compiled = records_of(tmp_path / "m" / "tiny")["fsdp1", True]
    assert compiled.outcome is Outcome.SKIPPED
    assert "memory_limit follows operators" in (compiled.reason or "")
