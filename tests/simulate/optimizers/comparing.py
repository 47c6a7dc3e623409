"""Drawn cells with some settings fixed, for comparisons of one optimizer with dry runs and rehearsals."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from fsdp_bench.simulate.wrappers.impossible import why_impossible
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.subprocesses.dry_run import DryRunSpec, KernelSet, TensorKind
from fsdp_bench.sweep.dry_run import dry_runs
from fsdp_bench.validate.memory import MemoryComparison, compare_with_dry_run
from fsdp_bench.validate.random_setups import Cell, draw_cells
from tests.profiles import validating

DRY_RUNS = 8 if validating() else 3
"""Drawn cells that are compared with a dry run: each takes seconds."""


def cells_with(count: int, seed: int, device: KernelSet, small: bool = False, **fixed: Any) -> list[Cell]:
    """Return drawn cells of at most three layers that can run with these fields."""
    found: dict[Cell, None] = {}
    for cell in draw_cells(30 * count, seed, device, small):
        try:
            setup = replace(cell.setup, **fixed)
        except SpecError:
            continue
        model = replace(cell.model, num_hidden_layers=min(cell.model.num_hidden_layers, 3))
        if why_impossible(model, setup, device) is None:
            found[replace(cell, model=model, setup=setup)] = None
    assert len(found) >= count
    return list(found)[:count]


def against_dry_runs(cells: list[Cell], kernels: KernelSet, tensors: TensorKind = "fake") -> list[MemoryComparison]:
    """Compare predictions with PyTorch's own code as one rank of N."""
    specs = [DryRunSpec(model=c.model, setup=c.setup, kernels=kernels, rank=c.rank, tensors=tensors) for c in cells]
    answers = dict(dry_runs(specs))
    return [compare_with_dry_run(cell, answers[index], kernels) for index, cell in enumerate(cells)]


def assert_equal(comparisons: list[MemoryComparison]) -> None:
    """Hold every phase to the byte."""
    assert comparisons
    for one in comparisons:
        assert one.error is None, (one.label, one.error)
        assert one.is_equal, (one.label, one.worst)
