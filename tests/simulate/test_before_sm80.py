"""Attention on V100 and T4: predicted peaks of the benchmark's models against dry runs, to the byte.

torch has no FlashAttention there. fp16 takes memory-efficient attention; bf16, grouped keys and heads of odd sizes take
single operators.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

pytest.importorskip("torch", reason="a dry run needs torch")

from fsdp_bench.spec.setup import Checkpointing, Precision
from fsdp_bench.spec.subprocesses.dry_run import DryRunSpec
from fsdp_bench.sweep.dry_run import dry_runs
from tests.predicted import memory_of
from tests.simulate.comparing import OBSERVED, cells_with
from tools.validate.random_setups import Cell

T4 = dataclasses.replace(OBSERVED, compute_capability=7.5)
SEED = 75


def assert_equal_dry_runs(cells: Sequence[Cell]) -> None:
    specs = [DryRunSpec(model=cell.model, setup=cell.setup, rank=cell.rank, before_sm80=True) for cell in cells]
    for index, answer in dry_runs(specs):
        assert answer.result is not None, answer.error
        cell = cells[index]
        found = memory_of(cell.model, cell.setup, T4, cell.rank).phases
        assert found == {"load": answer.result.load_bytes, **answer.result.phases}, cell.label


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed"])
@pytest.mark.parametrize("count", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_every_phase_equals_the_dry_run(precision: str, count: int) -> None:
    fixed = {"precision": Precision.parse(precision), "gradient_accumulation_steps": 1, "compile": False}
    assert_equal_dry_runs(cells_with(count, SEED, "cuda", small=True, **fixed))


def test_selective_checkpointing_keeps_products_of_single_operators() -> None:
    fixed = {
        "precision": Precision.parse("bf16-mixed"),
        "gradient_accumulation_steps": 1,
        "compile": False,
        "checkpointing": Checkpointing.SELECTIVE,
        "checkpointing_policy": "aten.bmm,aten.add",
    }
    assert_equal_dry_runs(cells_with(1, SEED, "cuda", small=True, **fixed))
