"""Drawn setups with some fields fixed, and comparisons of predictions with dry runs and rehearsals."""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from fsdp_bench.simulate.operators.kernels import CUDA_OBSERVED
from fsdp_bench.simulate.wrappers.impossible import why_impossible
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.recording.model import RecordedModel
from fsdp_bench.spec.subprocesses.dry_run import DryRunSpec, KernelSet
from fsdp_bench.sweep.dry_run import dry_runs, result_of
from fsdp_bench.sweep.run.rehearsed import rehearsed_gpu
from fsdp_bench.validate.memory import MemoryComparison
from tests.shapes import memory_of
from tools.real_tensors import real_dry_run
from tools.validate import rehearsal
from tools.validate.dry_run import compare_with_dry_run
from tools.validate.random_setups import Cell, draw_cells

OBSERVED = CUDA_OBSERVED
"""The kernels that a dry run on the fake accelerator runs, with which recorded models are compared."""


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


def assert_equals_dry_runs(cell: Cell, kernels: KernelSet, has_real_tensors: bool = False) -> None:
    """Compare the predicted peak of every phase with a dry run's, and with one on real tensors, to the byte."""
    spec = DryRunSpec(model=cell.model, setup=cell.setup, kernels=kernels, rank=cell.rank)
    for answer in (*dict(dry_runs([spec])).values(), *([real_dry_run(spec)] if has_real_tensors else [])):
        found = compare_with_dry_run(cell, answer, kernels)
        assert found.error is None, (cell.label, found.error)
        assert set(found.phases) == {"load", "forward", "loss", "backward", "optimizer"}
        assert found.is_equal, (cell.label, found.phases)


def assert_recorded_equals_dry_runs(model: RecordedModel, *specs: DryRunSpec) -> None:
    """Compare a recorded model's predicted peak of every phase with dry runs of its code, to the byte."""
    for index, answer in dry_runs(specs):
        result = result_of(answer)
        phases = memory_of(model, specs[index].setup, OBSERVED, result.rank).phases
        assert {phase: phases[phase] for phase in result.phases} == result.phases, specs[index].setup


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
