"""A compact version of ``fsdp-bench validate --against dry-run``: drawn cells, PyTorch's own FSDP code, to the byte."""

from __future__ import annotations

import os

import pytest

from fsdp_bench.spec.dry_run import DryRunSpec, KernelSet
from fsdp_bench.sweep.drawn_cells import draw_cells
from fsdp_bench.sweep.dry_run import dry_runs
from fsdp_bench.sweep.validation import Comparison, compare_with_dry_run, summarize, worst_first

CELLS = int(os.environ.get("FSDP_BENCH_TEST_CELLS", "20"))
"""`make validate` draws more."""


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("kernels", "seed", "count"), [("cpu", 101, CELLS), ("cuda", 102, CELLS // 2)])
def test_predicted_peaks_are_those_of_real_fsdp_without_data(kernels: KernelSet, seed: int, count: int) -> None:
    """Peak allocated equal to the byte in at least 95 % of cells, and within 0.5 % in all; every phase too."""
    cells = draw_cells(count, seed, kernels)
    specs = [DryRunSpec(model=cell.model, setup=cell.setup, kernels=kernels) for cell in cells]
    comparisons: list[Comparison] = [
        compare_with_dry_run(cells[index], answer, kernels) for index, answer in dry_runs(specs)
    ]
    summary = summarize(comparisons, "dry run")
    worst = "\n".join(f"{c.worst} {c.label}" for c in worst_first(comparisons, 5))
    failures = [c.error for c in comparisons if c.error is not None]
    assert summary.num_failed <= 0.02 * count, failures
    assert summary.peak is not None
    assert summary.num_compared == count - summary.num_failed
    assert summary.peak.num_equal >= 0.95 * summary.num_compared, worst
    assert summary.num_equal >= 0.95 * summary.num_compared, worst
    assert max(spread.worst for spread in summary.phases.values()) <= 0.005, worst


def test_the_drawn_cells_cover_what_the_model_claims() -> None:
    """The grid is the same for the same seed, and in it is every strategy, api, precision, mode and optimizer."""
    cells = draw_cells(200, 1)
    assert cells == draw_cells(200, 1)
    for field, least in (("strategy", 5), ("api", 2), ("precision", 6), ("checkpointing", 3), ("optimizer", 4)):
        assert len({str(getattr(cell.setup, field)) for cell in cells}) == least
    assert {cell.setup.world_size for cell in cells} == {1, 2, 3, 8, 64}
    assert {cell.model.hidden_size % 2 for cell in cells} == {0, 1}
    assert len({cell.setup.sequence_length for cell in cells}) >= 6
