"""Attention on V100 and T4: predicted peaks of the benchmark's models against dry runs, to the byte.

torch has no FlashAttention there. fp16 takes memory-efficient attention; bf16, grouped keys and heads of odd sizes take
single operators.
"""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("torch", reason="a dry run needs torch")

from fsdp_bench.spec.subprocesses.dry_run import DryRunSpec
from fsdp_bench.sweep.dry_run import dry_runs
from tests.predicted import memory_of
from tests.simulate.comparing import OBSERVED, cells_with

T4 = dataclasses.replace(OBSERVED, compute_capability=7.5)
SEED = 75


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        *(({"precision": each}, 1) for each in ("bf16-mixed", "fp16-mixed")),
        *(pytest.param({"precision": each}, 20, marks=pytest.mark.slow) for each in ("bf16-mixed", "fp16-mixed")),
        # selective checkpointing keeps products of single operators
        ({"precision": "bf16-mixed", "checkpointing": "selective", "checkpointing_policy": "aten.bmm,aten.add"}, 1),
    ],
    ids=str,
)
def test_every_phase_equals_the_dry_run(fields: dict[str, str], count: int) -> None:
    cells = cells_with(count, SEED, "cuda", small=True, gradient_accumulation_steps=1, compile=False, **fields)
    specs = [DryRunSpec(model=cell.model, setup=cell.setup, rank=cell.rank, before_sm80=True) for cell in cells]
    for index, answer in dry_runs(specs):
        assert answer.result is not None, answer.error
        cell = cells[index]
        found = memory_of(cell.model, cell.setup, T4, cell.rank).phases
        assert found == {"load": answer.result.load_bytes, **answer.result.phases}, cell.label
