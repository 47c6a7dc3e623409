"""Compares predictions with rehearsals of random setups: PyTorch's CUDA allocator without a GPU."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from fsdp_bench.spec.record import RunPlan, TrialSpec
from fsdp_bench.sweep.rehearsals import rehearsals
from fsdp_bench.sweep.run.rehearsed import rehearsed_gpu
from fsdp_bench.validate.compiled_setups import draw_compiled_cells
from fsdp_bench.validate.memory import MemoryComparison, Summary, compare_with_rehearsal, summarize
from fsdp_bench.validate.random_setups import Cell, draw_cells

GPU = "H200"
"""The GPU that is rehearsed on: with enough memory for nearly all that is drawn."""


def validate_rehearsals(
    count: int, seed: int, compiled: bool = False, progress: Callable[[int, int], None] = lambda done, total: None
) -> tuple[list[MemoryComparison], Summary]:
    """Compare predictions with rehearsals of rank 0, in peak allocated by phase and in reserved memory.

    Predictions use the rates of the stand-in (rates/without_time.py). Setups with a gradient scaler are not drawn:
    gradients decide whether it skips a step, and the stand-in computes none.

    Args:
        count: number of setups to draw.
        seed: seed of the random setups.
        compiled: draw setups whose blocks are compiled.
        progress: called with the number of rehearsals that are done, and the number of all.

    Raises:
        MachineError: if this machine cannot rehearse.
    """
    gpu = rehearsed_gpu(GPU)
    cells = draw_compiled_cells(count, seed) if compiled else _draw(count, seed)
    run = RunPlan(communication_steps=0, attention="flash", emulate=True, rehearsed_on=gpu)
    specs = [
        TrialSpec(id=str(number), model=cell.model, setup=cell.setup, run=run, device="cuda")
        for number, cell in enumerate(cells)
    ]
    comparisons = []
    for cell, report in zip(cells, rehearsals(specs, gpu), strict=True):
        comparisons.append(compare_with_rehearsal(cell, report, gpu))
        progress(len(comparisons), count)
    return comparisons, summarize(comparisons, f"rehearsals on {gpu.product_name}, seed {seed}")


def _draw(count: int, seed: int) -> list[Cell]:
    """Return the first setups of a seed without a gradient scaler, each as rank 0."""
    drawn, found = count, list[Cell]()
    while len(found) < count:
        drawn *= 2
        cells = draw_cells(drawn, seed, device="cuda")
        found = [msgspec.structs.replace(cell, rank=0) for cell in cells if not cell.setup.precision.needs_grad_scaler]
    return found[:count]
