"""A compact version of ``fsdp-bench validate --against dry-run``: drawn cells, PyTorch's own FSDP code, to the byte."""

from __future__ import annotations

import os

import pytest

from fsdp_bench.spec.dry_run import DryRunSpec, KernelSet
from fsdp_bench.spec.setup import (
    Checkpointing,
    Offload,
    OptimizerKind,
    Precision,
    ShardingStrategy,
    TrainSetup,
    Wrap,
)
from fsdp_bench.sweep.drawn_cells import WORLDS, Cell, draw_cells
from fsdp_bench.sweep.dry_run import dry_runs
from fsdp_bench.sweep.validation import Comparison, compare_with_dry_run, summarize, worst_first
from tests.predict.test_step import shape

CELLS = int(os.environ.get("FSDP_BENCH_TEST_CELLS", "12"))
"""`make validate` draws more."""


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("kernels", "seed", "count"), [("cpu", 101, CELLS), ("cuda", 102, CELLS // 2)])
def test_predicted_peaks_are_those_of_real_fsdp_without_data(kernels: KernelSet, seed: int, count: int) -> None:
    """Peak allocated equal to the byte in at least 95 % of cells, and within 0.5 % in all; every phase too."""
    cells = draw_cells(count, seed, kernels)
    specs = [DryRunSpec(model=cell.model, setup=cell.setup, kernels=kernels, rank=cell.rank) for cell in cells]
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


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("checkpointing", list(Checkpointing))
def test_copies_of_what_is_on_the_host_go_when_pytorch_lets_them_go(
    use_orig_params: bool, checkpointing: Checkpointing
) -> None:
    """FSDP1 without sharding, with offload, in the dtype that is stored: nothing frees them but their successors."""
    setup = TrainSetup(
        strategy=ShardingStrategy.NO_SHARD,
        world_size=2,
        sequence_length=64,
        precision=Precision.parse("fp32"),
        offload=Offload.PARAMS,
        checkpointing=checkpointing,
        use_orig_params=use_orig_params,
    )
    model = shape(num_hidden_layers=4, hidden_size=128, num_attention_heads=4)
    ((_, answer),) = dry_runs([DryRunSpec(model=model, setup=setup, kernels="cuda")])
    compared = compare_with_dry_run(Cell(model=model, setup=setup), answer, "cuda")
    assert compared.error is None
    assert compared.is_equal, compared.phases


def test_what_was_loaded_goes_before_the_gradient_scaler_comes() -> None:
    """The first forward's peak is with the one and without the other."""
    setup = TrainSetup(
        strategy=ShardingStrategy.NO_SHARD,
        world_size=8,
        sequence_length=8,
        precision=Precision.parse("fp16-mixed"),
        offload=Offload.PARAMS,
        checkpointing=Checkpointing.FULL,
        optimizer=OptimizerKind.SGD,
        wrap=Wrap.NONE,
        use_orig_params=False,
    )
    model = shape(num_hidden_layers=7, hidden_size=16, num_attention_heads=2, num_key_value_heads=2, vocab_size=31)
    ((_, answer),) = dry_runs([DryRunSpec(model=model, setup=setup, kernels="cuda")])
    compared = compare_with_dry_run(Cell(model=model, setup=setup), answer, "cuda")
    assert compared.error is None
    assert compared.is_equal, compared.phases


def test_the_drawn_cells_cover_what_the_model_claims() -> None:
    """The grid is the same for the same seed, and in it is every strategy, api, precision, mode and optimizer."""
    cells = draw_cells(200, 1)
    assert cells == draw_cells(200, 1)
    for field, least in (("strategy", 5), ("api", 2), ("precision", 6), ("checkpointing", 3), ("optimizer", 4)):
        assert len({str(getattr(cell.setup, field)) for cell in cells}) == least
    assert {cell.setup.world_size for cell in cells} == set(WORLDS)
    assert any(cell.rank for cell in cells)
    assert {cell.model.hidden_size % 2 for cell in cells} == {0, 1}
    assert len({cell.setup.sequence_length for cell in cells}) >= 6
