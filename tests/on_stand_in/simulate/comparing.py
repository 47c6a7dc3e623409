"""Comparisons of predictions with rehearsals, for drawn setups."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from fsdp_bench.sweep.run.rehearsed import rehearsed_gpu
from fsdp_bench.validate.memory import MemoryComparison
from tools.validate import rehearsal
from tools.validate.random_setups import Cell


def against_rehearsals(cells: Sequence[Cell], name: str = "H200") -> list[MemoryComparison]:
    """Compare predictions with rehearsals of rank 0 on a GPU; leave out setups with a gradient scaler."""
    cells = [replace(cell, rank=0) for cell in cells if not cell.setup.precision.needs_grad_scaler]
    return list(rehearsal.against_rehearsals(cells, rehearsed_gpu(name)))


def assert_near(comparisons: list[MemoryComparison], equal: float = 0.9) -> None:
    """Check that a share of the peaks is equal to the byte and all are within 1 %: of many drawn a few may differ."""
    assert comparisons
    for one in comparisons:
        assert one.error is None, (one.label, one.error)
        assert abs(one.peak.relative) <= 0.01, (one.label, one.peak)
    assert sum(one.peak.relative == 0 for one in comparisons) >= equal * len(comparisons)
