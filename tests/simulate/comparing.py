"""Drawn cells with some settings fixed, and what compares them with dry runs."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from fsdp_bench.simulate.wrappers.impossible import why_impossible
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.subprocesses.dry_run import DryRunSpec, KernelSet
from fsdp_bench.sweep.dry_run import dry_runs
from fsdp_bench.validate.memory import compare_with_dry_run
from fsdp_bench.validate.random_setups import Cell, draw_cells


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


def assert_equals_a_dry_run(cell: Cell, kernels: KernelSet) -> None:
    """Hold every phase of the prediction to the byte to PyTorch's own code as one rank of N."""
    ((_, answer),) = dry_runs([DryRunSpec(model=cell.model, setup=cell.setup, kernels=kernels, rank=cell.rank)])
    found = compare_with_dry_run(cell, answer, kernels)
    assert found.error is None, (cell.label, found.error)
    assert found.is_equal, (cell.label, found.phases)
